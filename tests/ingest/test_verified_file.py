"""Local files are decoded from bytes of which every page was held against its checksum."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.read.verified_file import DamagedPage, PageMemory, VerifiedFile, _pages

ROWS = 3000
FORMS = {
    "plain": {"compression": "none", "use_dictionary": False},
    "dictionaries": {"compression": "snappy"},
    "many pages": {"compression": "lz4", "data_page_size": 64, "write_batch_size": 16, "use_dictionary": False},
    "second version": {"compression": "zstd", "data_page_version": "2.0"},
}


@pytest.fixture(scope="module")
def table():
    chance = random.Random(5)
    def some(value):
        return [None if chance.random() < 0.1 else value(n) for n in range(ROWS)]

    return pa.table({"int": pa.array(range(ROWS), pa.int32()), "float": pa.array(some(float)),
                     "flag": pa.array(some(lambda n: n % 3 == 0)), "text": pa.array(some(lambda n: f"t{n % 97}" * 9)),
                     "list": pa.array(some(lambda n: list(range(n % 7))), pa.list_(pa.int32())),
                     "part": pa.array([{"a": n, "b": str(n)} for n in range(ROWS)]),
                     "money": pa.array(some(lambda n: Decimal(n).scaleb(-2)), pa.decimal128(20, 2)),
                     "bytes": pa.array(some(lambda n: n.to_bytes(4, "little")), pa.binary(4))})


@pytest.fixture(scope="module", params=FORMS)
def path(request, table, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("files") / "x.parquet")
    pq.write_table(table, path, row_group_size=1000, write_page_checksum=True, **FORMS[request.param])
    return path


def read(path, columns, group=1, dictionaries=(), memory=None):
    file = VerifiedFile(path, None, dictionaries)
    try:
        return file.read(group, columns, PageMemory() if memory is None else memory)
    finally:
        file.close()


def test_it_gives_what_arrow_gives(path, table):
    names = table.column_names
    expected = pq.ParquetFile(path).read_row_group(1, columns=names)
    assert read(path, names).equals(expected)
    assert read(path, ["part", "int"]).equals(expected.select(["part", "int"]))
    assert pa.types.is_dictionary(read(path, ["text"], dictionaries=["text"]).schema.field("text").type)


def test_what_was_decoded_does_not_lie_in_memory_that_is_used_again(path, table):
    memory, file = PageMemory(), VerifiedFile(path, None, ())
    names = table.column_names
    for _ in range(2):  # at first there is no room, and each column gets its own
        decoded = file.read(1, names, memory)
    expected = pq.ParquetFile(path).read_row_group(1, columns=names)
    memory._bytes[:] = 0xAA
    assert decoded.equals(expected)
    file.close()


def test_little_memory_is_kept_however_much_was_needed():
    memory = PageMemory()
    for _ in range(2):
        memory.clear()
        taken = [memory.take(size, at) for at, size in ((5, 2**20), (2**40 + 7, 2**26), (9, 100))]
    assert [len(t) for t in taken] == [2**20, 2**26, 100]
    assert [t.ctypes.data % 4096 for t in taken] == [5, 7, 9]
    assert len(memory._bytes) <= 2**24


def test_thirty_of_thirty_flipped_bits_are_found(path, table, tmp_path):
    """In each of four forms: a hundred and twenty."""
    whole, chance, footer = Path(path).read_bytes(), random.Random(30), pq.read_metadata(path)
    harmed = str(tmp_path / "harmed.parquet")
    for _ in range(30):
        leaf = footer.row_group(1).column(chance.randrange(footer.num_columns))
        begin = leaf.dictionary_page_offset if leaf.has_dictionary_page else leaf.data_page_offset
        stored = np.frombuffer(whole[begin:begin + leaf.total_compressed_size], np.uint8)
        found = np.empty((4096, 3), np.int64)
        first, end, _ = found[chance.randrange(_pages(stored, found))]
        at = begin + int(first) + chance.randrange(max(1, int(end - first)))
        with open(harmed, "wb") as file:
            file.write(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1:])
        with pytest.raises(DamagedPage, match=r"the page at bytes \d+ to \d+ differs from its checksum"):
            read(harmed, table.column_names)
        assert read(harmed, table.column_names, group=2).num_rows == 1000


def test_a_file_that_was_cut_meanwhile_says_so(path, tmp_path):
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(Path(path).read_bytes())
    file = VerifiedFile(str(cut), None, ())
    with open(cut, "r+b") as data:
        data.truncate(file.metadata.row_group(2).column(0).data_page_offset + 3)
    with pytest.raises(DamagedPage, match="it was truncated"):
        file.read(2, ["int"], PageMemory())
    file.close()


def test_garbage_in_the_place_of_pages_is_refused_within_its_bounds(path):
    whole, chance = Path(path).read_bytes(), np.random.default_rng(2)
    stored = np.frombuffer(whole, np.uint8)[4:2004]
    found = np.empty((64, 3), np.int64)
    for _ in range(3000):
        garbage = stored[:chance.integers(1, 2000)].copy()
        garbage[chance.integers(0, len(garbage), 3)] = chance.integers(0, 256, 3)
        count = _pages(garbage, found)
        for begin, end, _ in found[:min(count, 64)]:
            assert begin == -1 or 0 <= begin <= end <= len(garbage)
