"""`sluice pack` writes the same rows in the same order, so that a loader reads them as they are stored."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice.common.errors import UsageError
from sluice.ingest.read.pages import StoredColumns
from sluice.ingest.read.parquet_files import find_files
from sluice.tools.pack import main
from tests import lake_tables
from tests.open_loader import open_loader
from tests.raises import raises


@pytest.fixture(scope="module", autouse=True)
def threads():
    lake_tables.start_threads_of_iceberg()


def rows_of(source):
    """The rows in the order of the files, in the columns of the table or of the first file."""
    found = find_files(source)
    tables = [
        located.table(pq.read_table(path, partitioning=None), list(located.constants))
        for path, located in found.located(None).items()
    ]
    names = found.table.schema.names if found.table else tables[0].column_names
    return pa.concat_tables([table.select(names) for table in tables])


@pytest.mark.parametrize("kind", lake_tables.KINDS)
def test_packed_rows_are_the_same_for_every_reader(tmp_path, kind):
    name = lake_tables.make(kind, tmp_path / "t", lake_tables.clicks(1), lake_tables.clicks(2))
    source, out = f"{name}@v0" if kind.startswith("delta") else name, str(tmp_path / "out")
    want = rows_of(source)
    done = main([source, out])
    files = [f"{out}/{name}" for name in sorted(os.listdir(out))]
    assert rows_of(out).equals(want)
    size = sum(map(os.path.getsize, files))
    assert done == {"files": len(files), "rows": len(want), "bytes": size}
    assert pd.read_parquet(out).equals(want.to_pandas())
    for reader in filter(find_spec, ("polars", "duckdb")):
        assert len(import_module(reader).read_parquet(files)) == len(want)


def test_packed_columns_stay_stored_until_they_are_moved(tmp_path, monkeypatch):
    rows = pa.table(
        {
            "click": pa.array([n % 3 for n in range(4000)], pa.int32()),
            "id": pa.array(range(4000), pa.int64()),
            "word": [f"text {n % 5}" for n in range(4000)],
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=1000, compression="brotli")
    stored, fetch = [], StoredColumns.fetch

    def noted(self, *about):
        stored.append(fetch(self, *about))
        return stored[-1]

    main([f"{tmp_path}/a.parquet", f"{tmp_path}/out"])
    monkeypatch.setattr(StoredColumns, "fetch", noted)
    with open_loader(f"{tmp_path}/out", batch_size=1000, roles="label=click;sparse=id") as loader:
        assert sum(batch.rows for batch in loader) == 4000
    assert [set(read.stored) for read in stored] == [{"click", "id"}] * 4
    group = pq.ParquetFile(f"{tmp_path}/out/part-00000000.parquet").metadata.row_group(0)
    assert [group.column(n).has_dictionary_page for n in range(3)] == [True, False, True]
    assert group.column(1).compression == "UNCOMPRESSED"


def test_nothing_is_visible_before_all_files_are_written(tmp_path, monkeypatch):
    for number in range(2):
        pq.write_table(lake_tables.clicks(number), tmp_path / f"{number}.parquet")
    out, whole = tmp_path / "new" / "out", []

    def fails(draft, target):
        whole.append((target.exists(), len(pq.read_table(draft))))
        raise OSError("no room")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="no room"):
        main([f"{tmp_path}/*.parquet", str(out)])
    assert whole == [(False, 600)]
    assert os.listdir(out.parent) == []


def test_what_cannot_be_packed_is_refused_by_name(tmp_path):
    path, out = tmp_path / "day=1" / "a.parquet", f"{tmp_path}/out"
    path.parent.mkdir()
    feature = small_table(tmp_path / "feature").uri
    pq.write_table(lake_tables.clicks(1), path, write_page_checksum=True)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    (tmp_path / "c.parquet").write_bytes(damaged)
    for source, target, facts in (
        (path, path.parent, ("day=1", "does not exist yet")),
        (feature, out, (feature, 'layout = "speed"')),
        (path, out, ("a.parquet", "2 columns", "'day'")),
        (tmp_path / "c.parquet", out, ("c.parquet", "damaged")),
    ):
        with raises(UsageError, *facts):
            main([str(source), str(target)])
    assert not os.path.exists(out)
