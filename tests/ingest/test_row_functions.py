"""Functions over rows as they are stored: `Transform(function, reads=…, gives=…)`."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Errors, History, Knobs, Loader, Order, Transform
from sluice.ingest.columns import ColumnError
from sluice.ingest.errors import LoaderError, SourceError
from sluice.ingest.process import shared_memory
from sluice.ingest.process.row_call import asking_for, call_on_rows, encode
from sluice.ingest.process.shared_memory import Region
from sluice.ingest.read import open_file, reader
from sluice.ingest.row_order import SLICE_ROWS, RowsPlan
from sluice.ingest.stages.transform import TransformError
from tests.etl.tables import write_rows
from tests.open_loader import open_loader
from tests.raises import raises

HERE = "tests.ingest.test_row_functions"
ROWS, GROUP = 20_000, 9_000
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
    """A file of three row groups, of which one has as many rows as two slices."""
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
    pq.write_table(table, folder / "a.parquet", row_group_size=GROUP, data_page_size=4096, **how)
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


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(workers={"parse": 3}),
        Knobs(workers={"decode": 2}),
        Knobs(workers={"parse": 2}, backend={"parse": "process"}),
    ],
)
def test_a_function_over_texts_gives_columns_in_every_back_end(queries, knobs, monkeypatch):
    monkeypatch.setattr(reader, "_LARGE_BYTES", 0)  # so row groups are decoded in pieces
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
    due = [piece.parts[0].window for piece in read.pieces(SLICE_ROWS)]
    assert due == sorted(due)
    assert max(due)


def test_pieces_of_a_large_row_group_read_only_their_pages(queries, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_LARGE_BYTES", 0)
    long_pages = tmp_path / "a.parquet"
    pq.write_table(pq.read_table(queries), long_pages, row_group_size=GROUP)
    read, plain = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *how: read.append(how[1]) or plain(*how))
    for source, count in ((queries, 2), (tmp_path, 1)):
        with opened(source, [PARSE]) as loader:
            groups = loader._input.groups
            pieces = groups.cut(loader.plan.schedule(0).reads[1])
            assert len(pieces) == count
            for piece in pieces:
                rows = groups.decoded(0, piece.group, read=piece)
                assert rows.equals(groups.decoded(0, piece.group).slice(piece.first, piece.rows))
    stored = pq.read_metadata(long_pages).row_group(0).total_byte_size
    assert sum(size for size in read if size != open_file._HEAD_BYTES) < 2.5 * stored


def test_a_damaged_page_costs_only_the_rows_of_its_piece(queries, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_LARGE_BYTES", 0)
    damaged = bytearray((queries / "a.parquet").read_bytes())
    last = pq.read_metadata(queries / "a.parquet").row_group(0).column(3)
    damaged[last.data_page_offset + last.total_compressed_size - 9] ^= 1
    (tmp_path / "a.parquet").write_bytes(damaged)
    errors = Errors(on_error="quarantine", quarantine=tmp_path / "list.jsonl", probation_rows=10**6)
    with opened(tmp_path, [PARSE], errors=errors, last="pad") as loader:
        assert sum(float(batch.weight.sum()) for batch in loader) == ROWS - GROUP % SLICE_ROWS
        assert loader.quarantined["rows_set_aside"] == GROUP % SLICE_ROWS
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
        (lambda c: {"length": c["row"][1:]}, ("8191 values for 8192 rows",)),
        (lambda c: {"length": c["row"] + 0.5}, ("'length'", "int32")),
        (lambda c: {"length": np.ma.masked_less(c["row"], 3)}, ("masked",)),
        (lambda c: 3, ("int", "dict")),
        (lambda c: c["nothing"], ("KeyError", "nothing")),
    ],
)
def test_a_wrong_result_is_named_with_its_rows(queries, function, facts):
    wrong = Transform(function, "mine", reads=["row"], gives={"length": "int32"})
    with raises(ColumnError, "a.parquet, row group 0, rows 0 to 8192", "'mine'", *facts):
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
    listed = [json.loads(line) for line in (tmp_path / "list.jsonl").read_text().splitlines()]
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


def test_a_run_goes_on_in_the_middle_of_a_row_group(queries):
    with opened(queries, [PARSE]) as loader:
        batches = iter(loader)
        for _ in range(7):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.dense.tolist() for batch in batches]
    with opened(queries, [PARSE]) as loader:
        loader.load_state_dict(state)
        assert [batch.dense.tolist() for batch in loader] == rest


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
