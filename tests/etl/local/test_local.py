"""The local engine: the tests of whole jobs that Spark passes, and what is its own. Nothing here needs Java."""

import bz2
import decimal
import gzip
import os
import random
import shutil
import tempfile
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest

import tests.etl.test_bad_input as bad_input
import tests.etl.test_build as build
import tests.etl.test_log_as_it_comes as log
from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.etl.apply.row_store import RowStore, split_by_number
from sluice.etl.engines import choose
from sluice.etl.local.engine import LocalEngine
from sluice.etl.local.threads import JobEnded, Threads
from sluice.etl.read import pieces
from sluice.etl.read.input_paths import InputFile
from sluice.etl.read.pieces import pieces_of
from sluice.etl.table.new_files import CommitError
from tests.etl import jobs
from tests.etl.jobs import Said, rows_of
from tests.etl.tables import column, lines_of, put, rejects_of, write_rows, write_spec
from tests.product import (
    DriftError,
    FileBackedState,
    Hash,
    InputError,
    JobFailure,
    JobProgress,
    Spec,
    TableStore,
    UsageError,
    files_of,
    run_job,
)
from tests.raises import raises

raw, made, broken, page = build.raw, build.made, build.broken, log.page
LEFT_OUT = {
    "test_what_needs_other_rows_is_added_by_spark",
    "test_the_content_does_not_depend_on_partitions_or_on_how_the_input_is_cut",
}
globals().update(
    {
        name: test
        for module in (bad_input, build, log)
        for name, test in vars(module).items()
        if name.startswith("test_") and name not in LEFT_OUT
    }
)


@pytest.fixture(scope="session")
def spark():
    """No session: `tests.etl.jobs.on` then takes the local engine."""
    return


@pytest.mark.slow
def test_the_content_depends_neither_on_pieces_nor_threads_nor_on_what_went_to_the_disk(
    made, raw, tmp_path, monkeypatch
):
    from sluice.etl.apply import count_sums

    made_files: list[dict] = []
    real = tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile,
        "TemporaryFile",
        lambda **words: made_files.append(words) or real(**words),
    )
    monkeypatch.setattr("sluice.etl.read.input_files.PIECE_BYTES", 5000)
    monkeypatch.setattr(count_sums, "_ROWS_BEFORE_SUM", 50)
    for threads, memory, free in ((1, 1 << 34, 1 << 40), (3, 4 << 10, 1 << 40), (2, 4 << 10, 4000)):
        disk = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, disk=disk: disk)
        has_kernel = MagicMock(return_value=threads > 1)
        monkeypatch.setattr("sluice.etl.apply.compiled_lines.has_kernel", has_kernel)
        job = jobs.job_of(tmp_path / f"t{threads}", raw, text=build.TEXT)
        made_files.clear()
        local = LocalEngine(job, JobProgress(Said()), threads=threads, memory=memory)
        run_job(job, local)
        assert local._pass._done == local._pass._size
        table = FeatureTable.open(tmp_path / f"t{threads}")
        # of counts, of what was parsed, of rows, and of the sorted rows of each file
        more = 3 + len(table.files) if memory < 1 << 20 else 0
        ours = sum("prefix" in words for words in made_files)
        assert ours == more or free == 4000  # what has no room is read again
        assert (table.record.state, table.fingerprint) == (made.record.state, made.fingerprint)
        assert build.content(table) == build.content(made)


def test_of_rows_on_the_disk_each_byte_is_read_once(monkeypatch):
    """A map of the file read the whole of it for every few files of the table: 180 GB for 20 M rows."""
    store, draw, files = RowStore(0), np.random.default_rng(7), 40
    lengths, read = [], [0]
    real_write, real_read = os.pwrite, os.pread

    def counted(file: int, length: int, place: int) -> bytes:
        read[0] += length
        return real_read(file, length, place)

    monkeypatch.setattr(
        os, "pwrite", lambda *words: lengths.append(real_write(*words)) or lengths[-1]
    )
    monkeypatch.setattr(os, "pread", counted)
    # The first file has no rows.
    into = draw.integers(1, files, (9, 3000)).astype(np.int32)
    for number, numbers in enumerate(into):
        rows = pa.record_batch([pa.array(np.arange(3000) + 3000 * number)], ["row"])
        assert store.put(split_by_number(rows, numbers, files))
    for file in range(1, files):
        taken = pa.Table.from_batches(store.get(file))
        assert sorted(taken["row"].to_pylist()) == np.flatnonzero(into.ravel() == file).tolist()
    assert read[0] == sum(lengths) > 0
    assert list(store.get(0)) == []
    store.close()


@pytest.mark.slow
def test_a_vocabulary_that_spark_left_in_files_is_applied_and_added_to(made, raw, tmp_path):
    (tmp_path / "more.tsv").write_text(
        raw.read_text().replace("\t", "\tn", 5000).replace("\tn", "\t", 4000)
    )
    tables = [shutil.copytree(made.uri, tmp_path / name) for name in ("memory", "files")]
    store, state = TableStore(tables[1]), made.state()
    write_rows(store.path("_sluice/state/C1.parquet"), state["C1/0"])
    stored = replace(
        state,
        tables={**state.tables, "C1/0": FileBackedState.of(store, ["_sluice/state/C1.parquet"])},
    )
    assert stored.save(store) == made.record.state
    for mode, options in (("append", {}), ("overwrite", {"update_state": True})):
        for place in tables:
            build.run(
                None, place, raw, tmp_path / "more.tsv", mode=mode, max_rejects=1.0, **options
            )
        both = [FeatureTable.open(place) for place in tables]
        assert both[0].record.state == both[1].record.state
        assert build.content(both[0]) == build.content(both[1])


@pytest.mark.parametrize(
    ("end", "beyond"), [(b"", 1 << 16), (b"\n", 1 << 16), (b"", 0), (b"\n", 9)]
)
def test_every_line_is_in_the_piece_in_which_it_begins(tmp_path, monkeypatch, end, beyond):
    monkeypatch.setattr(
        pieces, "_BEYOND", beyond
    )  # a line that goes on beyond that is read in turns
    draw = random.Random(3)
    lines = [
        b"x" * draw.choice((0, 1, 7, 40)) + b"\r" * draw.choice((0, 0, 1)) for _ in range(60)
    ] + [b"last"]
    content = b"\xef\xbb\xbf" + b"\n".join(lines) + end
    put(tmp_path / "lines", content)
    put(tmp_path / "lines.gz", gzip.compress(content[:300]) + gzip.compress(content[300:]))
    for size in (1, 2, 3, 5, 8, 20, 41, 64, 1000):
        for name in ("lines", "lines.gz"):
            read = lines_of(pieces_of(files_of([str(tmp_path / name)]), size))
            assert read == [line + b"\n" for line in lines], (size, name)


def test_every_record_is_whole_however_its_file_is_cut(tmp_path):
    draw = random.Random(4)
    fields = (b'"a\n\r\n"', b'"""\n"', b'b"', b"", b'"c"d', b"e" * 9)
    records = [
        b",".join(draw.choices(fields, k=draw.randint(1, 3))) + draw.choice((b"\n", b"\r\n"))
        for _ in range(60)
    ]
    (tmp_path / "records").write_bytes(b"".join([*records, b'"open,\n', b'last,"f\n"']))
    for size in (1, 5, 40, 1000):
        read = lines_of(pieces_of(files_of([str(tmp_path / "records")]), size, ","))
        assert read[:60] == records, size


def test_paths_globs_and_uris_name_the_files_that_spark_would_read(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    for name in (
        "day_1.tsv",
        "day_2.tsv",
        "_notes",
        ".hidden",
        "sub/day_3.tsv",
        "sub/_tmp/day_4.tsv",
        "x=1/_y=2/f",
    ):
        put(tmp_path / name, "1")

    def names_of(*paths: str) -> list[str]:
        return [file.path.removeprefix(f"{tmp_path}/") for file in files_of(paths)]

    assert names_of(str(tmp_path)) == ["day_1.tsv", "day_2.tsv", "sub/day_3.tsv", "x=1/_y=2/f"]
    assert (
        names_of(f"{tmp_path}/*.tsv")
        == names_of(f"file://{tmp_path}/day_[12].tsv")
        == ["day_1.tsv", "day_2.tsv"]
    )
    assert names_of(f"{tmp_path}/{{day_1.tsv,sub/d*}}") == ["day_1.tsv", "sub/day_3.tsv"]
    assert files_of([f"{tmp_path}/day_1.tsv"])[0].name == f"file://{tmp_path}/day_1.tsv"
    with fsspec.open("memory://logs/a.tsv", "wb") as file:
        file.write(b"1")
    assert [file.name for file in files_of(["memory://logs/*.tsv"])] == ["memory:///logs/a.tsv"]
    for wrong in (f"{tmp_path}/day_9*", f"{tmp_path}/nothing"):
        with raises(InputError, wrong, "no file"):
            files_of([wrong])
    with raises(InputError, "/day_2.tsv:", "twice"):
        files_of([str(tmp_path), f"file://{tmp_path}/sub/../day_2.tsv"])
    with raises(InputError, "'nowhere'"):
        files_of(["nowhere://x/y"])


@pytest.mark.parametrize("name", ["gz", "bz2"])
def test_compressed_input_makes_the_same_table(made, raw, tmp_path, name):
    packed = {"gz": gzip, "bz2": bz2}[name].compress(raw.read_bytes())
    build.run(None, tmp_path / "t", put(tmp_path / f"rows.{name}", packed))
    assert build.content(FeatureTable.open(tmp_path / "t")) == build.content(made)


COLUMNS = write_spec(
    "click:int at:int price:float item:text day:text",
    column("at", "time"),
    column("price", "dense", "fill, value = -1"),
    column("item", "key"),
    form="%s",
)


def test_columns_of_other_types_become_those_of_the_spec_or_are_refused_by_name(tmp_path):
    table = pa.table(
        {
            "click": pa.array([True, False, True, None]),
            "at": pa.array([0, 1_500_000, -1, None], pa.timestamp("us", "UTC")),
            "price": pa.array([1, 2**64 - 1, None, 3], pa.uint64()),
            "item": pa.array(["a", "b", None, "c"]).dictionary_encode(),
            "day": pa.array([1, 2, 3, 4], pa.date32()),
        }
    )
    write_rows(tmp_path / "rows.parquet", table)
    result = build.run(
        None, tmp_path / "t", tmp_path / "rows.parquet", text=COLUMNS % "parquet", max_rejects=0.5
    )
    assert result.rejected == {"click: missing": 1}
    with raises(InputError, "are in", "table.unlabelled"):
        build.run(
            None,
            tmp_path / "t1",
            tmp_path / "rows.parquet",
            text=COLUMNS % "parquet",
            max_rejects=0,
        )
    rows = sorted(rows_of(tmp_path / "t"), key=lambda row: row["at"])
    assert [(row["at"], row["item"]) for row in rows] == [(-1.0, ""), (0.0, "a"), (1.0, "b")]
    # Texts of numbers, bytes of texts, and fractions in several types.
    cents = pa.array(
        [None, decimal.Decimal("9.25"), decimal.Decimal(9), None], pa.decimal128(38, 18)
    )
    stored = table.set_column(1, "at", cents)
    stored = stored.set_column(2, "price", pa.array([" 1", "2.5", "1,5", None]))
    stored = stored.set_column(3, "item", pa.array([b"a", b"b", b"\xff", b"d"]))
    write_rows(tmp_path / "rows.parquet", stored.slice(0, 3))
    result = build.run(
        *(None, tmp_path / "t2", tmp_path / "rows.parquet"),
        text=COLUMNS % "parquet",
        max_rejects=0.7,
    )
    assert result.rejected == {
        "at: not a whole number of 64 bits": 1,
        "price: not a number of 64 bits": 1,
    }
    assert [(row["price"], row["item"]) for row in rows_of(tmp_path / "t2")] == [(1.0, "a")]
    times = pa.array([0, 1, 2, 3], pa.timestamp("s"))
    write_rows(tmp_path / "rows.parquet", table.set_column(4, "day", times))
    with raises(
        InputError, "rows.parquet:", "'day'", "timestamp[ms]", "text", "seconds since 1970"
    ):
        build.run(None, tmp_path / "t3", tmp_path / "rows.parquet", text=COLUMNS % "parquet")


def test_what_is_not_asked_for_is_chosen_and_said(repo):
    said: list[str] = []
    plain, related = (
        Spec.read(repo / "features" / f"{name}.toml") for name in ("criteo", "sessions")
    )
    words = ["--spec", "s.toml", "--engine", "local", "--input", "a b"]
    for spec, environment, engine in (
        (plain, {}, "local"),
        (related, {}, "spark"),
    ):
        assert choose(None, spec, words, said.append, environment) == engine
        assert said[-1].startswith(f"engine: {engine},")
    assert "[dedup] and [[history]] and [[lag]]" in said[1]
    assert choose(None, plain, words, said.append, {"PYSPARK_GATEWAY_PORT": "1"}) == "spark"
    assert choose("local", plain, words, said.append, {}) == "local"
    assert len(said) == 2
    with pytest.raises(
        UsageError,
        match=r"\[dedup\].*; run: spark-submit .*/job\.py --spec s\.toml --input 'a b'$",
    ):
        choose("local", related, words, said.append, {})
    with pytest.raises(UsageError, match="run: sluice etl --spec"):
        choose("local", plain, words, said.append, {"PYSPARK_GATEWAY_PORT": "1"})


def halved(values: pa.Array) -> pa.Array:
    return values.slice(len(values) // 2)


def test_what_a_users_function_raises_is_one_line(tmp_path):
    text = build.TEXT.replace(
        'ops = [{op = "fill", value = 0}',
        'ops = [{op = "python", function = '
        '"tests.etl.local.test_local:halved", inputs = "number", output = "number"}, '
        '{op = "fill", value = 0}',
    )
    (tmp_path / "rows.tsv").write_text(2 * ("1" + "\t1" * 10 + "\n"))
    with pytest.raises(
        JobFailure, match=r"halved returned .* values, not an Arrow array.*; nothing was published"
    ):
        jobs.run(None, tmp_path / "t", tmp_path / "rows.tsv", text=text)


def test_threads_stop_at_their_next_step_and_begin_nothing_new():
    threads, begun, ended = Threads(2), threading.Barrier(3), threading.Barrier(3)

    def work(_number: int) -> None:
        begun.wait(60)
        try:
            while True:
                threads.check_wanted()
        finally:
            ended.wait(60)

    def wait() -> None:
        with pytest.raises(JobEnded):
            list(threads.map(work, range(9)))

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun.wait(60)
    closing = threading.Thread(target=threads.close)
    closing.start()
    ended.wait(60)  # both, and no third
    closing.join(60)
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(JobEnded):
        list(threads.map(work, [1]))


def test_rejects_are_kept_by_the_pass_that_parses_also_on_the_disk(broken, tmp_path, monkeypatch):
    opened, real, kept = [], InputFile.open, []
    monkeypatch.setattr(InputFile, "open", lambda file: opened.append(file.path) or real(file))
    for budget in (1 << 20, 0):
        monkeypatch.setattr("sluice.etl.jobs.engine._REJECTS_BYTES", budget)
        build.run(None, tmp_path / f"{budget}", broken)
        kept.append(rejects_of(FeatureTable.open(tmp_path / f"{budget}")))
    assert opened == [str(broken)] * 2
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3


def test_too_many_rejects_refuse_the_job_and_publish_nothing(broken, tmp_path):
    with raises(InputError, "3 of 1,000", "--max-rejects 0.002", "broken.tsv", "line 6"):
        build.run(None, tmp_path / "t", broken, max_rejects=0.002)
    assert not list((tmp_path / "t").rglob("*.parquet"))
    assert not (tmp_path / "t" / "_delta_log").exists()
    aside = tmp_path / "t" / "_sluice" / "rejects"
    assert len(list(aside.iterdir())) == 1
    assert list(aside.rglob("*.json"))
    (aside / "mine.json").touch()
    done = build.run(
        None, tmp_path / "t", broken
    )  # it makes the table, and removes what the refused one left
    job = FeatureTable.open(tmp_path / "t", done.version).record.job
    assert sorted(path.name for path in aside.iterdir()) == sorted([job, "mine.json"])


def test_a_job_that_is_refused_for_something_else_leaves_no_rejects(made, broken, tmp_path):
    shutil.copytree(made.uri, tmp_path / "t")
    text = build.TEXT + "\n[drift]\nnulls = {refuse = 0.0}\n"
    with pytest.raises(DriftError):
        build.run(None, tmp_path / "t", broken, text=text, mode="overwrite", update_state=True)
    assert not list((tmp_path / "t" / "_sluice" / "rejects").rglob("*.json"))


def test_a_failure_while_writing_leaves_the_old_version_and_no_files(raw, tmp_path, monkeypatch):
    old = small_table(tmp_path / "t", rows=300)

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sluice.etl.jobs.job_run.Profile.joined", full)
    with raises(OSError, "No space left"):
        build.run(None, tmp_path / "t", raw, mode="overwrite")
    table = FeatureTable.open(tmp_path / "t")
    assert (table.version, table.files) == (0, old.files)
    assert table.check() == []


def test_a_version_that_lacks_rows_is_not_published(raw, tmp_path, monkeypatch):
    write = LocalEngine.write
    monkeypatch.setattr(
        LocalEngine,
        "write",
        lambda *words: replace(whole := write(*words), files=whole.files[1:]),
    )
    with raises(CommitError, "2,000 counted"):
        build.run(None, tmp_path / "t", raw)
    assert not (tmp_path / "t" / "_delta_log").exists()


def test_rows_are_split_in_the_order_in_which_they_lie(page, tmp_path):
    """Files in the order of their names, and a line that is set aside has its place."""
    items = [f"{name}{number}" for name in "ab" for number in range(50)]
    for name in "ba":
        rows = [f"{number % 2}\t{name}{number}" for number in range(50)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(rows).replace("0\ta8\n", "broken\n") + "\n")
    inputs = (tmp_path / "b.tsv", tmp_path / "a.tsv")
    build.run(None, tmp_path / "t", *inputs, text=page[2], max_rejects=0.1)
    splits = log.splits_of(tmp_path / "t")
    ids = (
        Hash(size=1000).apply(pa.array([item for item in items if item != "a8"]), None).to_pylist()
    )
    assert [
        row["item"] for split in ("train", "validation", "test") for row in splits[split]
    ] == ids
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 79,
        "validation": 10,
        "test": 10,
    }
    with raises(InputError, "input.place", "--mode overwrite"):
        build.run(None, tmp_path / "t", tmp_path / "a.tsv", text=page[2], mode="append")
