"""What a user's function returns is checked before anything believes it."""

import numpy as np
import pyarrow as pa
import pytest

from sluice import Knobs, Transform
from tests.etl.tables import write_rows
from tests.open_loader import open_loader
from tests.product import ColumnError
from tests.raises import raises
from tests.run_program import last_json, run_program


@pytest.mark.parametrize("seed", [1])
def test_an_arrow_array_with_drawn_faults_is_refused_wherever_a_function_may_return_it(seed):
    done = run_program("-m", "tests.ingest.invalid_arrow", seed, check=True)
    result = last_json(done)
    assert result["wrong"] == []
    assert len(result["refused"]) == 9
    assert all(result["refused"][place] > 30 for place in result["refused"])
    assert all(result["accepted"][place] > 5 for place in result["refused"])


def point_outside(columns):
    """Lists of which one ends a billion values after the others."""
    offsets = np.arange(len(columns["row"]) + 1, dtype=np.int32)
    offsets[3] = 2**30
    values = pa.array(columns["row"].astype(np.int32))
    return {"lists": pa.ListArray.from_arrays(pa.array(offsets), values)}


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_lists_that_point_outside_of_their_values_are_an_error_with_their_rows(tmp_path, backend):
    path = tmp_path / "a.parquet"
    write_rows(path, label=[0, 1] * 500, row=range(1000))
    call = Transform(f"{__name__}:point_outside", reads=["row"], gives={"lists": "list<int32>"})
    with (
        raises(ColumnError, "row group 0", "99 other rows", "'lists'", "not valid"),
        open_loader(
            path,
            batch_size=100,
            roles={"label": "label", "id_list": "lists"},
            transforms=[call],
            knobs=Knobs(workers={"point_outside": 1}, backend={"point_outside": backend}),
        ) as loader,
    ):
        list(loader)
