"""Vocabularies that neither the driver nor a worker may hold: kept in files, mapped, the same to the last id."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.etl.jobs.engine import MAPPED
from sluice.etl.spark.fit import _count_rows
from sluice.etl.spark.large import Large
from tests.etl.jobs import Said, alike, in_one_process, rows_of, run
from tests.etl.tables import column, columns_of, write_rows, write_spec
from tests.product import StateError, TableStore, vacuum
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
TINY = 128 * 20  # the driver may collect 20 values


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
    assert result.ways == dict.fromkeys(["few/0", "joint/i", "seen/0"], MAPPED)
    assert not spark.sparkContext._jsc.getPersistentRDDs()
    return FeatureTable.open(folder / "all"), FeatureTable.open(folder / "none"), said.text


def test_rows_meet_a_vocabulary_in_files_as_they_meet_one_in_memory(made, raw):
    memory, files, said = made
    assert rows_of(files) == rows_of(memory)  # row by row, in order
    assert files.fields == memory.fields
    assert "joint/i: looked up in a file" in said
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
    assert rows_of(tmp_path / "files") == rows_of(FeatureTable.open(tmp_path / "memory"))
    # A later job with room for all of it still maps what lies in files.
    result = run(spark, tmp_path / "files", raw, text=TEXT, mode="append")
    assert result.ways == dict.fromkeys(["few/0", "joint/i", "seen/0"], MAPPED)


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


@pytest.mark.parametrize(
    ("most", "chosen"), [(14, []), (13, [2]), (8, [2]), (7, [2, 1]), (0, [2, 1, 3])]
)
def test_the_largest_vocabularies_go_to_files_until_the_driver_can_hold_the_others(most, chosen):
    large = Large(None, None, "", values=most)
    assert large.choose({1: 5, 2: 6, 3: 3}, [1, 2, 3, 4]) == chosen
