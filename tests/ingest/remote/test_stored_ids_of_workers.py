"""No id below 0 of plain Parquet comes into a batch where a worker reads its row group."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sluice.ingest.columns import ColumnError
from sluice.ingest.loader import BatchLoader
from sluice.ingest.remote.unit import RemoteError
from tests.ingest.test_stored_ids import BAGS, BATCH, ROWS, write
from tests.raises import raises


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), BAGS[1], BAGS[3]], ids=str)
def test_an_id_below_0_is_refused_where_a_worker_reads_it(tmp_path, kind):
    ids = np.arange(ROWS) % 100
    ids[300], ids[301] = -3, 1
    roles = write(tmp_path, kind, ids, statistics=False)
    with (
        raises((ColumnError, RemoteError), "a.parquet, row group 2, row 44", "'item'", "-3"),
        BatchLoader(
            str(tmp_path / "a.parquet"), roles=roles, batch_size=BATCH, workers="local:1"
        ) as loader,
    ):
        list(loader)
