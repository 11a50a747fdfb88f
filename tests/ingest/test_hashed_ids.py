"""Ids by hashing what plain Parquet holds: the same as the ETL's operator makes, for each place of a value."""

from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.read.parquet_files import ParquetError
from tests.etl.tables import write_rows
from tests.open_loader import open_loader
from tests.product import BatchLoader, ColumnError, Hash, ParquetFiles, Recipe
from tests.raises import MISTAKES, raises

SIZE = 1_000_000
# Computed once by hand from the definition in etl/ops/hashing.py; ids in written tables depend on them.
KNOWN = {"": 2, "7": 494732, "-1": 603855, "user_00000001": 830793}
WHOLE = [0, 7, -1, 10, 12345678, 123456789, 10**17, -(2**63), 2**63 - 1, None]


def hashed(array, size=SIZE):
    """Through a table, as a row group is."""
    stored = pa.table({"x": array})
    made = MadeColumns(
        [
            Recipe.stored(
                "x",
                "id_list" if pa.types.is_nested(array.type) else "sparse",
                str(array.type),
                size,
            )
        ]
    )
    table = made.table(stored)
    assert table.schema == made.schema(stored.schema)
    return table.column("x").combine_chunks()


def by_the_etl(texts):
    return Hash(size=SIZE).apply(pa.array(texts, pa.string()), None)


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.int8(), pa.uint64(), pa.uint16()])
def test_a_whole_number_has_the_id_of_its_digits(kind):
    low, high = np.iinfo(kind.to_pandas_dtype()).min, np.iinfo(kind.to_pandas_dtype()).max
    values = [v for v in [*WHOLE, 2**64 - 1, low, high] if v is None or low <= v <= high]
    array = pa.array(values, kind)
    texts = [None if v is None else str(v) for v in values]
    assert hashed(array).equals(by_the_etl(texts))
    assert hashed(array.slice(1, 2)).equals(by_the_etl(texts[1:3]))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_a_text_has_the_id_that_the_etl_gives_it(kind):
    texts = ["", "7", "user_00000001", "ä", None, "7", "a text of more than eight bytes"]
    assert hashed(pa.array(texts, pa.string()).cast(kind)).equals(by_the_etl(texts))


def test_known_values_keep_their_ids():
    assert dict(zip(KNOWN, hashed(pa.array(list(KNOWN))).to_pylist(), strict=True)) == KNOWN
    assert hashed(pa.array([7, -1])).to_pylist() == [KNOWN["7"], KNOWN["-1"]]
    assert hashed(pa.array([None, "x"])).to_pylist()[0] == 1, "a missing value"


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.list_(pa.string()), pa.large_list(pa.string())]
)
def test_bags_keep_their_lengths(kind):
    bags = [["1", "2"], [], None, ["3"], ["4", None]]
    inside = kind.value_type
    values = [
        None if bag is None else [v if v is None or inside == pa.string() else int(v) for v in bag]
        for bag in bags
    ]
    array = pa.array(values, kind)
    expected = [by_the_etl(bag or []).to_pylist() for bag in bags]
    assert hashed(array).to_pylist() == expected
    assert hashed(array.slice(1, 3)).to_pylist() == expected[1:4]


@pytest.fixture
def files(tmp_path):
    """`user` comes back often, so that it is read as a dictionary; `note` never does."""
    random = np.random.default_rng(0)
    for part in range(2):
        rows = 500
        number = np.arange(rows) + part * rows
        write_rows(
            tmp_path / f"part-{part}.parquet",
            row_group_size=100,
            label=(number % 2).astype(np.int8),
            number=number.astype(np.float32),
            user=[f"u{n % 7}" for n in number],
            note=[f"note {n} of {random.integers(1000)}" for n in number],
            item=(number * 10**10).astype(np.int64),
            tags=pa.array([[f"t{k}" for k in range(n % 3)] for n in number], pa.list_(pa.string())),
        )
    return tmp_path


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
def test_the_loader_gives_each_row_its_ids(files, reader):
    whole = pq.read_table(files)
    sizes = {"user": 50, "note": 3_000_000_000, "item": SIZE, "tags": 4_000_000_000}
    expected = {
        name: hashed(whole[name].combine_chunks(), size).to_pylist() for name, size in sizes.items()
    }
    source = ParquetFiles.open(files, "label=label;dense=number", sizes)
    seen = 0
    with open_loader(source, batch_size=80, last="pad", reader=reader) as loader:
        assert loader.sparse_names == tuple(sizes)
        assert loader.cardinalities == {name: size + 2 for name, size in sizes.items()}
        for batch in loader:
            there = (batch.weight > 0).tolist()
            rows = batch.dense[batch.weight > 0, 0].int().tolist()
            lengths = batch.lengths.view(4, -1)
            *ids, tags = [part.tolist() for part in batch.values.split(lengths.sum(1).tolist())]
            for name, column in zip(sizes, ids, strict=False):
                assert list(compress(column, there)) == [expected[name][row] for row in rows]
            assert tags == [tag for row in rows for tag in expected["tags"][row]]
            seen += batch.rows
            assert batch.values.dtype == torch.int64, "as some ids do not fit int32"
    assert seen == 1000
    assert max(expected["note"]) > 2**31
    assert max(max(bag, default=0) for bag in expected["tags"]) > 2**31


@pytest.mark.parametrize(
    ("wanted", "facts"),
    MISTAKES["hashed_ids"],
)
def test_what_cannot_be_hashed_is_refused(files, wanted, facts):
    with raises(ParquetError, *facts):
        ParquetFiles.open(files, {"label": "label", "dense": "number"}, wanted)


def test_texts_as_ids_are_refused_with_the_option_that_hashes_them(files):
    with raises(ColumnError, "'user'", "string", "Loader(hash={'user': 1_000_000})"):
        BatchLoader(ParquetFiles.open(files, "label=label;dense=number;sparse=user"), batch_size=80)
