"""Fitted state that somebody changed, or half restored: refused by name wherever it is read. No Spark needed."""

import io
import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from tests.etl.tables import column, write_spec
from tests.product import (
    SCHEMA,
    FileBackedState,
    FittedState,
    Job,
    JobRecord,
    Spec,
    StateError,
    TableStore,
)
from tests.raises import raises

SPEC = Spec.parse(
    write_spec("click:int item:text", column("item", "sparse", "categorify"), form="csv")
)
VALUES = pa.table({"value": ["a", "b", "c"], "count": [9, 5, 1]}, SCHEMA)
SWAPPED = pa.table({"value": ["b", "a", "c"], "count": [9, 5, 1]}, SCHEMA)


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> FeatureTable:
    return small_table(
        tmp_path_factory.mktemp("made") / "t", rows=8, files=1, splits={"train": 1.0}
    )


@pytest.fixture(params=["in memory", "in files"])
def table(request, made, tmp_path) -> FeatureTable:
    """A table whose vocabulary of `item` is small, or so large that it lies in files of its own."""
    shutil.copytree(made.uri, tmp_path / "t")
    store = TableStore(tmp_path / "t")
    vocabulary: pa.Table | FileBackedState = VALUES
    if request.param == "in files":
        store.write("_sluice/state/job/a.parquet", parquet(VALUES))
        vocabulary = FileBackedState.of(store, ["_sluice/state/job/a.parquet"])
    state = FittedState(spec=SPEC.fitted_hash, tables={"item/0": vocabulary}, chains=SPEC.chains)
    record: JobRecord = replace(made.record, state=state.save(store))
    store.write_json(f"_sluice/jobs/{record.job}.json", record.to_json())
    return FeatureTable.open(store.uri)


def of_loader_and_server(table: FeatureTable) -> pa.Table:
    """Both take their operators' state from here."""
    state = table.state()
    assert state is not None
    return state["item/0"]


def of_job(table: FeatureTable) -> None:
    Job(
        spec=SPEC,
        inputs=("new.csv",),
        store=TableStore(table.uri),
        mode="overwrite",
        reuse_state=True,
    )


def test_what_was_written_is_read(table):
    assert of_loader_and_server(table).select(SCHEMA.names).equals(VALUES)
    of_job(table)


@pytest.mark.parametrize("reader", [of_loader_and_server, of_job])
def test_a_vocabulary_that_was_changed_is_refused_by_name(table, reader):
    """Its pages have the right checksums: whoever wrote it meant to."""
    [file] = [
        path for path in TableStore(table.uri).files("_sluice/state") if path.endswith(".parquet")
    ]
    TableStore(table.uri).write(file, parquet(SWAPPED))
    with raises(StateError, f"{table.uri}/_sluice/state/", "changed"):
        reader(table)


@pytest.mark.parametrize("reader", [of_loader_and_server, of_job])
@pytest.mark.parametrize(
    "change",
    [{"spec": "another"}, {"stored": {}, "keys": []}, {"keys": ["item/0", "b/0"]}],
    ids=str,
)
def test_what_is_said_of_a_state_cannot_be_changed_either(table, reader, change):
    store, file = TableStore(table.uri), f"_sluice/state/{table.record.state}/state.json"
    about = store.read_json(file)
    store.write_json(file, {**about, **change})
    with raises(StateError, f"{table.uri}/_sluice/state/{table.record.state}:"):
        reader(table)


@pytest.mark.parametrize("reader", [of_loader_and_server, of_job])
@pytest.mark.parametrize(
    "content", [b"", b"{", json.dumps([1]).encode()], ids=["empty", "torn", "another's"]
)
def test_a_state_that_is_no_state_is_refused_by_name(table, reader, content):
    TableStore(table.uri).write(f"_sluice/state/{table.record.state}/state.json", content)
    with raises(StateError, f"{table.record.state}:", "read"):
        reader(table)


def test_states_that_were_learned_from_two_splits_have_two_names():
    tables = {"item/0": VALUES}
    assert len({FittedState(tables=tables, fitted_on=on).hash for on in (None, "a", "b")}) == 3
