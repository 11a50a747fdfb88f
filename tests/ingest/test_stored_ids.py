"""No id below 0 of plain Parquet comes into a batch, whatever its column's type, and however its row group is read."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.open_loader import open_loader
from tests.product import ColumnError
from tests.raises import raises

ROWS, GROUP, BATCH = 384, 128, 64
ONE_ID = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
BAGS = [
    pa.list_(pa.int8()),
    pa.list_(pa.int32()),
    pa.large_list(pa.int32()),
    pa.list_(pa.int64()),
]


def column(kind: pa.DataType, ids: np.ndarray) -> pa.Array:
    """These ids in a column of this type, in bags of two, none and one if it has bags."""
    if kind not in BAGS:
        return pa.array(ids.astype(kind.to_pandas_dtype()), kind)
    sizes = np.resize([2, 0, 1], len(ids))
    bags = [
        np.append(np.resize(ids[max(0, n - 1) : n], max(0, size - 1)), ids[n : n + min(1, size)])
        for n, size in enumerate(sizes)
    ]
    return pa.array([bag.tolist() for bag in bags], kind)


def write(folder, kind: pa.DataType, ids: np.ndarray, statistics: bool, required: bool) -> str:
    """Writes a file of row groups, and returns the roles of its columns."""
    label = np.resize(np.float32([0, 1]), ROWS)
    table = pa.table(
        {"y": label, "x": np.arange(ROWS, dtype=np.float32), "item": column(kind, ids)}
    )
    if required:  # one id of 4 bytes stays stored until its row is moved
        table = table.cast(pa.schema([f.with_nullable(False) for f in table.schema]))
    pq.write_table(table, folder / "a.parquet", row_group_size=GROUP, write_statistics=statistics)
    return f"label=y;dense=x;{'id_list' if kind in BAGS else 'sparse'}=item"


@pytest.mark.parametrize(
    ("spread", "statistics"), [(2, False), (60, False), (2**31 - 1, False), (60, True)]
)
@pytest.mark.parametrize("kind", [*ONE_ID, *BAGS], ids=str)
def test_an_id_below_0_is_refused_with_its_row(tmp_path, kind, spread, statistics):
    most = min(spread, 100) if "int8" in str(kind) or kind == pa.int16() else spread
    ids = np.random.default_rng(len(str(kind))).integers(0, most, ROWS)
    ids[300] = -3  # row 44 of row group 2; its bag has only this id if there are bags
    if kind in BAGS:
        ids[301] = 1
    roles = write(tmp_path, kind, ids, statistics, required=spread == 60)
    with (
        raises(ColumnError, "a.parquet, row group 2, row 44", "'item'", "-3", "hash"),
        open_loader(str(tmp_path / "a.parquet"), roles=roles, batch_size=BATCH) as loader,
    ):
        list(loader)
