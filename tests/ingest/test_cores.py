"""`cores=`: a limit that the loader's threads and processes keep, whatever the tuner does."""

import os
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Knobs, Loader, Transform
from tests.ingest.transform_functions import cores_here
from tests.product import Limits, LoaderError, Machine

ALLOWED = sorted(os.sched_getaffinity(0))
ROLES = "label=y;sparse=x;dense=z,cores"


@pytest.fixture
def table(tmp_path):
    numbers = np.arange(4096)
    columns = {"x": numbers, "y": numbers % 2, "z": numbers / 7}
    pq.write_table(pa.table(columns), tmp_path / "part.parquet", row_group_size=256)
    return str(tmp_path / "*.parquet")


def _load(table, backend, **options):
    """Returns the dense columns of an epoch, whose last one says on how many cores the function ran."""
    function = Transform(cores_here, reads=["x"], gives={"cores": "float32"})
    knobs = Knobs(workers={"decode": 2, "cores_here": 2}, backend={"cores_here": backend})
    loader = Loader(
        table, batch_size=64, roles=ROLES, transforms=[function], knobs=knobs, **options
    )
    with loader:
        return np.concatenate([batch.dense.numpy() for batch in loader])


@pytest.mark.skipif(len(ALLOWED) < 2, reason="takes two cores")
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_functions_run_on_no_more_cores_and_rows_stay_the_same(table, backend):
    free, kept = _load(table, backend), _load(table, backend, cores=1)
    assert set(free[:, 1]) == {len(ALLOWED)}
    assert set(kept[:, 1]) == {1}
    assert (free[:, 0] == kept[:, 0]).all()
    assert sorted(os.sched_getaffinity(0)) == ALLOWED, "the trainer's thread keeps all cores"


@pytest.mark.parametrize("cores", [0, -1, "2", 1.5])
def test_other_numbers_of_cores_are_refused(table, cores):
    with pytest.raises(LoaderError, match="cores"):
        _load(table, "thread", cores=cores)


def test_ranks_get_other_cores_and_more_than_there_are_is_no_limit(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 5, 7, 11})
    chosen = [Machine().some_cores(2, rank) for rank in range(5)]
    assert chosen == [{2, 3}, {5, 7}, {2, 11}, {3, 5}, {7, 11}]
    assert all(not a & b for a, b in pairwise(chosen))
    assert Machine().some_cores(5, 0) == Machine().some_cores(None, 0) == set()


def test_the_tuner_knows_the_limit(table):
    with Loader(table, batch_size=64, roles="label=y;sparse=x;dense=z", cores=1) as loader:
        assert loader.limits.cores == 1
        assert Limits.from_dict(loader.limits.to_dict()) == loader.limits
