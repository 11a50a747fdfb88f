"""Vocabularies that neither the driver nor a worker may hold: kept in files, met by a join, the same to the last id."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice.etl.apply.features import Features
from sluice.etl.jobs.job import Job
from sluice.etl.spark.explain import explain
from sluice.etl.spark.vocabulary.join import VocabularyJoins
from sluice.etl.spark.vocabulary.strategy import BROADCAST, HELD, JOIN, choose_lookup, driver_limit
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState, StateError, digest_of
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable
from sluice.etl.table.vacuum import vacuum
from tests.etl.jobs import Said, alike, in_one_process, rows_of, run
from tests.etl.tables import column, columns_of, write_rows, write_spec
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
    """The same job with room for all, and with next to none; what the second said."""
    folder, said = tmp_path_factory.mktemp("tables"), Said()
    run(spark, folder / "all", raw, text=TEXT)
    result = run(spark, folder / "none", raw, text=TEXT, worker_bytes=TINY, said=said)
    assert result.ways == {"few/0": JOIN, "joint/i": JOIN, "seen/0": HELD}
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


def test_what_is_frequent_or_missing_is_known_before_the_join(made):
    """Skew: no task of the join gets the rows of a frequent value, or all rows without one."""
    state, spec = made[1].state(), Spec.parse(TEXT)
    joins = VocabularyJoins.of(spec, ["joint/i"], head=2)
    features = Features(spec, joins.for_workers(state))
    frequent = state["joint/i"]["value"].to_pylist()
    columns = {
        "item": pa.array([frequent[0], None, frequent[1], frequent[7], "stranger"]),
        "click": pa.array([0] * 5),
        "tags": pa.array([[frequent[0], None, frequent[9]], [], None, [], []]),
    }
    ids, left, bags, left_of_bags = joins.look_up_head(features, columns, np.zeros(5, np.uint64))
    assert left.to_pylist() == [None, None, None, frequent[7], "stranger"]
    assert ids.to_pylist()[:3] == [4, 1, 5]
    assert left_of_bags.to_pylist() == [[None, None, frequent[9]], [], [], [], []]
    assert bags.to_pylist()[0][:2] == [4, 1]


def test_a_vocabulary_in_files_is_added_to_without_moving_an_id(spark, made, raw, tmp_path):
    more = tmp_path / "more.parquet"
    write_rows(more, rows(2, 260))
    states = []
    for name, size, table in (("memory", 2**28, made[0]), ("files", TINY, made[1])):
        out = shutil.copytree(table.uri, tmp_path / name)
        run(spark, out, more, text=TEXT, worker_bytes=size, mode="append", update_state=True)
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


def test_a_job_that_is_refused_leaves_no_files(spark, tmp_path):
    table = rows(1, 200)
    write_rows(
        tmp_path / "rows.parquet", table.set_column(0, "click", pa.array([7] * 30 + [1] * 670))
    )
    one_level = TEXT[: TEXT.index('[[column]]\nname = "tags"')]
    with raises(ValueError, "--max-rejects"):
        run(spark, tmp_path / "t", tmp_path / "rows.parquet", text=one_level, worker_bytes=TINY)
    assert not list(Path(tmp_path / "t").rglob("*.parquet"))


def test_the_choice_goes_by_size_alone_and_explain_says_by_which():
    spec = Spec.parse(TEXT)
    tables = {
        "few/0": pa.table({"value": ["a"], "count": [1]}),
        "seen/1": pa.table({"value": ["a"], "count": [1]}),
        "joint/i": FileBackedState(uri="t", parts=(("a", 1000), ("b", 500)), digest=""),
        "seen/0": FileBackedState(uri="t", parts=(("c", 900_000),), digest=""),
    }
    state = FittedState(tables=tables)
    assert state.tables["joint/i"].num_rows == 1500
    # The last is needed whole: another operator learns from what comes of it.
    assert choose_lookup(spec, state, 64 * 902_000) == {
        "few/0": BROADCAST,
        "joint/i": HELD,
        "seen/0": HELD,
        "seen/1": BROADCAST,
    }
    assert choose_lookup(spec, state, 64 * 901_000)["joint/i"] == JOIN
    assert driver_limit(2**28) == 2**21


def test_a_digest_does_not_depend_on_batches():
    table = pa.table({"value": [f"v{i}" for i in range(2000)], "count": list(range(2000))})
    whole = digest_of(table.schema, table.to_batches())
    assert digest_of(table.schema, table.to_batches(max_chunksize=7)) == whole
    assert digest_of(table.schema, table.slice(1).to_batches()) != whole
    changed = dataclasses.replace(
        FittedState(tables={"a": table}), tables={"a": table.slice(0, 1999)}
    )
    assert changed.hash != FittedState(tables={"a": table}).hash
