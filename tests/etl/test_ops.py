"""The hash of texts, numbers and rows against a slow twin in plain Python."""

import math
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.etl.ops import hashing
from sluice.etl.ops.base import value_counts
from sluice.etl.ops.hashing import NULL, Lookup, hash_numbers, rows_of_long_texts
from sluice.etl.spark.workers import mapped_lookup
from sluice.etl.spark.workers.mapped_lookup import MappedLookup
from tests.etl.slow_hashes import hashed
from tests.product import (
    MOST_TEXT_BYTES,
    SCHEMA,
    FileBackedState,
    TableStore,
    hash_rows,
    hash_texts,
)
from tests.raises import raises


@pytest.mark.parametrize("seed", range(6))
def test_hashes_of_few_long_texts_among_many_short_ones_are_as_documented(monkeypatch, seed):
    monkeypatch.setattr(hashing, "has_kernel", lambda: bool(seed % 2))
    chance = random.Random(seed)
    longest = [chance.choice([0, 7, 9, 200, 70_000]) for _ in range(4)]
    texts = [
        chance.choice(["x", "é", "z1"])
        * chance.randrange(1 + chance.choice(longest[: 1 + n // 60]))
        for n in range(chance.choice([1, 63, 64, 65, 240]))
    ]
    assert hash_texts(pa.array(texts), seed).tolist() == [hashed(t, seed) for t in texts]


@pytest.mark.parametrize("texts", [1, 63, 10_000])
def test_the_steps_for_a_text_grow_with_its_bytes_and_not_with_the_longest_text(monkeypatch, texts):
    steps, absorb = [], hashing._absorb
    monkeypatch.setattr(hashing, "has_kernel", lambda: False)
    monkeypatch.setattr(
        hashing, "_absorb", lambda *args: steps.append(len(args[0])) or absorb(*args)
    )
    hash_texts(pa.array(["a" * 12] * (texts - 1) + ["b" * 10**6]))
    assert len(steps) <= 2


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.list_(pa.string()), "dictionary"]
)
def test_rows_of_long_texts_are_found_in_every_kind_of_column(kind):
    texts = ["a", "b" * (MOST_TEXT_BYTES + 1), None, "c" * MOST_TEXT_BYTES, "é" * MOST_TEXT_BYTES]
    lists = kind == pa.list_(pa.string())
    values = pa.array([text and ["", text] for text in texts] if lists else texts)
    column = values.dictionary_encode() if kind == "dictionary" else values.cast(kind)
    assert rows_of_long_texts(column).tolist() == [1, 4]
    assert rows_of_long_texts(column.slice(1, 3)).tolist() == [0]
    assert rows_of_long_texts(column.slice(2, 2)).tolist() == []


GOLDEN = [
    0x0000000000000000,
    0x80C1AE61E48259F9,
    0xC7B07FC2A293A2C3,
    0x2FE0AA7A8D836CC0,
    0x5851F42D4C957F2D,
]
GOLDEN_ROWS = [0xDE47181F3AA2D734, 0x31B11FFBD5DE1CA2]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.binary(), pa.large_binary()])
def test_a_text_has_the_same_hash_in_every_type_of_column(kind):
    texts = pa.array(["", "a", None, "a text of more than eight bytes", "ä"])
    assert hash_texts(texts.cast(kind)).tolist() == hash_texts(texts).tolist()


def test_the_hash_never_changes():
    assert hash_texts(pa.array(["", "a", "05db9164", "日本", None])).tolist() == GOLDEN
    assert hash_rows([pa.array([1, None]), pa.array(["a", "b"])], 7).tolist() == GOLDEN_ROWS


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_hash_of_numbers_tells_them_apart(values):
    hashes = hash_numbers(pa.array(values, pa.int64())).tolist()
    assert len(set(hashes)) == len(set(values))
    assert [h == NULL for h in hashes] == [v is None for v in values]


def test_equal_floats_have_equal_hashes():
    hashes = hash_numbers(pa.array([0.0, -0.0, math.nan, -math.nan, 1.0]))
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    assert len(set(hashes.tolist())) == 3


def test_a_lookup_finds_all_of_a_large_vocabulary_and_nothing_else():
    words = [f"{i:x}" for i in range(50_000)]
    lookup = Lookup.of(pa.array(words))
    assert lookup.places(hash_texts(pa.array(words))).tolist() == list(range(50_000))
    assert set(lookup.places(hash_texts(pa.array([f"no {w}" for w in words]))).tolist()) == {-1}
    with pytest.raises(ValueError, match="same 64-bit hash"):
        Lookup.of(pa.array(["a", "b", "a"]))


def test_a_mapped_vocabulary_gives_the_places_of_one_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(mapped_lookup, "_BUCKET_VALUES", 10)

    def in_files(*values: str) -> FileBackedState:
        table = pa.table([values, range(len(values))], SCHEMA.names)
        for name, part in (("a", table[:2]), ("b", table[2:])):
            pq.write_table(part, tmp_path / name, row_group_size=7)
        return FileBackedState.of(TableStore(tmp_path), ["a", "b"])

    with raises(ValueError, "same 64-bit hash"):
        MappedLookup.of(in_files("a", "b", "c", "a"))
    values = [f"i{n}" for n in range(101)]
    state = in_files(*values)
    asked = hash_texts(pa.array([*values[::-1], None, *map(str, range(300))]))
    for _ in range(2):  # the second one maps the file of the first
        places = MappedLookup.of(state).places
        assert places(asked).tolist() == Lookup.of(pa.array(values)).places(asked).tolist()
        assert places(asked[:0]).tolist() == []
        monkeypatch.setattr(mapped_lookup, "_write", lambda *_: pytest.fail("written twice"))


def test_a_column_with_a_dictionary_has_the_hashes_and_counts_of_its_texts():
    """Also if rows that held some of its values were left out."""
    texts = pa.array(["b", None, "a", "b", "", None, "c"])
    for rows in ([0, 1, 3, 4], [], range(7)):
        at = pa.array(rows, pa.int64())
        some, coded = texts.take(at), texts.dictionary_encode().take(at)
        assert hash_texts(coded, 7).tolist() == hash_texts(some, 7).tolist()
        counts = [
            sorted(zip(*map(pa.Array.to_pylist, value_counts(c.drop_null())), strict=True))
            for c in (some, coded)
        ]
        assert counts[0] == counts[1]
