"""Any operator left to the loader. The table holds texts and raw numbers; batches are as if the ETL had applied it."""

import re
from collections import Counter, deque

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sluice import FeatureTable
from sluice.etl import ops
from tests.dlrm import clicks_table
from tests.open_loader import open_loader
from tests.product import ColumnError, Features, Recipe
from tests.raises import raises

COLUMNS = {**clicks_table.COLUMNS, "words": "text", "at": "text", "price": "float"}
FEATURES = (
    clicks_table.FEATURES.replace(", online = true", "")
    + """
[[column]]
name = "words"
role = "id_list"
ops = [{op = "split", separator = " "}, {op = "ngram"}, {op = "hash", size = 90}]
[[column]]
name = "first_tags"
from = "tags"
role = "id_list"
ops = [{op = "first_x", size = 1}, {op = "vocabulary", values = ["t0", "t7"], oov = 3}]
[[column]]
name = "tag_count"
from = "tags"
role = "dense"
ops = [{op = "bag"}, {op = "fill"}]
[[column]]
name = "price_id"
from = "price"
role = "sparse"
ops = [{op = "hash", size = 70}]
[[column]]
name = "I1_id"
from = "I1"
role = "sparse"
ops = [{op = "fill", value = 3}, {op = "quantiles", buckets = 5}]
[[column]]
name = "renamed"
from = "C9"
role = "sparse"
ops = [{op = "map", values = ["00000001"], to = [""]}, {op = "categorify", min_count = 3, oov = 2}]
[[column]]
name = "seen"
from = "C5"
role = "dense"
ops = [{op = "count"}, {op = "fill"}, {op = "log"}]
[[column]]
name = "price"
role = "dense"
ops = [{op = "fill_median", indicator = true}, {op = "log", shift = 3}]
[[column]]
name = "hour"
from = "at"
role = "sparse"
ops = [{op = "parse_time"}, {op = "hour"}, {op = "bucketize", boundaries = [6, 12, 18]}]
[[column]]
name = "kind"
from = "C1"
role = "dense"
ops = [{op = "one_hot", values = ["00000000", "00000001"]}]
"""
)
LEFT = re.sub(r"\{op = ([^}]*)\}", r"{op = \1, online = true}", FEATURES)
ROWS, BATCH = 2500, 160


def raw_rows() -> pa.Table:
    raw, random = clicks_table.raw_rows(ROWS), np.random.default_rng(3)
    words = [
        " ".join(f"w{n}" for n in random.integers(0, 9, count))
        for count in random.integers(0, 5, ROWS)
    ]
    times = [
        f"2024-01-{1 + n % 28:02} {n % 24:02}:00:00" if n % 9 else "never" for n in range(ROWS)
    ]
    prices = [None if n % 11 == 0 else float("nan") if n % 17 == 0 else n / 7 for n in range(ROWS)]
    return (
        raw.append_column(
            "words",
            pa.array([None if n % 13 == 0 else w for n, w in enumerate(words)], pa.string()),
        )
        .append_column("at", pa.array(times))
        .append_column("price", pa.array(prices, pa.float64()))
    )


def online_of(table: FeatureTable) -> dict[str, ops.Online]:
    """The operators that a table leaves to the loader, as a server applies them, by column."""
    return {f.name: ops.online(f, table.state()) for f in table.fields if f.online}


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> tuple[FeatureTable, FeatureTable]:
    """One whose operators the ETL applied, and one that leaves them all to the loader."""
    folder, raw = tmp_path_factory.mktemp("raw"), raw_rows()
    return (
        clicks_table.write(folder / "etl", raw, text=clicks_table.spec_text(COLUMNS, FEATURES)),
        clicks_table.write(folder / "left", raw, text=clicks_table.spec_text(COLUMNS, LEFT)),
    )


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
def test_batches_and_order_hash_are_the_same(tables, reader):
    loaded = []
    for table in tables:
        with open_loader(table, batch_size=BATCH, last="pad", reader=reader) as loader:
            loaded.append(
                (
                    [
                        (b.dense.clone(), b.values.clone(), b.lengths.clone(), b.label.clone())
                        for b in loader
                    ],
                    loader.order_hash,
                    loader.cardinalities,
                )
            )
    (want, order, sizes), (got, same, theirs) = loaded
    assert (order, sizes) == (same, theirs)
    for batch, other in zip(want, got, strict=True):
        for a, b in zip(batch, other, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def test_texts_and_numbers_are_stored_as_they_were_read(tables):
    etl, left = tables
    types = {f.name: f.type for f in left.fields}
    names = ("C1", "words", "hour", "I1", "tags", "label")
    assert [types[name] for name in names] == [
        "string",
        "string",
        "string",
        "double",
        "list<string>",
        "int8",
    ]
    raw, stored = raw_rows(), pq.read_table(left.files_of("train")[0].path)
    for name, column in (("C1", "C1"), ("words", "words"), ("at", "hour"), ("tags", "tags")):
        assert stored[column].to_pylist() == raw[name].slice(0, len(stored)).to_pylist()
    assert left.check() == etl.check() == []
    assert left.fingerprint.vocabulary == etl.fingerprint.vocabulary
    assert left.record.profile["C14"]["nulls"] == etl.record.profile["C14"]["nulls"]


def test_a_server_applies_them_as_the_loader_does(tables):
    etl, left = tables
    raw = {name: raw_rows()[name].combine_chunks() for name in COLUMNS if name != "label"}
    want = Features(etl.spec(), etl.state()).inputs(raw)
    made, online = Features(left.spec(), left.state()).inputs(raw), online_of(left)
    assert want.keys() - online.keys() == {
        "price_missing"
    }  # a fill's second column: the ETL makes it
    for name in online:
        values, got = want[name], online[name](made[name])
        if pa.types.is_list(values.type):
            assert got.to_pylist() == values.to_pylist()
        else:
            np.testing.assert_array_equal(got, values.to_numpy(zero_copy_only=False))


def test_operators_work_once_on_each_row_group_that_is_read_and_not_on_every_piece_of_it(
    tables, monkeypatch
):
    inner, calls = Recipe.make, Counter()

    def counted(self, arrays):
        calls[self.name] += self.online is not None
        return inner(self, arrays)

    monkeypatch.setattr(Recipe, "make", counted)
    with open_loader(
        tables[1],
        batch_size=72,
        window_rows=144,
        streams=1,
        reader="arrow",
    ) as loader:
        reads = loader.plan.schedule(0, 0, 1).reads
        assert max(len(read.parts) for read in reads) > 2
        deque(loader, maxlen=0)
    assert +calls == dict.fromkeys((f.name for f in tables[1].fields if f.online), len(reads))


def test_an_operator_that_fails_is_named_with_its_column_and_row_group(tables, monkeypatch):
    def fails(self, arrays):
        raise LookupError("no such word")

    monkeypatch.setattr(Recipe, "make", fails)
    with (
        open_loader(tables[1], batch_size=BATCH, reader="arrow") as loader,
        raises(ColumnError, "parquet", "row group", "column", "no such word"),
    ):
        next(iter(loader))
