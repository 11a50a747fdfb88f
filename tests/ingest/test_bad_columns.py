"""Columns and footers that are not what they seem: each an error of ours that names file, column and value."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.choices import Errors
from sluice.ingest.columns import ColumnError
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.footers import REMEMBERED
from sluice.ingest.read.parquet_files import ParquetError, ParquetFiles
from sluice.ingest.read.reader import SourceError
from sluice.ingest.row_order import Order
from tests.open_loader import open_loader

pytestmark = pytest.mark.slow

ROLES = {"label": "label", "dense": "d", "sparse": "s"}
ROWS = 64


def written(folder, **changes):
    """One file of two row groups, with some columns other than usual."""
    columns = {
        "label": pa.array([0, 1] * (ROWS // 2), pa.int8()),
        "d": pa.array(np.arange(ROWS) / 2),
        "s": pa.array(np.arange(ROWS), pa.int32()),
        **changes,
    }
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=ROWS // 2)
    return folder / "a.parquet"


def loader(folder, **options):
    return open_loader(folder, batch_size=16, roles=ROLES, **options)


def first(folder, **options):
    with loader(folder, **options) as opened:
        return next(iter(opened))


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.uint16(), pa.int64(), pa.uint64()])
def test_whole_numbers_of_any_width_are_ids_as_they_are(tmp_path, kind):
    written(tmp_path, s=pa.array(np.arange(ROWS) % 2).cast(kind))
    assert set(first(tmp_path).values.tolist()) <= {0, 1}


def test_bags_of_any_whole_numbers_and_half_floats_are_read(tmp_path):
    bags = pa.array([[n, n + 1] for n in range(ROWS)], pa.large_list(pa.uint16()))
    written(tmp_path, d=pa.array(np.arange(ROWS).astype(np.float16)), b=bags)
    with BatchLoader(
        tmp_path,
        batch_size=16,
        roles={**ROLES, "id_list": "b"},
        order=Order(shuffle=False, streams=1),
    ) as opened:
        batch = next(iter(opened))
    assert batch.dense[:3, 0].tolist() == [0, 1, 2]
    assert batch.lengths.view(2, -1)[1].tolist() == [2] * 16


def test_infinite_and_missing_numbers_stay_what_they_are_where_that_is_asked_for(tmp_path):
    written(tmp_path, d=pa.array(np.where(np.arange(ROWS) % 2, np.inf, np.nan)))
    batch = first(tmp_path, errors=Errors(finite=False))
    assert batch.dense.isinf().any()
    assert batch.dense.isnan().any()


def test_a_draft_of_what_is_remembered_follows_no_link(tmp_path, monkeypatch):
    written(tmp_path)
    target = tmp_path / "precious"
    target.write_text("precious")
    monkeypatch.setattr("sluice.ingest.read.footers.secrets.token_hex", lambda _: "known")
    (tmp_path / f"{REMEMBERED}.known.{os.getpid()}").symlink_to(target)
    ParquetFiles.open(tmp_path, ROLES)
    assert target.read_text() == "precious"


def test_a_hundred_damaged_footers_are_errors_of_ours_or_change_nothing(tmp_path):
    path = written(tmp_path)
    content, random = path.read_bytes(), np.random.default_rng(8)
    length = int.from_bytes(content[-8:-4], "little") + 8
    with loader(tmp_path, shuffle=False) as opened:
        whole = [batch.dense.numpy().tobytes() + batch.values.numpy().tobytes() for batch in opened]
    refused: list[str] = []
    for turn in range(100):
        mutated = bytearray(content)
        for at in random.integers(1, length, 1 + turn % 3):
            mutated[-at] ^= 1 << int(random.integers(8))
        path.write_bytes(mutated)
        try:
            with loader(tmp_path, shuffle=False) as opened:
                found = [
                    batch.dense.numpy().tobytes() + batch.values.numpy().tobytes()
                    for batch in opened
                ]
        except (ParquetError, SourceError, ColumnError) as error:
            refused.append(str(error))
        else:
            assert found == whole
    assert all("a.parquet" in said or "column" in said for said in refused)
    assert len(refused) > 33
