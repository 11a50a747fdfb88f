"""A server knows what a job knows at a row's time: drawn states against a plain look, and states that cannot tell."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.etl.spark import side_tables
from sluice.etl.table.store import tail_of_join
from tests.dlrm.serving.stub import decoded
from tests.etl.jobs import build_table, rows_of
from tests.etl.tables import column, section, write_rows, write_spec
from tests.product import Decoder, Serving, Spec, SpecError, TableError, TableStore, folder_of_tails
from tests.raises import assert_names, raises

PRICES = ("price", "key")


def spec(path: object = "prices.parquet", *more: str, at: str = "int", used: bool = True) -> str:
    """A spec with a join as of `at`, of a column whose name is `key`, too."""
    return write_spec(
        f"click:int item:text row:int at:{at}",
        section(
            "join",
            path=str(path),
            on="item",
            columns=[f"{name}:int" for name in PRICES],
            time="at",
            their_time="since",
        ),
        *more,
        column("row", "dense", "fill"),
        *(column(name, "dense" if used else "time", "fill, value = -1") for name in PRICES),
    )


def opened(text: str, folder: Path, **tails: pa.Table) -> Serving:
    """What a server knows of a table with these states."""
    store, own = TableStore(folder), Spec.own(text)
    for name, state in tails.items():
        write_rows(folder / folder_of_tails("job", name) / "part-0.parquet", state)
    record = SimpleNamespace(job="job")
    fields = own.fields({})
    return Serving.open(
        SimpleNamespace(uri=store.uri, fields=fields, record=record, spec=lambda: own)
    )


TIMES = st.one_of(st.integers(-2, 6), st.just(2**61))
RECORDS = st.lists(st.tuples(st.sampled_from("abc"), TIMES), max_size=12, unique=True)
ASKED = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.one_of(st.none(), TIMES)),
    min_size=1,
    max_size=12,
)


def ask(serving: Serving, asked: list[tuple[Any, Any]]) -> tuple[dict[str, list], dict[int, str]]:
    columns = {
        "item": pa.array([item for item, _ in asked], pa.string()),
        "at": pa.array([at for _, at in asked], pa.int64()),
    }
    completed = serving.complete(columns, problems := {})
    return {name: values.to_pylist() for name, values in completed.items()}, problems


@given(RECORDS, ASKED, st.integers(0, 3))
def test_a_join_is_as_of_the_requests_time_or_the_row_is_refused(
    tmp_path_factory, records, asked, lost
):
    """The state lacks the first `lost` records of each key, but for its newest."""
    kept, first = [], {}
    for key in "abc":
        own = sorted(record for record in records if record[0] == key)
        kept += own[min(lost, len(own) - 1) :] if own else []
        first |= {key: own[0]} if own else {}
    kept = kept[::-1]
    state = pa.table(
        {
            "_key": pa.array([key for key, _ in kept], pa.string()),
            "_at": pa.array([at for _, at in kept], pa.int64()),
            "_is_first": pa.array([first[record[0]] == record for record in kept], pa.bool_()),
            **{name: pa.array([at * 2 for _, at in kept], pa.int64()) for name in PRICES},
        }
    )
    folder = tmp_path_factory.mktemp("table")
    got, problems = ask(opened(spec(), folder, **{tail_of_join(0): state}), asked)
    for row, (item, at) in enumerate(asked):
        if at is None:
            assert (row in problems) == (item is not None)
            assert got["price"][row] is None
            continue
        seen = [record for record in records if record[0] == item and record[1] <= at]
        newest = max(seen) if seen else None
        begin = min((record for record in kept if record[0] == item), default=None)
        assert (row in problems) == (begin is not None and begin != first[item] and at < begin[1])
        if row not in problems:
            assert got["price"][row] == got["key"][row] == (newest and newest[1] * 2)


PAST = {"name": "past", "of": "row", "by": "item", "order": "at"}


@given(RECORDS, ASKED, st.booleans(), st.integers(1, 2))
def test_a_lag_or_a_history_is_as_of_the_requests_time_or_the_row_is_refused(
    tmp_path_factory, records, asked, is_lag, most
):
    """The state has the newest `most` entries of each key, and as many from before its last moment."""
    entries, kept = {}, {}
    for number, (key, at) in enumerate(sorted(records, key=lambda record: record[1])):
        entries.setdefault(key, []).append({"at": at, "value": number})
    for key, own in entries.items():
        older = [entry for entry in own if entry["at"] < own[-1]["at"]]
        kept[key] = older[-most:] + own[len(older) :][-most:]
    fields = [("at", pa.int64()), ("value", pa.int64())]
    state = pa.table(
        {
            "key": pa.array([*kept], pa.string()),
            "entries": pa.array([*kept.values()], pa.list_(pa.struct(fields))),
        }
    )
    rule = section("lag", **PAST, rows=most) if is_lag else section("history", **PAST, length=most)
    role = "dense" if is_lag else "id_list"
    made = column("past", role, "fill" if is_lag else "hash, size = 9")
    text = write_spec("click:int item:text row:int at:int", rule, column("row", "time"), made)
    got, problems = ask(opened(text, tmp_path_factory.mktemp("table"), past=state), asked)
    for row, (item, at) in enumerate(asked):
        if at is None:
            assert (row in problems) == (item is not None)
            continue
        seen = [entry["value"] for entry in entries.get(item, ()) if entry["at"] < at]
        want = (seen[-most] if len(seen) >= most else None) if is_lag else seen[-most:]
        there = [entry for entry in kept.get(item, ()) if entry["at"] < at]
        own = kept.get(item, ())
        older = [entry for entry in own if entry["at"] < own[-1]["at"]]
        assert (row in problems) == (len(older) == most > len(there))
        if row in problems:
            assert_names(problems[row], "'at'", "'past'", "send a time after")
        else:
            assert got["past"][row] == want


def test_a_state_with_the_newest_rows_alone_is_refused_by_column_where_it_is_needed(tmp_path):
    """Sluice 0.3 wrote it. Without a time, its newest rows are what a join takes."""
    state = pa.table({"key": ["a"], "price": [7]})
    tails = {tail_of_join(0): state}
    text = write_spec(
        "click:int item:text at:int",
        section("join", path="p", on="item", columns=["price:int"], time="at", their_time="since"),
        column("price", "dense", "fill"),
        column("item", "sparse", "hash, size = 9"),
    )
    named = ("price", "'p'", "'at'", "sluice etl", "--mode overwrite", str(tmp_path))
    with raises(TableError, *named):
        opened(text, tmp_path, **tails)
    unused = text.replace(
        'name = "price"\nrole = "dense"\nops = [{op = "fill"}]', 'name = "price"\nrole = "time"'
    )
    assert unused != text
    assert opened(unused, tmp_path, **tails).records == {}
    timeless = text.replace('time = "at"\n', "").replace('their_time = "since"\n', "")
    assert ask(opened(timeless, tmp_path, **tails), [("a", None), ("b", 1)])[0]["price"] == [
        7,
        None,
    ]


def test_a_request_says_when_it_is():
    """The server reads the times of joins, lags and histories, and no column that only other rows have."""
    text = write_spec(
        "click:int item:text user:text seen:int at:int shown:float unused:int",
        section(
            "join", path="p", on="item", columns=["price:int"], time="shown", their_time="since"
        ),
        section("lag", name="gap", of="seen", by="item", order="at"),
        section("lag", name="second", of="price", by="user", order="gap", difference=True),
        section("lag", name="more", of="unused", by="unused", order="unused"),
        column("second", "dense", "fill"),
    )
    kinds = {"item": "text", "user": "text", "at": "int", "shown": "float"}
    assert Decoder(Spec.own(text), "", most_rows=9).kinds == kinds
    del kinds["shown"]
    value = text.replace("difference = true", "difference = false")
    assert Decoder(Spec.own(value), "", most_rows=9).kinds == kinds


@pytest.mark.spark
def test_a_job_and_a_server_agree_at_every_rows_time(spark, tmp_path, monkeypatch):
    """The side table has several rows of one time, and times between those of the rows. A state that may hold few of
    them refuses older requests, and gives no other answer than the job."""
    draw = np.random.default_rng(4)
    items = [f"i{number}" for number in draw.integers(6, size=150)]
    since = [None, float("nan"), *(draw.integers(1, 40, size=148) / 2).tolist()]
    side = write_rows(
        tmp_path / "prices.parquet",
        item=items,
        since=pa.array(since, pa.float64()),
        **{name: draw.integers(99, size=150) for name in PRICES},
    )
    asked = {
        "click": draw.integers(2, size=200),
        "item": [
            None if n < 3 else f"i{number}" for n, number in enumerate(draw.integers(7, size=200))
        ],
        "row": range(200),
        "at": [
            None if 2 < n < 6 else int(at) for n, at in enumerate(draw.integers(-2, 24, size=200))
        ],
    }
    rows = write_rows(tmp_path / "rows.parquet", **asked)
    monkeypatch.setattr(side_tables, "MOST_ROWS", 30)
    table = build_table(spark, tmp_path / "few", rows, text=spec(side))
    job = {int(row["row"]): row for row in rows_of(table)}
    body = [
        {name: values[n] for name, values in asked.items() if name != "click"} for n in range(200)
    ]
    decoder = Decoder(table.spec(), "", most_rows=200)
    columns = decoded(decoder, json.dumps({"rows": body}).encode())
    served = Serving.open(table).complete(columns, problems := {})
    for row, at in enumerate(asked["at"]):
        if row not in problems:
            for name in PRICES:
                want = job[row][name]
                assert served[name][row].as_py() == (None if want == -1 else want), (row, at)
    state = TableStore(table.uri)
    stored = sum(
        pq.read_metadata(state.path(path)).num_rows
        for path in state.files(folder_of_tails(table.record.job))
        if path.endswith(".parquet")
    )
    assert 6 < stored <= 36
    times = {(item, math.ceil(at)) for item, at in zip(items, since, strict=True) if at and at > 0}
    oldest = sorted(at for _, at in times)[-31]
    refused = problems.keys() - {3, 4, 5}
    assert refused
    assert all(asked["at"][row] < oldest for row in refused)
    assert len(refused) < sum(at is not None and at < oldest for at in asked["at"])


def test_a_column_of_a_join_has_no_name_of_the_tables_own():
    with raises(SpecError, "join[0].columns", "'_at'", "the table's own"):
        Spec.own(spec().replace("key:int", "_at:int"))
