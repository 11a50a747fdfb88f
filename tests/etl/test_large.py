"""Vocabularies that neither the driver nor a worker may hold: kept in files, met by a join, the same to the last id."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice.etl.jobs.job import Job
from sluice.etl.ops.hashing import hash_texts
from sluice.etl.spark.explain import explain
from sluice.etl.spark.fit import _count_rows
from sluice.etl.spark.vocabulary.join import KnownPlaces
from sluice.etl.spark.vocabulary.strategy import HELD, JOIN
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import StateError
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable
from sluice.etl.table.vacuum import vacuum
from tests.etl.jobs import Said, alike, build_table, in_one_process, rows_of, run
from tests.etl.local.test_engines import alike as alike_tables
from tests.etl.tables import column, columns_of, section, write_rows, write_spec
from tests.raises import raises

pytestmark = pytest.mark.spark

TEXT = write_spec(
    "click:int item:text tags:texts",
    column("item", "sparse", 'categorify, oov = 2, joint = "i"'),
    column(
        "tags",
        "id_list",
        'first_x, size = 3; categorify, oov = 2, joint = "i"; first_x, size = 2, last = true',
    ),
    column("few", "sparse", "categorify, oov = 3, min_count = 2, max_size = 9", "item"),
    column("seen", "dense", "categorify, min_count = 3; count; fill", "item"),
)
TINY = 128 * 20  # the driver may collect 20 values, a worker hold 40


def rows(seed: int, most: int) -> pa.Table:
    """A third of the items are one and the same, some are missing; lists are empty, null, or hold what no item is."""
    generator = np.random.default_rng(seed)
    count = 700
    items = [
        None if v % 17 == 0 else "i1" if v % 3 == 0 else f"i{v}"
        for v in generator.integers(0, most, count)
    ]
    tags = [
        None
        if n == 5
        else [None if v == 3 else f"i{v}" for v in generator.integers(0, 2 * most, n)]
        for n in generator.integers(0, 6, count)
    ]
    return pa.table(
        {
            "click": pa.array(generator.integers(0, 2, count)),
            "item": pa.array(items, pa.string()),
            "tags": pa.array(tags, pa.list_(pa.string())),
        }
    )


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("large") / "rows.parquet"
    write_rows(path, rows(1, 200))
    return path


@pytest.fixture(scope="module")
def made(spark, raw, tmp_path_factory) -> tuple[FeatureTable, FeatureTable, str]:
    """The same job on the local engine with room for all, and on Spark with next to none; what the second said."""
    folder, said, counted = tmp_path_factory.mktemp("tables"), Said(), []
    run(None, folder / "all", raw, text=TEXT)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "sluice.etl.spark.fit._count_rows",
            lambda raw, level, state: counted.append(level) or _count_rows(raw, level, state),
        )
        result = run(spark, folder / "none", raw, text=TEXT, worker_bytes=TINY, said=said)
    assert counted == [0, 1]  # one pass for each level
    assert result.ways == {"few/0": JOIN, "joint/i": JOIN, "seen/0": HELD}
    assert not spark.sparkContext._jsc.getPersistentRDDs()
    assert not list(folder.rglob("places"))  # what the tasks requested is removed
    return FeatureTable.open(folder / "all"), FeatureTable.open(folder / "none"), said.text


def test_rows_meet_a_vocabulary_in_files_as_they_meet_one_in_memory(made, raw):
    memory, files, said = made
    assert rows_of(files) == rows_of(memory)  # row by row, in order
    assert files.fields == memory.fields
    assert "joint/i: shuffle join" in said
    columns = pq.read_table(raw)
    alike(
        rows_of(files),
        in_one_process(TEXT, files, columns_of(columns)),
    )
    layouts = [
        str(pq.ParquetFile(t.files[0].path).schema).splitlines()[1:] for t in (memory, files)
    ]
    assert layouts[0] == layouts[1]  # so no column may hold nulls


def test_a_state_has_one_name_wherever_its_tables_lie(made):
    states = [table.state() for table in made[:2]]
    assert [sorted(state.stored) for state in states] == [[], ["few/0", "joint/i", "seen/0"]]
    assert states[0].hash == states[1].hash == made[1].record.state
    assert all(states[0][key] == states[1][key] for key in states[0].tables)
    assert states[1]["few/0"].num_rows == 9  # its max_size, of more that were written
    assert len(states[1].stored["joint/i"].parts) > 1


def test_a_value_that_was_not_requested_is_an_error():
    """An id that nobody looked up must not be taken for that of an unknown value."""
    hashes = hash_texts(pa.array(["a", "b", "c", None]))
    known = KnownPlaces.of(hashes[:2], np.array([7, -1], np.int32))
    assert known.places(hashes[[1, 0, 3]]).tolist() == [-1, 7, -1]
    with raises(RuntimeError, "other rows than before"):
        known.places(hashes)


def test_rows_that_met_others_are_joined_like_those_of_one_machine(spark, tmp_path):
    """Rows without duplicates, with a side table and histories."""
    draw = np.random.default_rng(5)
    count = 900
    write_rows(
        tmp_path / "rows.parquet",
        click=draw.integers(0, 2, count),
        user=[None if v == 3 else f"u{v}" for v in draw.integers(0, 40, count)],
        item=[f"i{v}" for v in draw.integers(0, 200, count)],
        at=draw.integers(0, 500, count),
    )
    write_rows(
        tmp_path / "side.parquet",
        item=[f"i{v}" for v in range(150)],
        brand=[f"b{v % 60}" for v in range(150)],
    )
    text = write_spec(
        "click:int user:text item:text at:int",
        '[dedup]\nby = ["user", "item"]\norder = "at"\nkeep = "first"\n',
        section("join", path=f"{tmp_path}/side.parquet", on=["item"], columns=["brand:text"]),
        section("history", name="last", of="item", by="user", order="at", length=5),
        column("item", "sparse", 'categorify, joint = "i"'),
        column("brand", "sparse", "categorify, oov = 3"),
        column("last", "id_list", 'categorify, joint = "i"'),
        table="split = {train = 0.7, test = 0.3}",
    )
    memory, files = (
        build_table(spark, tmp_path / name, tmp_path / "rows.parquet", text=text, worker_bytes=size)
        for name, size in (("memory", 2**28), ("files", 128))
    )
    assert sorted(files.state().stored) == ["brand/0", "joint/i"]
    alike_tables(files, memory)


def test_a_task_of_several_blocks_gets_the_places_of_each(spark, tmp_path):
    """A block has about 2^18 rows."""
    count = 600_000
    place = np.arange(count)
    table = pa.table(
        {
            "click": place % 2,
            # The values of the first block do not occur in the last one.
            "item": pc.binary_join_element_wise("i", pa.array(place // 1000).cast(pa.string()), ""),
        }
    )
    write_rows(tmp_path / "rows.parquet", table)
    text = write_spec("click:int item:text", column("item", "sparse", "categorify, oov = 4"))
    tables = []
    for name, with_spark in (("local", None), ("spark", spark)):
        result = run(
            with_spark, tmp_path / name, tmp_path / "rows.parquet", text=text, worker_bytes=TINY
        )
        tables.append(FeatureTable.open(tmp_path / name))
    assert result.ways == {"item/0": JOIN}
    alike_tables(*tables)


def test_a_vocabulary_in_files_is_added_to_without_moving_an_id(spark, made, raw, tmp_path):
    more = tmp_path / "more.parquet"
    write_rows(more, rows(2, 260))
    states = []
    for name, engine, table in (("memory", None, made[0]), ("files", spark, made[1])):
        out = shutil.copytree(table.uri, tmp_path / name)
        run(engine, out, more, text=TEXT, worker_bytes=TINY, mode="append", update_state=True)
        states.append(FeatureTable.open(out).state())
    old, (memory, files) = made[0].state(), states
    assert (
        files["joint/i"]["value"].to_pylist()[: old["joint/i"].num_rows]
        == old["joint/i"]["value"].to_pylist()
    )
    assert files["joint/i"].num_rows > old["joint/i"].num_rows
    assert memory.hash == files.hash
    assert rows_of(FeatureTable.open(tmp_path / "files")) == rows_of(
        FeatureTable.open(tmp_path / "memory")
    )
    # A later job with room for all of it holds what lies in files.
    result = run(spark, tmp_path / "files", raw, text=TEXT, mode="append")
    assert result.ways == {"few/0": HELD, "joint/i": HELD, "seen/0": HELD}
    lines, about = explain(
        Job(
            spec=Spec.parse(TEXT),
            inputs=("x",),
            store=TableStore(tmp_path / "files"),
            mode="append",
            worker_bytes=TINY,
        )
    )
    assert about["ways"]["joint/i"] == JOIN
    assert "  shuffle join: few/0, joint/i" in lines


def test_vacuum_keeps_the_files_that_a_kept_state_speaks_of(made, tmp_path):
    store = TableStore(shutil.copytree(made[1].uri, tmp_path / "t"))
    assert not [
        p for p in vacuum(store, keep=1, now=2e9).files if "/state/" in p and p.endswith(".parquet")
    ]
    state = FeatureTable.open(store.uri).state()
    parts = {path for table in state.stored.values() for path, _ in table.parts}
    # A file that is not what was written is named.
    path = Path(store.path(min(parts)))
    write_rows(path, pq.read_table(path, partitioning=None).slice(1))
    with raises(StateError, f"{path}:", "rows", "written"):
        [state[key] for key in state.stored]
    small_table(store.uri, rows=50, mode="overwrite")
    assert parts < set(vacuum(store, keep=1, now=2e9).files)


def test_a_job_that_fails_does_not_take_the_files_of_a_version_with_the_same_state(
    spark, made, raw, tmp_path, monkeypatch
):
    copy = shutil.copytree(made[1].uri, tmp_path / "t")
    monkeypatch.setattr(
        "sluice.etl.spark.engine.write", lambda *_, **__: pytest.fail("the disk is full")
    )
    with raises(pytest.fail.Exception, "the disk is full"):
        run(spark, copy, raw, text=TEXT, worker_bytes=TINY, mode="overwrite")
    table = FeatureTable.open(copy)
    assert (table.version, table.state().hash) == (0, made[1].record.state)
    assert all(table.state()[key] == made[1].state()[key] for key in made[1].state().stored)
