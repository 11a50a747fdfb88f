"""The table's contract, on real Delta tables made without Spark."""

from __future__ import annotations

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.commit import Base, CommitConflict, publish
from etl.shards import CommitError
from etl.small import small_table
from etl.store import Store
from etl.table import FeatureTable, TableError


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "t"
    small_table(path, rows=3000, row_group_rows=256)
    return path


@pytest.fixture
def table(original, tmp_path) -> FeatureTable:
    shutil.copytree(original, tmp_path / "t")
    return FeatureTable.open(tmp_path / "t")


def test_a_table_tells_its_fields_files_and_splits(table):
    assert [f.name for f in table.fields] == table.schema.names
    assert [f.role for f in table.fields] == ["label"] + ["dense"] * 13 + ["sparse"] * 26
    assert table.rows == 3000
    assert {s: table.rows_of(s) for s in table.splits} == {"train": 2400, "validation": 300, "test": 300}
    for file in table.files:
        footer = pq.ParquetFile(file.path).metadata
        assert footer.num_rows == file.rows == sum(file.row_group_rows)
        assert all(rows == 256 for rows in file.row_group_rows[:-1])
    assert table.check() == []


def test_an_unknown_split_names_those_there_are(table):
    with pytest.raises(TableError, match=r"no split 'tset'.*train"):
        table.files_of("tset")


def test_older_versions_stay_as_they_were_and_new_files_are_never_theirs(table):
    appended = small_table(table.uri, rows=500, first=3000, mode="append", row_group_rows=256)
    replaced = small_table(table.uri, rows=200, mode="overwrite", values=50, row_group_rows=256)
    old = FeatureTable.open(table.uri, 0)
    assert (old.files, old.fields, old.rows) == (table.files, table.fields, 3000)
    assert (appended.version, appended.rows, appended.files[:len(old.files)]) == (1, 3500, old.files)
    assert not {f.path for f in replaced.files} & {f.path for f in appended.files}
    assert [(v.version, v.mode, v.rows) for v in replaced.history()] == [
        (2, "overwrite", 200), (1, "append", 500), (0, "create", 3000)]
    assert replaced.fingerprint.layout == old.fingerprint.layout
    assert replaced.fingerprint.vocabulary != old.fingerprint.vocabulary


def test_an_orphan_is_reported_and_never_read(table):
    orphan = Path(table.files[0].path).with_name("part-99999.parquet")
    shutil.copy(table.files[0].path, orphan)
    assert FeatureTable.open(table.uri).files == table.files
    assert [p for p in table.check() if "orphan" in p and str(orphan) in p]
    assert len(table.check()) == 1


def test_files_of_other_versions_are_no_orphans(table):
    small_table(table.uri, rows=200, mode="overwrite", row_group_rows=256)
    assert FeatureTable.open(table.uri).check() == []


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("where", [0.01, 0.3, 0.6, 0.9, 0.999])
def test_check_finds_a_flipped_bit(table, where):
    path = Path(table.files[1].path)
    _flip(path, int(path.stat().st_size * where))
    assert len(problems := table.check()) == 1
    assert str(path) in problems[0]


def test_check_finds_missing_truncated_and_replaced_files(table):
    missing, truncated, replaced = (Path(f.path) for f in table.files[:3])
    missing.unlink()
    truncated.write_bytes(truncated.read_bytes()[:-100])
    columns = pq.read_table(replaced, partitioning=None)
    pq.write_table(columns.set_column(0, "label", pa.array([7] * len(columns), pa.int8())), replaced,
                   row_group_size=256)
    problems = table.check()
    assert f"{missing}: missing" in problems
    assert any(str(truncated) in p and "truncated" in p for p in problems)
    assert any(str(replaced) in p for p in problems)


def test_check_finds_ids_beyond_their_embedding(table):
    record = table.record
    low = dataclasses.replace(record, cardinalities={**record.cardinalities, "C7": 10})
    Store(table.uri).write_json(f"_sluice/jobs/{record.job}.json", low.to_json())
    assert any("'C7'" in p and "10 rows" in p for p in FeatureTable.open(table.uri).check())


def test_what_is_no_table_is_refused_in_our_words(table, tmp_path):
    with pytest.raises(TableError, match="no feature table"):
        FeatureTable.open(tmp_path / "nothing")
    with pytest.raises(TableError, match="version 7"):
        FeatureTable.open(table.uri, 7)
    Path(table.uri, "_sluice", "jobs", f"{table.record.job}.json").unlink()
    with pytest.raises(TableError, match="record is missing"):
        FeatureTable.open(table.uri)


def test_create_and_append_refuse_what_they_cannot_do(table, tmp_path):
    with pytest.raises(CommitError, match="already there"):
        small_table(table.uri)
    with pytest.raises(CommitError, match="no table to append"):
        small_table(tmp_path / "new", mode="append")


def test_a_stale_version_is_a_conflict_in_our_words(table):
    store, stale = Store(table.uri), Base.read(Store(table.uri))
    small_table(table.uri, rows=100, mode="append", first=9000)
    for mode in ("append", "overwrite"):
        record = dataclasses.replace(table.record, mode=mode, job=f"late-{mode}")
        with pytest.raises(CommitConflict, match="version 1 while this one, which started from version 0"):
            publish(store, stale, record, table.fields)
    assert FeatureTable.open(table.uri).version == 1


@pytest.mark.parametrize("there", [True, False])
def test_of_jobs_that_publish_at_once_one_lands(table, tmp_path, there):
    store = Store(table.uri if there else tmp_path / "new")
    base, start = Base.read(store), Barrier(4, timeout=30)

    def job(number: int) -> int | None:
        record = dataclasses.replace(table.record, mode="overwrite" if there else "create", job=f"job-{number}")
        start.wait()
        try:
            return publish(store, base, record, table.fields)
        except CommitConflict:
            return None

    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(job, range(4)))
    assert sorted(versions, key=str) == [1 if there else 0, None, None, None]


def test_appending_other_columns_is_refused_and_overwriting_with_them_is_not(table):
    store, base = Store(table.uri), Base.read(Store(table.uri))
    fields = tuple(dataclasses.replace(f, role="weight") if f.name == "I3" else f for f in table.fields)
    with pytest.raises(CommitError, match=r"'I3'.*overwrite"):
        publish(store, base, dataclasses.replace(table.record, mode="append", job="other"), fields)
    version = publish(store, base, dataclasses.replace(table.record, mode="overwrite", job="another"), fields)
    assert FeatureTable.open(table.uri, version).fields[3].role == "weight"
