"""Functions over rows as they are stored: `Transform(function, reads=…, gives=…)`."""

import itertools
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Errors, History, Knobs, Loader, Order, Transform
from sluice.ingest.flow.decoded import Placed
from sluice.ingest.process import shared_memory
from sluice.ingest.process.row_call import encode
from sluice.ingest.process.shared_memory import Region
from sluice.ingest.read import reader
from sluice.ingest.row_order import SLICE_ROWS
from sluice.ingest.stages import row_functions
from sluice.ingest.stages.row_functions import split_functions
from sluice.ingest.stages.transform import FrameFunction
from tests.etl.tables import write_rows
from tests.open_loader import open_loader, quarantined_rows
from tests.product import (
    ColumnError,
    Governor,
    LoaderError,
    ReadTask,
    RowsPlan,
    SourceError,
    TransformError,
    WorkerClosed,
    WorkerProcess,
    asking_for,
    call_on_rows,
)
from tests.raises import raises

HERE = "tests.ingest.test_row_functions"
ROWS, GROUP, PIECE = 20_000, 9_000, 1024
LENGTH = {"label": "label", "dense": ["length"], "sparse": ["row"]}
ROLES = {"label": "label", "dense": ["price", "length"], "sparse": ["row", "words"]}


def parse(columns):
    """The length of each text, and an id for each of its words."""
    texts = columns["query"].to_pylist()
    return {
        "length": [-1 if text is None else len(text) for text in texts],
        "words": [[len(word) for word in (text or "").split()] for text in texts],
    }


def fail_on_some(columns):
    if np.isin(columns["row"], (130, 9_500)).any():
        raise RuntimeError("boom")
    return {"length": columns["row"] % 7}


PARSE = Transform(
    f"{HERE}:parse", reads=["query"], gives={"length": "float32", "words": "list<int32>"}
)


def query(row):
    return None if row % 11 == 5 else f"query {row}" + " x" * (row % 4)


@pytest.fixture(scope="module")
def queries(tmp_path_factory):
    """A file of three row groups."""
    folder = tmp_path_factory.mktemp("queries")
    rows = np.arange(ROWS)
    table = pa.table(
        {
            "label": rows % 2,
            "price": rows.astype(np.float32),
            "row": rows,
            "query": [query(row) for row in range(ROWS)],
        }
    )
    how = {"use_dictionary": ["label"], "write_page_checksum": True}
    pq.write_table(table, folder / "a.parquet", row_group_size=GROUP, data_page_size=128, **how)
    return folder


def opened(source, transforms, roles=ROLES, **options):
    return open_loader(source, batch_size=800, roles=roles, transforms=transforms, **options)


def epoch(*given, **options):
    """The columns of an epoch, each of a list of batches, and the order hash."""
    with opened(*given, **options) as loader:
        batches = list(loader)
        return {
            "row": np.concatenate([b["row"].numpy() for b in batches]),
            "length": np.concatenate([b["length"].numpy() for b in batches]),
            "batches": batches,
        }, loader.order_hash


@pytest.fixture
def small_pieces(monkeypatch):
    """Lets row groups be decoded in pieces."""
    monkeypatch.setattr(reader, "_LARGE_BYTES", 0)
    monkeypatch.setattr(reader, "PIECE_ROWS", PIECE)


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(workers={"parse": 3}),
        Knobs(workers={"decode": 2}),
        Knobs(workers={"parse": 2}, backend={"parse": "process"}),
    ],
)
def test_a_function_over_texts_gives_columns_in_every_back_end(
    queries, knobs, monkeypatch, small_pieces
):
    regions = []
    monkeypatch.setattr(
        shared_memory, "Region", lambda charge: regions.append(Region(charge)) or regions[-1]
    )
    columns, order = epoch(queries, [PARSE], knobs=knobs)
    rows = columns["row"].tolist()
    assert len(set(rows)) == len(rows) == ROWS // 800 * 800
    assert columns["length"].tolist() == [len(query(r)) if query(r) else -1 for r in rows]
    bags = [batch["words"] for batch in columns["batches"]]
    words = [(query(r) or "").split() for r in rows]
    assert np.concatenate([bag.lengths for bag in bags]).tolist() == list(map(len, words))
    sizes = [len(word) for row in words for word in row]
    assert np.concatenate([bag.values for bag in bags]).tolist() == sizes
    with opened(queries, (), {"label": "label", "sparse": "row"}) as loader:
        list(loader)
        assert loader.order_hash == order
    assert len(regions) <= 2, "columns do not keep the memory of the texts"


def test_pieces_come_in_the_order_in_which_batches_need_them():
    [read] = RowsPlan(groups=((99_999,),), batch_size=800).schedule(0).reads
    cuts = [*range(0, read.rows, SLICE_ROWS), read.rows]
    due = [piece.parts[0].window for piece in read.cut_at(cuts)]
    assert due == sorted(due)
    assert max(due)


def test_pieces_of_a_large_row_group_read_only_their_pages(
    queries, tmp_path, monkeypatch, small_pieces
):
    long_pages = tmp_path / "a.parquet"
    pq.write_table(pq.read_table(queries), long_pages, row_group_size=GROUP)
    read, plain = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *how: read.append(how[1]) or plain(*how))
    for source, count in ((queries, 9), (tmp_path, 1)):
        with opened(source, [PARSE]) as loader:
            groups = loader._input.groups
            pieces = groups.cut(loader.plan.schedule(0).reads[1])
            assert len(pieces) == count
            for piece in pieces:
                rows = groups.decoded(0, piece.group, groups.columns, read=piece)
                whole = groups.decoded(0, piece.group, groups.columns)
                assert rows.equals(whole.slice(piece.first, piece.rows))
    stored = pq.read_metadata(long_pages).row_group(0).total_byte_size
    assert sum(size for size in read) < 2.5 * stored


def test_a_damaged_page_costs_only_the_rows_of_its_piece(queries, tmp_path, small_pieces):
    damaged = bytearray((queries / "a.parquet").read_bytes())
    last = pq.read_metadata(queries / "a.parquet").row_group(0).column(3)
    damaged[last.data_page_offset + last.total_compressed_size - 9] ^= 1
    (tmp_path / "a.parquet").write_bytes(damaged)
    errors = Errors(on_error="quarantine", quarantine=tmp_path / "list.jsonl", probation_rows=10**6)
    with opened(tmp_path, [PARSE], errors=errors, last="pad") as loader:
        assert sum(float(batch.weight.sum()) for batch in loader) == ROWS - GROUP % PIECE
        assert loader.quarantined["rows_set_aside"] == GROUP % PIECE
    assert "a.parquet, row group 0: column 'query'" in (tmp_path / "list.jsonl").read_text()


def test_a_function_reads_what_an_earlier_one_gives_and_replaces_stored_columns(queries):
    first = Transform(parse_length, reads=["query"], gives={"length": "int64"})
    second = Transform(
        lambda columns: {"price": columns["price"] * 2, "length": columns["length"] + 1},
        "second",
        reads=["price", "length"],
        gives={"price": np.float32, "length": pa.float32()},
    )
    roles = {"label": "label", "dense": ["price", "length"], "sparse": ["row"]}
    columns, _ = epoch(queries, [first, second], roles=roles)
    rows = columns["row"]
    assert (np.concatenate([b["price"] for b in columns["batches"]]) == 2 * rows).all()
    assert columns["length"].tolist() == [1 + len(query(r) or "") for r in rows.tolist()]


def parse_length(columns):
    return {"length": [len(text or "") for text in columns["query"].to_pylist()]}


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (lambda c: {}, ("no column 'length'", "gives")),
        (lambda c: {"length": c["row"], "more": c["row"]}, ("'more'", "gives")),
        (lambda c: {"length": c["row"][1:]}, ("799 values for 800 rows",)),
        (lambda c: {"length": c["row"] + 0.5}, ("'length'", "int32")),
        (lambda c: {"length": np.ma.masked_less(c["row"], 3)}, ("masked",)),
        (lambda c: 3, ("int", "dict")),
        (lambda c: c["nothing"], ("KeyError", "nothing")),
    ],
)
def test_a_wrong_result_is_named_with_its_rows(queries, function, facts):
    wrong = Transform(function, "mine", reads=["row"], gives={"length": "int32"})
    with raises(ColumnError, "a.parquet, row group 0, row 0 and 799 other rows", "'mine'", *facts):
        epoch(queries, [wrong], roles=LENGTH, shuffle=False, streams=1)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_only_the_rows_on_which_it_fails_are_quarantined(queries, tmp_path, backend):
    errors = Errors(on_error="quarantine", quarantine=tmp_path / "list.jsonl", probation_rows=10**6)
    failing = Transform(f"{HERE}:fail_on_some", reads=["row"], gives={"length": "float32"})
    with opened(
        queries,
        [failing],
        {**LENGTH, "sparse": ["row", "query%100"]},
        errors=errors,
        last="pad",
        knobs=Knobs(workers={"fail_on_some": 2}, backend={"fail_on_some": backend}),
    ) as loader:
        weights = sum(float(batch.weight.sum()) for batch in loader)
        assert loader.quarantined["rows_set_aside"] == 2
    assert weights == ROWS - 2
    listed = quarantined_rows(tmp_path / "list.jsonl")
    assert sorted((row["row_group"], row["row"]) for row in listed) == [(0, 130), (1, 500)]
    assert all("boom" in row["reason"] for row in listed)


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_memory_limit_counts_a_slice_and_its_result(tmp_path, seed):
    """Row groups and texts of drawn sizes, some with more rows than a slice."""
    chance = np.random.default_rng(seed)
    rows, group, size = chance.integers((900, 100, 9), (30_000, 20_000, 300)).tolist()
    table = pa.table({"row": np.arange(rows), "query": ["x" * size] * rows})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group)

    def upper(columns):
        return {"upper": columns["query"], "label": np.zeros(len(columns["query"]))}

    call = Transform(upper, reads=["query"], gives={"label": "int8", "upper": "string"})
    roles = {"label": "label", "sparse": "row"}
    with open_loader(tmp_path, batch_size=80, roles=roles, transforms=[call]) as loader:
        counted = loader.memory()["parts"]["functions"]
        assert loader.pipeline.least_limit > counted
    given = pa.record_batch({"query": table["query"][: min(group, SLICE_ROWS)].combine_chunks()})
    given = given.replace_schema_metadata(asking_for(pa.schema(list(call.gives.items()))))
    made = call_on_rows(upper, given)
    assert given.nbytes + encode(given).nbytes + made.nbytes + encode(made).nbytes < counted


@pytest.mark.parametrize("seed", range(24))
def test_columns_are_the_same_before_and_after_rows_are_placed(tmp_path, monkeypatch, seed):
    """Drawn files, orders, ranks, functions, failures, and a resume. Functions are late, then early."""
    chance = np.random.default_rng(seed)
    draw = chance.integers
    for number, wide in enumerate(draw(0, 2, 3)):
        rows = np.arange(draw(60, 400)) + 1000 * number
        columns = {
            "label": rows % 2,
            "price": (rows / 3).astype((np.float32, np.float64)[wide]),
            "row": rows.astype((np.int32, np.int64)[wide]),
            "query": [query(row) for row in rows.tolist()],
            "bag": [[row, 7][: row % 3] for row in rows.tolist()],
        }
        how = {"use_dictionary": ["label"], "write_page_checksum": True}
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=draw(20, 200), **how)
    if draw(0, 2):
        damaged = bytearray(path.read_bytes())
        column = pq.read_metadata(path).row_group(0).column(draw(1, 5))
        damaged[column.data_page_offset + column.total_compressed_size - 2] ^= 1
        path.write_bytes(damaged)
    failing = {*draw(0, 2300, draw(0, 40)).tolist()}

    def fail(columns):
        if failing & {*columns["row"].tolist()}:
            raise RuntimeError("boom")
        return {"price": columns["price"] * columns["length"]}

    second = Transform(fail, reads=["row", "price", "length"], gives={"price": "float32"})
    options = {
        "roles": {**ROLES, "sparse": ["row", "words", "bag", "query%9"]},
        "transforms": [PARSE, second][: draw(1, 3)],
        "batch_size": (size := int(chance.choice([8, 16, 40]))),
        "shuffle": bool(draw(0, 4)),
        "last": ("pad", "drop")[draw(0, 2)],
        "window_rows": int(draw(16, 500)),
        "ranks": (ranks := int(chance.choice([1, 2, size]))),
        "rank": int(draw(0, ranks)),
    }
    seen, listed, stop = [], [], draw(1, 12)
    for part in (1.0, -1.0):
        monkeypatch.setattr(row_functions, "_HELD_PART", part)
        aside = tmp_path / f"{part}.jsonl"
        aside.touch()
        errors = Errors(on_error="quarantine", quarantine=aside, probation_rows=10**6)
        batches = []
        with open_loader(tmp_path, errors=errors, **options) as loader:
            assert bool(loader.pipeline._late) == (part > 0)
            batches += itertools.islice(loader, stop)
            state = loader.state_dict()
        with open_loader(tmp_path, errors=errors, **options) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            batches += loader
            columns = ("dense", "values", "lengths", "label", "weight")
            values = [[getattr(b, name).tolist() for name in columns] for b in batches]
            seen.append((values, loader.order_hash))
        lines = map(json.loads, aside.read_text().splitlines())
        listed.append({(line["file"], line["row_group"], line["row"]) for line in lines})
    assert seen[0] == seen[1]
    # Late functions do not get rows that come in no batch of this rank.
    assert listed[0] <= listed[1]
    assert listed[0] == listed[1] or options["last"] == "drop" or ranks > 1


def test_functions_are_late_if_what_they_hold_fits():
    frame = FrameFunction(len, "frame", reads=["row"], gives={"a": "int8"}, frame="{}")
    assert split_functions([frame, PARSE], 25, 100) == ([frame], [PARSE])
    assert split_functions([frame, PARSE], 26, 100) == ([frame, PARSE], [])
    task, charge = ReadTask(None, None), Governor(2**40, 0).admit(1, True)
    held = pa.table({"query": ["x" * 800]})
    placed = Placed(task, 0, np.array([2, 6]), (), (), 80, charge, held)
    charge.correct(placed.nbytes)
    placed.give_away(6)
    assert charge.bytes == 20 + held.get_total_buffer_size() > 820
    placed.give_away(2)
    assert (charge.bytes, placed.held) == (0, None)


def test_a_rank_without_rows_gets_padding(tmp_path):
    write_rows(tmp_path / "a.parquet", label=[0], row=[0], query=["a"])
    for rank in range(2):
        options = {"roles": ROLES | {"dense": "length"}, "rank": rank, "ranks": 2, "last": "pad"}
        with open_loader(tmp_path, batch_size=8, transforms=[PARSE], **options) as loader:
            (batch,) = loader
            assert batch.weight.sum() == rank


def test_a_feature_table_gets_the_columns_by_their_types(table):
    both = Transform(
        lambda c: {"I1": c["I1"] + 1, "sum": c["I1"] + c["I2"], "id": c["C1"] % 5},
        "both",
        reads=["I1", "I2", "C1"],
        gives={"I1": "float32", "sum": "float32", "id": "int32"},
    )
    with open_loader(table, batch_size=80) as loader:
        plain = list(loader)
    with Loader(table, batch_size=80, transforms=[both], tuning="fixed") as loader:
        assert "sum" in loader.dense_names
        assert "id" in loader.sparse_names
        for before, after in zip(plain, loader, strict=True):
            assert (after["I1"] == before["I1"] + 1).all()
            assert (after["sum"] == before["I1"] + before["I2"]).all()
            assert (after["id"] == before["C1"] % 5).all()


def test_hashed_columns_may_come_from_a_function(queries, tmp_path):
    upper = Transform(
        lambda c: {"query": [str(text).upper() for text in c["query"].to_pylist()]},
        "upper",
        reads=["query"],
        gives={"query": "string"},
    )
    texts = [str(query(row)).upper() for row in range(ROWS)]
    write_rows(tmp_path / "a.parquet", label=np.arange(ROWS) % 2, query=texts)
    ids = []
    for source, transforms in ((queries, [upper]), (tmp_path, [])):
        with Loader(
            source,
            batch_size=800,
            roles={"label": "label"},
            hash={"query": 1000},
            transforms=transforms,
            order=Order(shuffle=False),
            tuning="fixed",
        ) as loader:
            ids.append([batch["query"].tolist() for batch in loader])
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("how", "options", "error", "facts"),
    [
        ({"gives": {"a": "int32"}}, {}, TransformError, ("reads nothing", "reads=")),
        ({"reads": ["row"], "gives": {"a": "numbr"}}, {}, TransformError, ("'numbr'", "float32")),
        ({"limit_s": 0}, {}, TransformError, ("'mine'", "limit_s=0")),
        ({"reads": ["qury"], "gives": {"length": "int32"}}, {}, SourceError, ("'qury'", "'query'")),
        (
            {"reads": ["row"], "gives": {"length": "int32"}},
            {"history": History(by="label", time="row", columns=["row"], last=3)},
            LoaderError,
            ("history", "length"),
        ),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(queries, how, options, error, facts):
    with raises(error, *facts):
        opened(
            queries,
            [Transform(len, "mine", **how)],
            LENGTH,
            **options,
        )


@pytest.mark.parametrize("gives", [{"length": "float32"}, None])
def test_no_row_is_quarantined_because_its_run_stops_while_bad_rows_are_sought(
    queries, gives, monkeypatch, tmp_path
):
    """A stop closes the processes. What they do not answer then is no fault of a row."""
    calls = []

    def call(worker, columns, label):
        calls.append(label)
        if len(calls) == 1:
            raise ValueError("a row that it cannot take")
        raise WorkerClosed("the worker was closed")

    monkeypatch.setattr(WorkerProcess, "call", call)
    function = {"reads": ["row"], "gives": gives} if gives else {}
    loader = opened(
        queries,
        [Transform(f"{HERE}:fail_on_some", "mine", **function)],
        roles=LENGTH if gives else {"label": "label", "dense": ["price"], "sparse": ["row"]},
        knobs=Knobs(backend={"mine": "process"}),
        errors=Errors(on_error="quarantine", quarantine=tmp_path / "aside.jsonl"),
    )
    with loader, raises(LoaderError, "closed"):
        next(iter(loader))
    assert len(calls) == 2
    assert not (tmp_path / "aside.jsonl").exists()
