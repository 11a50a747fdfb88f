"""The table's contract, on real Delta tables made without Spark."""

import json
import os
import shutil
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.etl.__main__ import main
from sluice.etl.table.new_files import CommitError
from tests.etl.tables import put
from tests.product import (
    Base,
    CommitConflict,
    Pin,
    StoreError,
    TableError,
    TableFilesError,
    TableStore,
    describe_table,
    publish,
    vacuum,
)
from tests.raises import raises


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
    assert {s: table.rows_of(s) for s in table.splits} == {
        "train": 2400,
        "validation": 300,
        "test": 300,
    }
    for file in table.files:
        footer = pq.ParquetFile(file.path).metadata
        assert footer.num_rows == file.rows == sum(file.row_group_rows)
        assert all(rows == 256 for rows in file.row_group_rows[:-1])
    assert table.check() == []


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_version_may_be_in_the_name(command, table, capsys):
    newest = table.version
    assert main([command, f"{table.uri}@v{newest}"])["version"] == newest
    assert FeatureTable.open(f"{table.uri}@v{newest}").uri == table.uri
    with raises(TableError, f"no version {newest + 7}"):
        main([command, f"{table.uri}@v{newest + 7}"])
    with raises(TableFilesError, f"@v{newest}", f"version={newest + 1}"):
        main([command, f"{table.uri}@v{newest}", "--version", str(newest + 1)])


def foreign(folder: Path) -> Path:
    write_deltalake(folder, pa.table({"label": [0, 1], "x": [0.5, 1.5]}))
    return folder


@pytest.mark.parametrize("command", ["show", "check", "vacuum"])
@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (foreign, ("Delta table", "another program", "role", "spec")),
        (Path.mkdir, ("no feature table", "no _delta_log", "`sluice etl`")),
        (
            lambda path: (path / "_delta_log").mkdir(parents=True),
            ("no feature table", "_delta_log holds no version", "`sluice etl`"),
        ),
        (Path.touch, ("a file", "`sluice etl`")),
        (lambda path: None, ("no feature table", "no such folder", "`sluice etl`")),
    ],
)
def test_what_is_no_feature_table_is_one_sentence_with_what_to_do(tmp_path, command, make, facts):
    make(tmp_path / "x")
    with raises(TableError, *facts) as raised:
        main([command, str(tmp_path / "x")])
    assert str(raised.value).startswith(f"{tmp_path / 'x'}: ")
    assert "_sluice" not in str(raised.value)


def test_a_file_that_another_program_added_to_a_feature_table_is_named(table):
    root = Path(table.uri)
    name = "part-of-another.parquet"
    shutil.copy(table.files[0].path, root / name)
    add = {
        "path": name,
        "partitionValues": {"split": "train"},
        "size": (root / name).stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
    }
    (root / "_delta_log" / f"{1:020}.json").write_text(json.dumps({"add": add}))
    with raises(TableError, f"{name}:", "job record"):
        FeatureTable.open(root)


def test_older_versions_stay_as_they_were_and_new_files_are_never_theirs(table):
    appended = small_table(table.uri, rows=500, first=3000, mode="append", row_group_rows=256)
    replaced = small_table(table.uri, rows=200, mode="overwrite", values=50, row_group_rows=256)
    old = FeatureTable.open(table.uri, 0)
    assert (old.files, old.fields, old.rows) == (table.files, table.fields, 3000)
    assert (appended.version, appended.rows, appended.files[: len(old.files)]) == (
        1,
        3500,
        old.files,
    )
    assert appended.record.version == 1, "of the newest job, as long as its files are there"
    assert not {f.path for f in replaced.files} & {f.path for f in appended.files}
    assert [(v.version, v.mode, v.rows) for v in replaced.history()] == [
        (2, "overwrite", 200),
        (1, "append", 500),
        (0, "create", 3000),
    ]
    assert [(v.version, v.mode, v.rows) for v in old.history()] == [(0, "create", 3000)]
    assert (old.check(), replaced.check()) == ([], [])  # files of other versions are no orphans
    assert replaced.fingerprint.layout == old.fingerprint.layout
    assert replaced.fingerprint.vocabulary != old.fingerprint.vocabulary


def test_an_orphan_is_reported_and_never_read(table):
    orphan = Path(table.files[0].path).with_name("part-99999.parquet")
    shutil.copy(table.files[0].path, orphan)
    assert FeatureTable.open(table.uri).files == table.files
    assert [p for p in table.check() if "orphan" in p and str(orphan) in p]
    assert len(table.check()) == 1


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("where", [0.01, 0.6, 0.999])
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
    pq.write_table(
        columns.set_column(0, "label", pa.array([7] * len(columns), pa.int8())),
        replaced,
        row_group_size=256,
    )
    problems = table.check()
    assert f"{missing}: missing" in problems
    assert any(str(truncated) in p and "truncated" in p for p in problems)
    assert any(str(replaced) in p for p in problems)


def test_check_finds_ids_beyond_their_embedding(table):
    record = table.record
    low = replace(record, cardinalities={**record.cardinalities, "C7": 10})
    TableStore(table.uri).write_json(f"_sluice/jobs/{record.job}.json", low.to_json())
    assert any("'C7'" in p and "10 rows" in p for p in FeatureTable.open(table.uri).check())


def test_a_version_without_its_record_is_refused_by_name(table):
    Path(table.uri, "_sluice", "jobs", f"{table.record.job}.json").unlink()
    with raises(TableError, f"{table.record.job}.json:", "record"):
        FeatureTable.open(table.uri)


def test_create_and_append_refuse_what_they_cannot_do(table, tmp_path):
    with raises(CommitError, table.uri, "already"):
        small_table(table.uri)
    with raises(CommitError, "new:", "append"):
        small_table(tmp_path / "new", mode="append")


def test_a_stale_version_is_a_conflict_in_our_words(table):
    store, stale = store_and_base(table)
    small_table(table.uri, rows=100, mode="append", first=9000)
    record = replace(table.record, mode="overwrite", job="late")
    with raises(CommitConflict, table.uri, "version 1", "version 0"):
        publish(store, stale, record, table.fields)
    assert FeatureTable.open(table.uri).version == 1


def store_and_base(table: FeatureTable) -> tuple[TableStore, Base]:
    return (store := TableStore(table.uri)), Base.read(store)


def record_of(table, job, mode, state=None):
    """A job that was applied with `state` and, unless it is another, left it as it was."""
    parent = table.record.state
    files = tuple(
        replace(f, path=f.path.replace(table.record.job, job)) for f in table.record.files
    )
    shutil.copytree(Path(table.uri, "data", table.record.job), Path(table.uri, "data", job))
    TableStore(table.uri).write_json(f"_sluice/state/{state}/state.json", {})
    return replace(
        table.record, mode=mode, job=job, files=files, parent=parent, state=state or parent
    )


@pytest.mark.parametrize(
    ("jobs", "landing"),
    [
        ((("append", None), ("append", None)), 2),  # neither learned anything: both land
        ((("append", None), ("append", "more")), None),  # an append and an update
        (
            (("append", "more"), ("append", "other")),
            1,
        ),  # two updates could give one id to two values
        ((("append", "more"), ("append", "more")), 1),  # counts of equal rows would be in it once
        ((("overwrite", "more"), ("append", None)), None),
        ((("overwrite", "more"), ("overwrite", "other")), 1),
    ],
)
def test_of_two_jobs_at_once_both_land_or_one_is_told(table, jobs, landing):
    (store, base), start = store_and_base(table), Barrier(2, timeout=60)
    records = [record_of(table, f"job-{i}", mode, state) for i, (mode, state) in enumerate(jobs)]

    def job(record) -> int | None:
        start.wait()
        try:
            return publish(store, base, record, table.fields)
        except CommitConflict:
            return None

    with ThreadPoolExecutor(2) as pool:
        versions = list(pool.map(job, records))
    landed = sorted(v for v in versions if v is not None)
    assert landed == list(range(1, len(landed) + 1))
    assert len(landed) == (landing or len(landed)) >= 1
    now = FeatureTable.open(table.uri)
    states = {v.job: v for v in now.history()}
    assert states.keys() >= {r.job for r, v in zip(records, versions, strict=True) if v is not None}
    # Whoever came second was applied with the state that the first left, or is not there.
    if len(landed) == 2:
        first, second = (
            record
            for _, record in sorted(zip(versions, records, strict=True), key=lambda pair: pair[0])
        )
        assert second.parent == first.state
    assert len({f.path for f in now.files}) == len(now.files)


def test_of_two_appends_with_histories_the_second_runs_again(table):
    """What it knew of earlier rows, and what it leaves for the next append, lacks the rows of the first."""
    store, base = store_and_base(table)
    first, second = (
        replace(record_of(table, f"job-{number}", "append"), tails=True) for number in range(2)
    )
    assert publish(store, base, first, table.fields) == 1
    with raises(CommitConflict, table.uri, "version 1", "version 0"):
        publish(store, base, second, table.fields)
    now = FeatureTable.open(table.uri)
    assert (now.version, now.records.keys() & {"job-0", "job-1"}) == (1, {"job-0"})
    assert publish(store, Base.read(store), second, table.fields) == 2


def test_no_commit_removes_the_log_of_an_older_version(table):
    """A pinned version is read by it, however old it is."""
    expired = {"delta.checkpointInterval": "1", "delta.logRetentionDuration": "interval 0 seconds"}
    DeltaTable(table.uri).alter.set_table_properties(expired)
    for number in (1, 2):
        small_table(table.uri, rows=100, mode="append", first=9000 * number)
    logs = {path.name for path in Path(table.uri, "_delta_log").glob("*[0-9].json")}
    assert logs >= {f"{version:020}.json" for version in (1, 2, 3)}


@pytest.mark.parametrize("lost", ["data/20200101T000000-dead", "_sluice/state/more"])
def test_a_job_of_which_a_vacuum_has_taken_files_publishes_nothing(table, lost):
    """It takes them if the job has run for more than a day, or for a clock that is as wrong."""
    store = TableStore(table.uri)
    record = record_of(table, "20200101T000000-dead", "append", "more")
    shutil.rmtree(store.path(lost))
    with raises(CommitConflict, lost, "vacuum"):
        publish(store, Base.read(store), record, table.fields)
    assert FeatureTable.open(table.uri).version == 0


def test_a_commit_that_landed_although_an_error_was_reported_is_no_conflict(table, monkeypatch):
    from sluice.etl.table import commit

    (store, base), real = store_and_base(table), commit._commit

    def lands_and_fails(*args):
        real(*args)
        raise commit.CommitFailedError("the answer was lost")

    monkeypatch.setattr(commit, "_commit", lands_and_fails)
    # The clock was set back, so this job's name comes before the other's.
    assert publish(store, base, record_of(table, "0lost", "append"), table.fields) == 1
    assert FeatureTable.open(table.uri).files[: len(table.files)] == table.files


DAY_S = 86_400.0


def all_files(table) -> set[str]:
    return {
        str(p.relative_to(table.uri))
        for p in Path(table.uri).rglob("*")
        if p.is_file() and "_delta_log" not in p.parts
    }


def test_vacuum_keeps_what_kept_and_pinned_versions_need(table):
    store, uri = TableStore(table.uri), table.uri
    for number in range(1, 5):
        small_table(uri, rows=100, mode="overwrite", first=number * 1000)
    later = time.time() + 30 * DAY_S
    Pin(name="trainer", version=1, expires=later + 60).save(store)
    Pin(name="gone", version=2, expires=later - 1).save(store)
    orphan = Path(uri, "data/20200101T000000-dead/split=train/a.parquet")
    put(orphan, "left behind")
    tails = [
        f"_sluice/serving/{FeatureTable.open(uri, version).record.job}/lag/part-0.parquet"
        for version in (1, 2)
    ]
    for path in tails:
        store.write(path, b"tails")
    before = all_files(table)
    tried = vacuum(store, keep=2, now=later, dry_run=True)
    assert all_files(table) == before
    done = vacuum(store, keep=2, now=later)
    assert (done.files, done.kept_versions, done.pinned) == (tried.files, (1, 3, 4), (1,))
    assert before - all_files(table) == set(done.files)
    are_records = [path.startswith("_sluice/jobs/") for path in done.files]
    assert are_records == sorted(are_records), "a killed vacuum leaves no file without its record"
    assert not orphan.parent.exists()
    assert {*tails} & all_files(table) == {tails[0]}
    for version in (1, 3, 4):
        assert FeatureTable.open(uri, version).check() == []
    assert [v.version for v in FeatureTable.open(uri).history()] == [4, 3, 1]
    with raises(TableError, "record", "vacuum"):
        FeatureTable.open(uri, 2)
    assert vacuum(store, keep=2, now=later).files == ()
    Pin(name="trainer", version=1, expires=0).release(store)
    assert vacuum(store, keep=2, now=later).kept_versions == (3, 4)


def test_vacuum_ends_where_every_kept_version_is_pinned(table):
    store, now = TableStore(table.uri), time.time()
    Pin(name="trainer", version=0, expires=now + 60).save(store)
    done = vacuum(store, keep=1, now=now)
    assert (done.kept_versions, done.pinned, done.files) == ((0,), (0,), ())


def test_vacuum_leaves_files_and_files_of_jobs_that_are_younger_than_a_day(table):
    small_table(table.uri, rows=100, mode="overwrite", first=5000)
    young = put(Path(table.uri, "data/20200101T000000-dead/split=train/a.parquet"), "")
    for path in filter(Path.is_file, Path(table.uri).rglob("*")):
        os.utime(path, (0, 0))  # of jobs that began a moment ago
    put(young, "written a moment ago")
    store, now = TableStore(table.uri), time.time()
    assert vacuum(store, keep=1, now=now + DAY_S / 2).files == ()
    assert len(vacuum(store, keep=1, now=now + 2 * DAY_S).files) > 1


@pytest.mark.parametrize(
    "level",
    [
        "data",
        "data/JOB",
        "data/JOB/split=train",
        "_sluice",
        "_sluice/jobs",
        "_sluice/rejects",
        "_sluice/rejects/JOB",
        "_sluice/serving/JOB/deep",
    ],
)
def test_vacuum_follows_no_link_out_of_the_table(table, tmp_path, level):
    """Whatever folder of the table is a link, and whatever lies behind it under names that jobs give."""
    job, uri, outside = "20200101T000000-deadbeef", Path(table.uri), tmp_path / "outside"
    linked = uri / level.replace("JOB", job)
    if linked.exists():  # its content goes along, so that the table can still be read
        linked.rename(outside)
    precious = [
        f"{job}.json",
        f"{job}/split=train/part-0.parquet",
        "split=train/part-0.parquet",
        "part-0.parquet",
        f"{job}/part-0.json",
        "part-0.json",
        f"jobs/{job}.json",
        f"state/{job}/part-0.parquet",
    ]
    for name in precious:
        put(outside / name, "mine")
    (outside / f"{job}/empty").mkdir()
    linked.parent.mkdir(parents=True, exist_ok=True)
    linked.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    done = vacuum(TableStore(uri), keep=1, now=2e9)
    assert sorted(outside.rglob("*")) == before
    assert done.passed_over == (str(linked.relative_to(uri)),)
    assert FeatureTable.open(uri).rows == 3000


def test_vacuum_removes_nothing_that_readers_cannot_be_told_of(table, tmp_path):
    """What is about to go is said in `_sluice`, which is a link here."""
    uri = Path(table.uri)
    old = put(uri / "data/20200101T000000-deadbeef/split=train/part-0.parquet", "a job's")
    (uri / "_sluice").rename(tmp_path / "outside")
    (uri / "_sluice").symlink_to(tmp_path / "outside")
    with raises(StoreError, "_sluice", "link", "nothing was removed"):
        vacuum(TableStore(uri), keep=1, now=2e9)
    assert old.exists()


def test_vacuum_removes_what_jobs_wrote_and_names_the_rest(table, tmp_path):
    uri, store, job = Path(table.uri), TableStore(table.uri), "20200101T000000-deadbeef"
    kept = put(tmp_path / "kept.parquet", "mine")
    folder = uri / "data" / job / "split=train"
    of_jobs = ("part-0.parquet", ".part-0.parquet.crc", f"part-1.parquet.{'a' * 32}.draft")
    for name in of_jobs:
        put(folder / name, "a job's")
    (folder / "link.parquet").symlink_to(kept)
    others = {
        f"data/{job}/notes.md",
        "data/notes/split=train/a.parquet",
        "_sluice/jobs/list.txt",
        "_sluice/rejects/mine.json",
    }
    for name in others:
        put(uri / name, "mine")
    done = vacuum(store, keep=1, now=2e9)
    assert set(done.files) == {f"data/{job}/split=train/{name}" for name in of_jobs}
    assert set(done.passed_over) == others | {f"data/{job}/split=train/link.parquet"}
    assert all((uri / name).read_text() == "mine" for name in others)
    assert (kept.read_text(), (folder / "link.parquet").is_symlink()) == ("mine", True)


def test_vacuum_stops_where_the_log_is_a_link_or_a_kept_record_is_damaged(table, tmp_path):
    uri, store = Path(table.uri), TableStore(table.uri)
    small_table(uri, rows=60, mode="overwrite", first=9000)
    record, before = uri / "_sluice" / "jobs" / f"{table.record.job}.json", all_files(table)
    record.write_bytes(record.read_bytes()[:-9])
    with raises(TableError, f"{record}:"):
        vacuum(store, keep=2, now=2e9)
    (uri / "_delta_log").rename(tmp_path / "log")
    (uri / "_delta_log").symlink_to(tmp_path / "log")
    with raises(StoreError, f"{uri}/_delta_log:", "link"):
        vacuum(store, keep=1, now=2e9)
    assert all_files(table) == before


def test_a_link_that_appears_while_vacuum_removes_is_not_followed(table, tmp_path, monkeypatch):
    """The folder becomes a link between the look at it and the removal."""
    uri, job = Path(table.uri), "20200101T000000-deadbeef"
    outside, folder = tmp_path / "outside", uri / "data" / job / "split=train"
    for place in (outside / "split=train", folder):
        put(place / "part-0.parquet", "mine")

    def swap(self, path, remove=TableStore.remove):
        if not folder.parent.is_symlink():
            shutil.rmtree(folder.parent)
            folder.parent.symlink_to(outside)
        remove(self, path)

    monkeypatch.setattr(TableStore, "remove", swap)
    done = vacuum(TableStore(uri), keep=1, now=2e9)
    assert (outside / "split=train" / "part-0.parquet").read_text() == "mine"
    assert (done.files, done.passed_over) == ((), (f"data/{job}/split=train/part-0.parquet",))


def test_what_is_written_beside_a_table_follows_no_planted_link(table, tmp_path, monkeypatch):
    store, other = TableStore(table.uri), put(tmp_path / "other", "mine")
    Path(table.uri, "_sluice", "pins").mkdir()
    Path(table.uri, "_sluice", "pins", "reader.json").symlink_to(other)
    Pin(name="reader", version=0, expires=3e9).save(store)  # the link is replaced
    assert (other.read_text(), Path(table.uri, "_sluice", "pins", "reader.json").is_symlink()) == (
        "mine",
        False,
    )
    Pin(name="reader", version=0, expires=0).release(store)
    # Even one who knew the draft's name could not have it written through a link, nor keep what another wrote there.
    number = uuid.UUID(int=7)
    monkeypatch.setattr("sluice.etl.table.local_folder.uuid.uuid4", lambda: number)
    Path(table.uri, f"x.json.{number.hex}.draft").symlink_to(other)
    with pytest.raises(FileExistsError):
        store.write("x.json", b"{}")
    (tmp_path / "elsewhere").mkdir()
    Path(table.uri, "linked").symlink_to(tmp_path / "elsewhere")
    for change in (
        lambda: store.write("linked/x.json", b"{}"),
        lambda: store.remove("linked/x.json"),
        lambda: store.write("../x.json", b"{}"),
    ):
        with pytest.raises(OSError, match=r"linked|\.\."):
            change()
    assert (other.read_text(), list((tmp_path / "elsewhere").iterdir())) == ("mine", [])


def test_what_is_written_is_on_the_disk_before_it_has_its_name(table, monkeypatch):
    there: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: there.append(Path(table.uri, "x.json").exists()))
    TableStore(table.uri).write("x.json", b"{}")
    assert there == [False]


def test_a_pin_that_cannot_be_read_stops_vacuum(table):
    store = TableStore(table.uri)
    store.write("_sluice/pins/bad.json", b"{")
    with raises(StoreError, "bad.json:", "pin"):
        vacuum(store, keep=1, now=time.time())
    with raises(StoreError, "pin name"):
        Pin(name="a/b", version=1, expires=1.0)


def test_a_table_is_shown_as_text(table):
    assert "rate 0." in describe_table(table)


def test_appending_other_columns_is_refused_and_overwriting_with_them_is_not(table):
    store, base = store_and_base(table)
    fields = tuple(replace(f, role="weight") if f.name == "I3" else f for f in table.fields)
    with raises(CommitError, "'I3'", "overwrite"):
        publish(store, base, replace(table.record, mode="append", job="other"), fields)
    version = publish(store, base, replace(table.record, mode="overwrite", job="another"), fields)
    assert FeatureTable.open(table.uri, version).fields[3].role == "weight"
