"""Columns that stay stored until they are moved give the rows that Arrow decodes, whatever pages a file has."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.etl.schema import DataFile
from sluice.ingest.choices import Errors
from sluice.ingest.columns import ColumnError
from sluice.ingest.knobs import Knobs
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.read import pages
from sluice.ingest.read.open_file import LocalFile
from sluice.ingest.read.reader import RowGroupReader, SourceError
from sluice.ingest.stages import scatter_kernel
from sluice.ingest.stages.scatter_kernel import DICTIONARY, INDICES, PAGE, unpack_column
from tests.open_loader import open_loader
from tests.raises import assert_names, raises

KINDS = {
    "int32": pa.int32(),
    "int8": pa.int8(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "short": pa.int16(),
    "word": pa.string(),
    "bags": pa.binary(),
    "list": pa.list_(pa.int32()),
}


def drawn_column(kind, rows, chance):
    """Values of a type: all alike, few, many, or in runs."""
    few = int(chance.choice([1, 2, 5, 300, 2**31 - 1]))
    numbers = chance.integers(0, few, rows)
    if chance.random() < 0.3:
        numbers = np.sort(numbers)
    if kind == pa.int8():
        return pa.array((numbers % 256 - 128).astype(np.int8))
    if pa.types.is_integer(kind):
        return pa.array(numbers.astype(kind.to_pandas_dtype()), kind)
    if pa.types.is_floating(kind):
        values = numbers.astype(kind.to_pandas_dtype()) / 7
        values[numbers % 11 == 1] = np.nan
        return pa.array(values, kind)
    return pa.array([[n] if kind == KINDS["list"] else str(n)[:9] for n in numbers], kind)


def drawn_file(path, seed):
    """A file of random columns in a random layout, and its table."""
    chance = np.random.default_rng(seed)
    rows = int(chance.choice([1, 7, 1000, 5000]))
    names = chance.permutation(list(KINDS))[: chance.integers(1, len(KINDS) + 1)].tolist()
    required = chance.random(len(names)) < 0.8
    schema = pa.schema(
        [pa.field(n, KINDS[n], nullable=not r) for n, r in zip(names, required, strict=True)]
    )
    table = pa.table([drawn_column(KINDS[n], rows, chance) for n in names], schema=schema)
    pq.write_table(
        table,
        path,
        row_group_size=int(chance.choice([300, 5000])),
        compression=str(chance.choice(["none", "none", "lz4", "lz4", "zstd", "snappy"])),
        use_dictionary=bool(chance.random() < 0.6),
        dictionary_pagesize_limit=int(chance.choice([100, 2**20])),
        write_page_checksum=bool(chance.random() < 0.7),
        data_page_version=str(chance.choice(["1.0", "1.0", "2.0"])),
        max_rows_per_page=int(chance.choice([90, 100_000])),
        store_schema=bool(chance.random() < 0.5),
    )
    return names


def reader(path, columns, in_pages=True):
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    file = DataFile(
        path=str(path),
        rows=sum(groups),
        bytes=path.stat().st_size,
        row_group_rows=tuple(groups),
    )
    return RowGroupReader([file], columns, in_pages=in_pages)


def stored_bits(rows, name, start, stop):
    """The bits of some rows of a column, and its type."""
    column = (
        rows.column(name).slice(start, stop - start)
        if isinstance(rows, pa.Table)
        else rows.column(name, start, stop)
    ).combine_chunks()
    is_number = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
    return column.type, column.to_numpy().tobytes() if is_number else column.to_pylist()


@pytest.mark.parametrize("seed", range(40))
def test_drawn_files_give_the_values_that_arrow_decodes(tmp_path, seed):
    path = tmp_path / "drawn.parquet"
    names = drawn_file(path, seed)
    ours, arrows = reader(path, names), reader(path, names, in_pages=False)
    chance = random.Random(seed)
    for group, rows in enumerate(ours.row_groups[0]):
        some, decoded = ours.decoded(0, group), arrows.decoded(0, group)
        assert some.schema.equals(decoded.schema)
        assert some.num_rows == rows
        for name in names:
            start = chance.randrange(rows)
            for bounds in ((0, rows), (start, chance.randrange(start, rows) + 1)):
                assert stored_bits(some, name, *bounds) == stored_bits(decoded, name, *bounds)
    ours.close()
    arrows.close()


@pytest.fixture
def simple(tmp_path):
    """Five required columns, of which all but the text stay stored; two row groups of two pages."""

    def write(**options):
        chance = np.random.default_rng(3)
        table = pa.table(
            {
                "label": pa.array(chance.integers(0, 2, 4000), pa.int8()),
                "d": pa.array(chance.normal(size=4000), pa.float32()),
                "few": pa.array(chance.integers(0, 40, 4000), pa.int32()),
                "long": pa.array(chance.integers(0, 400, 4000), pa.int64()),
                "text": pa.array([str(n) for n in range(4000)]),
            }
        )
        schema = pa.schema([f.with_nullable(False) for f in table.schema])
        path = tmp_path / "simple.parquet"
        settings = {"compression": "none", "write_page_checksum": True, "max_rows_per_page": 1200}
        pq.write_table(table.cast(schema), path, row_group_size=2000, **(settings | options))
        return path

    return write


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, ("label", "d", "few", "long")),
        ({"compression": "lz4"}, ("label", "d", "few", "long")),
        ({"use_dictionary": False, "compression": "lz4"}, ("label", "d", "few", "long")),
        ({"compression": {"d": "zstd", "few": "none"}}, ("label", "few", "long")),
        ({"compression": "snappy"}, None),
        ({"data_page_version": "2.0"}, None),
        (
            {"use_dictionary": False, "column_encoding": {"long": "DELTA_BINARY_PACKED"}},
            ("label", "d", "few"),
        ),
    ],
)
def test_numbers_stay_stored_beside_columns_that_arrow_decodes(simple, options, stored):
    groups = reader(simple(**options), ("label", "d", "few", "long", "text"))
    rows = groups.decoded(0, 1)
    assert getattr(rows, "stored", ()) == (stored or ())
    assert rows.schema.names == ["label", "d", "few", "long", "text"]
    if stored:
        assert set(rows.others.column_names) == set(rows.schema.names) - set(stored)
    groups.close()


def test_without_the_library_for_lz4_arrow_decodes_these_columns(simple, monkeypatch):
    monkeypatch.setattr(pages, "LZ4", np.uint64(0))
    groups = reader(simple(compression="lz4"), ("d", "few"))
    assert isinstance(groups.decoded(0, 0), pa.Table)
    groups.close()


def test_one_call_reads_the_stored_columns_of_a_row_group(simple, monkeypatch):
    groups, reads = reader(simple(), ("label", "d", "few", "long")), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: reads.append(given[2]) or preadv(*given))
    groups.decoded(0, 0)
    assert len(reads) == 1
    groups.close()


def test_a_row_group_far_from_the_others_columns_is_read_in_two_calls(tmp_path, monkeypatch):
    chance = np.random.default_rng(3)
    table = pa.table(
        {
            "a": chance.normal(size=9000),
            "far": chance.normal(size=9000),
            "b": chance.normal(size=9000),
        }
    )
    schema = pa.schema([f.with_nullable(False) for f in table.schema])
    pq.write_table(table.cast(schema), path := tmp_path / "far.parquet", compression="none")
    file, buffers, reads = LocalFile(str(path), None, []), Buffers(), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: reads.append(given[2]) or preadv(*given))
    rows = pages.StoredRows(file.fetch(0, ["b", "a"], buffers), ["b", "a"], pytest.fail)
    assert len(reads) == 2
    for name in ("b", "a"):
        assert rows.column(name, 100, 9000).equals(table.column(name).slice(100))
    file.close()


# ---- damage


def flipped(path, at, chance):
    """Flips a bit of a file, where it lies."""
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), at)


def all_bits(groups):
    """The bits of all columns of the first row group. Damage that a move would find is found here."""
    rows = groups.decoded(0, 0)
    try:
        return [stored_bits(rows, name, 0, rows.num_rows) for name in rows.schema.names]
    except pages.DamagedPage as error:
        raise SourceError(f"{groups.files[0].path}, row group 0: {error}") from error


@pytest.mark.parametrize("options", [{}, {"compression": "lz4"}, {"use_dictionary": False}])
def test_of_a_hundred_and_twenty_flips_in_pages_none_gives_another_row(simple, options):
    """Caught, or in a part of a page's head that holds no values."""
    path, chance, outcomes = simple(**options), random.Random(30), Counter()
    names = ("label", "d", "few", "long")
    expected, whole = all_bits(reader(path, names)), path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(n) for n in range(4)]
    for _ in range(120):
        [chunk] = chance.choices(chunks, [one.total_compressed_size for one in chunks])
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        flipped(path, begin + chance.randrange(chunk.total_compressed_size), chance)
        groups = reader(path, names)  # an open one would see that the file has changed
        try:
            assert all_bits(groups) == expected, chunk.path_in_schema
            outcomes["in a page's head"] += 1
        except SourceError as error:
            assert_names(str(error), path, "row group 0")
            outcomes["caught"] += 1
        groups.close()
        path.write_bytes(whole)
    assert outcomes.total() == 120
    assert outcomes["in a page's head"] < 9, outcomes


@pytest.mark.parametrize("seed", range(30))
def test_a_file_that_is_cut_off_or_has_random_bytes_gives_arrows_rows_or_an_error(tmp_path, seed):
    """Also without checksums: then other values may come, but the same as Arrow's."""
    path, chance = tmp_path / "drawn.parquet", random.Random(seed)
    names = drawn_file(path, seed)
    footer = pq.read_metadata(path).serialized_size + 8
    whole = bytearray(path.read_bytes())
    for _ in range(6):
        content = bytearray(whole)
        at = chance.randrange(4, len(whole) - footer - 8)
        if chance.random() < 0.3:  # the footer's places are beyond the end of the columns
            del content[at : len(whole) - footer]
        else:
            content[at : at + 8] = chance.randbytes(8)
        path.write_bytes(content)
        outcomes = []
        for in_pages in (True, False):
            try:
                groups = reader(path, names, in_pages)
                outcomes.append(all_bits(groups))
                groups.close()
            except SourceError as error:
                assert_names(str(error), path)
                outcomes.append(None)
        assert outcomes[0] == outcomes[1] or None in outcomes


@pytest.fixture
def last_bytes():
    """Puts bytes at the end of memory: the page after them cannot be read."""
    held = []
    libc = ctypes.CDLL(None, use_errno=True)

    def put(content):
        size = 1 << 16
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        held.append(memory)
        array = np.frombuffer(memory, np.uint8)
        assert not libc.mprotect(ctypes.c_void_p(array.ctypes.data + size), mmap.PAGESIZE, 0)
        array[size - len(content) : size] = np.frombuffer(content, np.uint8)
        return array[size - len(content) : size]

    return put


def test_random_bytes_are_unpacked_within_their_memory_or_refused(last_bytes):
    """1,200 pages of indices and of LZ4 that end where memory ends."""
    chance, outcomes = random.Random(8), Counter()
    values = np.arange(300, dtype=np.int32)
    for number in range(1200):
        rows = chance.randrange(1, 300)
        content = bytes([chance.choice([0, 1, 5, 9, 17, 31, 32, 255])]) + chance.randbytes(
            chance.randrange(0, 400)
        )
        is_lz4 = number % 3 == 0
        memory = last_bytes(content + (b"" if is_lz4 else bytes(scatter_kernel.READ_BEYOND)))
        described = np.zeros(2, PAGE)
        described[0] = values.ctypes.data, 1200, 1200, 0, DICTIONARY, 0
        form = INDICES if number % 2 else 0
        unpacked = 8 * rows + 64 if form else 4 * rows
        described[1] = (
            memory.ctypes.data,
            len(content),
            unpacked if is_lz4 else len(content),
            rows,
            form if is_lz4 else INDICES,
            is_lz4,
        )
        into = np.empty(rows, np.int32)
        outcomes[bool(unpack_column(described, 0, rows, into))] += 1
    assert min(outcomes[False] // 30, outcomes[True]) > 10, outcomes


def test_random_heads_of_pages_lie_within_their_chunk_or_are_refused(simple):
    """3,000 chunks: those of a file with random bytes in the heads of their pages."""
    fetched = LocalFile(str(simple()), None, []).fetch(0, ["label", "d", "few", "long"], Buffers())
    chance = random.Random(4)
    whole = fetched.data.copy()

    def parsed():
        found = np.zeros((4, 9), PAGE)
        checksums, counts = np.zeros((4, 9), np.int64), np.zeros(4, np.int64)
        pages.page_table(fetched.data, fetched.chunks, fetched.rows, found, checksums, counts)
        return [column[: max(0, count)] for column, count in zip(found, counts, strict=True)]

    heads = [column["address"].astype(np.int64).tolist() for column in parsed()]
    accepted = 0
    for _ in range(750):
        fetched.data[:] = whole
        for ends in heads:
            at = chance.choice(ends) - chance.randrange(1, 70)
            fetched.data[at] = chance.randrange(256)
        for (begin, end, width, _), some in zip(fetched.chunks.tolist(), parsed(), strict=True):
            accepted += len(some) > 0
            assert (some["address"] > begin).all()
            assert (some["size"] > 0).all()
            assert (some["address"].astype(np.int64) + some["size"] <= end).all()
            assert some["rows"].sum() in (0, fetched.rows)
            values = some[some["form"] != INDICES]
            assert (values["unpacked"] % width == 0).all()
    assert 300 < accepted < 2700


@pytest.fixture
def wrong_index(simple):
    """A file whose second row group has an index beyond its dictionary, in a page with the right checksum."""
    path = simple(use_dictionary=["few"])
    chunk = pq.read_metadata(path).row_group(1).column(2)
    content = bytearray(path.read_bytes())
    begin, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    numbers = np.empty((128, 2), np.int64)
    count, at = pages.thrift_numbers(np.frombuffer(bytes(content), np.uint8), begin, end, numbers)
    size = dict(numbers[:count].tolist())[3]
    assert content[at] == 6  # bits of an index among 40
    old = pages.crc32(content[at : at + size])
    content[at + 8 : at + 14] = b"\xff" * 6
    new = pages.crc32(content[at : at + size])
    head = content[begin:at]
    replaced = head.replace(varint(old), varint(new))
    assert len(replaced) == len(head)
    assert replaced != head
    content[begin:at] = replaced
    path.write_bytes(content)
    return path


def varint(checksum):
    """A checksum as it is in a head: zigzag, seven bits a byte."""
    signed = checksum - (checksum >> 31 << 32)
    value, found = (signed << 1) ^ (signed >> 63), bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


ROLES = {"label": "label", "dense": ["d"], "sparse": ["few"]}


def test_an_index_beyond_its_dictionary_is_an_error_with_file_row_group_and_column(wrong_index):
    with (
        loader_of(wrong_index) as loader,
        raises(SourceError, wrong_index, "row group 1", "'few'"),
    ):
        list(loader)


def loader_of(path, **options):
    """A loader whose ids stay stored, as a feature table's do."""
    found = open_loader(str(path), batch_size=500, roles=ROLES, **options)
    found._input.groups._ids = ()
    return found


def test_rows_of_a_page_that_cannot_be_unpacked_are_quarantined(wrong_index, tmp_path):
    errors = Errors(on_error="quarantine", quarantine=tmp_path / "bad.jsonl", max_rows=5000)
    with loader_of(wrong_index, errors=errors) as loader:
        batches = list(loader)
        assert loader.quarantined["rows_set_aside"] == 2000
    assert sum(float(batch.weight.sum()) for batch in batches) == 2000
    assert_names((tmp_path / "bad.jsonl").read_text(), "simple.parquet", "few")


# ---- loading


@pytest.mark.parametrize("seed", range(6))
def test_batches_and_order_are_those_of_arrow(table, seed):
    """With any number of ranks and of workers, over windows that cut row groups, and after a resumption."""
    chance = random.Random(seed)
    options = {
        "batch_size": 64,
        "seed": seed,
        "window_rows": chance.choice([100, 700, 8192]),
        "epochs": 2,
        "ranks": chance.choice([1, 2, 4]),
        "knobs": Knobs(workers={"decode": 1 + seed % 3}, fused=chance.choice([(), ("shuffle",)])),
    }
    options["rank"] = options["ranks"] - 1
    hashes, sums = [], []
    for in_pages in (True, False):
        with open_loader(table, **options) as loader:
            groups = loader._input.groups
            assert groups.in_pages
            groups.in_pages = in_pages
            loader.load_state_dict(
                {**loader.state_dict(), "step": 7} if seed % 2 else loader.state_dict()
            )
            taken = [
                (b.step, b.checksum, b.dense.numpy().tobytes(), b.values.numpy().tobytes())
                for _ in range(2)
                for b in loader
            ]
            sums.append(taken)
            hashes.append(loader.order_hash)
    assert hashes[0] == hashes[1]
    assert sums[0] == sums[1]
    assert len(sums[0]) > 100


@pytest.mark.parametrize("compression", ["none", "lz4", "snappy"])
def test_plain_parquet_with_checked_ids_gives_the_batches_of_arrow(simple, compression):
    path, batches = simple(compression=compression), []
    for in_pages in (True, False):
        with open_loader(str(path), batch_size=300, roles=ROLES, window_rows=700) as loader:
            loader._input.groups.in_pages = in_pages
            batches.append(
                [(b.dense.tolist(), b.values.tolist(), b.label.tolist()) for b in loader]
            )
    assert batches[0] == batches[1]
    assert len(batches[0]) == 13


def test_an_id_below_0_in_a_column_that_could_stay_stored_is_refused(tmp_path):
    ids, path = np.arange(600, dtype=np.int32), tmp_path / "a.parquet"
    ids[450] = -3
    fields = {"label": pa.float32(), "d": pa.float32(), "few": pa.int32()}
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()])
    table = pa.table(
        [pa.array(ids % 2, pa.float32()), pa.array(ids, pa.float32()), ids], schema=schema
    )
    pq.write_table(table, path, row_group_size=200, compression="none", write_statistics=False)
    with (
        raises(ColumnError, "a.parquet, row group 2, row 50", "'few'", "-3"),
        open_loader(str(path), batch_size=100, roles=ROLES) as loader,
    ):
        list(loader)
