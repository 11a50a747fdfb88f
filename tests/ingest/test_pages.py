"""Columns that stay stored until they are moved give the rows that Arrow decodes, whatever pages a file has."""

import ctypes
import itertools
import mmap
import os
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sluice import Errors, Knobs
from sluice.ingest.flow.decoded import Decoded
from sluice.ingest.flow.place_rows import SNAPPY
from sluice.ingest.flow.placer import Placer
from sluice.ingest.plain.footer_chunks import thrift_numbers
from sluice.ingest.read import pages
from sluice.ingest.read import reader as module
from sluice.ingest.read.page_table import PageTable
from sluice.ingest.row_order import EpochSchedule
from tests.open_loader import open_loader
from tests.product import (
    FUNCTIONS,
    READ_BEYOND,
    Buffers,
    ColumnError,
    Columns,
    DataFile,
    FileColumns,
    Governor,
    Read,
    ReadTask,
    RowGroupReader,
    RowsPlan,
    SourceError,
    call_kernel,
)
from tests.raises import assert_names, raises
from tests.thrift_structs import varint

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


NUMBER_TYPES = [*list(KINDS.values())[:5], pa.int16()]


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
    required = chance.random(len(names)) < 0.5
    schema = pa.schema(
        [pa.field(n, KINDS[n], nullable=not r) for n, r in zip(names, required, strict=True)]
    )
    columns = [drawn_column(KINDS[n], rows, chance) for n in names]
    for n in np.flatnonzero(~required & (chance.random(len(names)) < 0.4)):
        columns[n] = pc.if_else(chance.random(rows) < 0.9, columns[n], None)
    table = pa.table(columns, schema=schema)
    pq.write_table(
        table,
        path,
        row_group_size=int(chance.choice([300, 5000])),
        compression=str(chance.choice(["none", "lz4", "zstd", "snappy", "gzip"])),
        use_dictionary=bool(chance.random() < 0.6),
        dictionary_pagesize_limit=int(chance.choice([100, 2**20])),
        write_page_checksum=bool(chance.random() < 0.7),
        data_page_version=str(chance.choice(["1.0", "2.0"])),
        max_rows_per_page=int(chance.choice([90, 100_000])),
        store_schema=bool(chance.random() < 0.5),
    )
    return names


def reader(path, columns, in_pages=True):
    file = DataFile(path=str(path), rows=0, bytes=path.stat().st_size)
    unread = FileColumns({"split": pa.scalar(1)})
    return RowGroupReader([file], columns, located=[unread], in_pages=in_pages)


def columns_of(groups):
    """The columns of a reader in the roles that they can have: whole numbers as ids, others as numbers. A column that
    may have nulls is filled."""
    fields = {f.name: f.type for f in groups.stored if f.type in NUMBER_TYPES}
    ids = tuple(n for n, kind in fields.items() if kind in (pa.int32(), pa.int64()))
    floats = tuple(name for name in fields if name not in ids)
    footer, fill = pq.read_metadata(groups.files[0].path), {}
    for column in (footer.row_group(0).column(n) for n in range(footer.num_columns)):
        if column.statistics is None or column.statistics.null_count:
            fill[column.path_in_schema] = 7
    if len(fields) < 2:
        return None
    label = (*floats, *ids)[0]
    dense, sparse = (tuple(n for n in names if n != label) for names in (floats, ids))
    return Columns(dense=dense, sparse=sparse, label=label, fill=fill)


def gathered(groups, group, start=0, stop=None, piece=None):
    """The bits of some rows of all columns of numbers, as batches have them: of a row group, or of a piece."""
    columns, rows = columns_of(groups), groups.row_groups[0][group]
    if columns is None:
        return {}
    placer = Placer(RowsPlan(groups=((1,),), batch_size=1, streams=1), columns, str, Buffers())
    read, charge = piece or Read(0, group, rows, ()), Governor(2**40, 0).admit(1, True)
    decoded = Decoded(ReadTask(EpochSchedule(0, 0, (), (), ()), read), groups.read(read), charge)
    batch = placer.gather(decoded, [(start, rows if stop is None else stop, None)], 0)
    return {name: batch.column(name).to_numpy().tobytes() for name in batch.schema.names}


@pytest.mark.parametrize("seed", range(40))
def test_drawn_files_give_the_values_that_arrow_decodes(tmp_path, seed):
    path = tmp_path / "drawn.parquet"
    names = drawn_file(path, seed)
    ours, arrows = reader(path, names), reader(path, names, in_pages=False)
    chance = random.Random(seed)
    for group, rows in enumerate(ours.row_groups[0]):
        assert ours.decoded(0, group).schema.equals(arrows.decoded(0, group).schema)
        start = chance.randrange(rows)
        for bounds in ((), (start, chance.randrange(start, rows) + 1)):
            assert gathered(ours, group, *bounds) == gathered(arrows, group, *bounds)
        if table := ours._page_table(0, group):
            cuts = table.cuts(chance.randrange(1, rows + 1))
            assert np.diff(cuts).min() > 0
            whole = replace(Read(0, group, rows, ()), pages=table)
            for start, stop in itertools.pairwise(sorted({0, chance.choice(cuts), rows})):
                piece = whole.piece(start, stop)
                expected = arrows.decoded(0, group).slice(start, stop - start)
                found = arrows.decoded(0, group, read=piece)
                assert repr(found.to_pydict()) == repr(expected.to_pydict())
                here = gathered(ours, group, 0, stop - start, piece)
                assert here == gathered(arrows, group, start, stop)
        else:
            assert {"list", "bags"} & {*names}, "lists stay whole"
    ours.close()
    arrows.close()


NUMBERS = ("label", "d", "few", "long", "double")
OPTIONAL = {"compression": "snappy", "optional": True}


@pytest.fixture
def simple(tmp_path):
    """Six required columns, of which all but the last stay stored; two row groups of two pages."""

    def write(optional=False, **options):
        chance = np.random.default_rng(3)
        table = pa.table(
            {
                "label": pa.array(chance.integers(0, 2, 4000), pa.int8()),
                "d": pa.array(chance.normal(size=4000), pa.float32()),
                "few": pa.array(chance.integers(0, 40, 4000), pa.int32()),
                "long": pa.array(chance.integers(0, 400, 4000), pa.int64()),
                "double": pa.array(chance.normal(size=4000), pa.float64()),
                "text": pa.array([str(n) for n in range(4000)]),
            }
        )
        schema = pa.schema([f.with_nullable(optional) for f in table.schema])
        path = tmp_path / "simple.parquet"
        settings = {"compression": "none", "write_page_checksum": True, "max_rows_per_page": 1200}
        pq.write_table(table.cast(schema), path, row_group_size=2000, **(settings | options))
        return path

    return write


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, NUMBERS),
        ({"compression": "lz4"}, NUMBERS),
        ({"compression": {"d": "gzip", "few": "zstd"}}, ("label", "few", "long", "double")),
        ({"compression": "snappy"}, NUMBERS),
        ({"compression": "gzip"}, None),
        (
            {"use_dictionary": False, "column_encoding": {"few": "DELTA_BINARY_PACKED"}},
            ("label", "d", "long", "double"),
        ),
    ],
)
def test_numbers_stay_stored_beside_columns_that_arrow_decodes(simple, options, stored):
    groups = reader(simple(**options), (*NUMBERS, "text"))
    rows = groups.decoded(0, 1)
    assert getattr(rows, "stored", ()) == (stored or ())
    assert rows.schema.names == [*NUMBERS, "text"]
    if stored:
        assert set(rows.others.column_names) == set(rows.schema.names) - set(stored)
    groups.close()


@pytest.mark.parametrize(("compression", "number"), [("lz4", 7), ("zstd", 6), ("snappy", 0)])
def test_without_a_library_arrow_decodes_these_columns(simple, monkeypatch, compression, number):
    there = np.where(np.arange(8) == number, 0, FUNCTIONS)
    monkeypatch.setattr(pages, "FUNCTIONS", there)
    groups = reader(simple(compression=compression), ("d", "few"))
    assert isinstance(groups.decoded(0, 0), pa.Table)
    groups.close()


@pytest.mark.parametrize("compression", ["none", "lz4", "snappy", "zstd"])
def test_a_value_that_is_missing_is_found_by_the_footer_or_by_levels(
    tmp_path, monkeypatch, compression
):
    numbers = pa.array(range(3000), pa.int32())
    table = pa.table({"all": numbers, "gap": pc.if_else(pc.equal(numbers, 1234), None, numbers)})
    path, of_footer = tmp_path / "gap.parquet", pages.chunk_numbers
    pq.write_table(table, path, compression=compression)
    for nulls, stored in ((0, ("all", "gap")), (-1, ())):
        of_chunks = of_footer(pq.read_metadata(path))
        of_chunks[pages.NULLS] = nulls
        monkeypatch.setattr(pages, "chunk_numbers", lambda _, of_chunks=of_chunks: of_chunks)
        groups = reader(path, ("all", "gap"))
        assert getattr(groups.decoded(0, 0), "stored", ()) == stored
        bits = gathered(groups, 0)
        assert np.frombuffer(bits["all"], np.float32).tolist() == list(range(3000))
        found = np.frombuffer(bits["gap"], np.int32).tolist()
        assert found == [7 if n == 1234 else n for n in range(3000)]
        groups.close()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_of_version_2_are_decoded_by_arrow(simple, version):
    path = simple(data_page_version=version)
    ours, arrows = reader(path, NUMBERS), reader(path, NUMBERS, in_pages=False)
    calls, decode = [], type(ours)._read_stored

    def counted(groups, *given):
        calls.append(given)
        return decode(groups, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ours), "_read_stored", counted)
        bits = gathered(ours, 0)
    assert len(calls) == 1, "their heads show it at once"
    assert bits == gathered(arrows, 0)
    ours.close()
    arrows.close()


def test_levels_say_that_no_value_is_missing_only_by_runs_that_repeat_a_level(last_bytes):
    """2,000 pages whose levels repeat a level, or pack them, and end where memory ends."""
    chance, outcomes = random.Random(2), []
    for _ in range(2000):
        levels, there = b"", []
        for _ in range(chance.randrange(1, 4)):
            count, bit, packs = (
                chance.randrange(1, 60),
                chance.random() < 0.9,
                chance.random() < 0.2,
            )
            levels += bytes([count << 1 | packs, bit])
            there += [bit and not packs] * count
        rows = chance.randrange(1, len(there) + 2)
        memory = last_bytes(levels)
        outcomes.append(bool(call_kernel("is_complete", memory, len(levels), rows)))
        assert outcomes[-1] == (len(there) >= rows and all(there[:rows]))
    assert 300 < sum(outcomes) < 1700


@pytest.mark.parametrize(("names", "calls"), [(("label", "d", "few"), 1), (("few", "label"), 2)])
def test_one_call_reads_the_stored_columns_that_lie_together(simple, monkeypatch, names, calls):
    groups, reads = reader(simple(), names), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: reads.append(given[2]) or preadv(*given))
    rows = groups.decoded(0, 1)
    assert len(reads) == calls
    assert rows.stored == names
    groups.close()


# ---- damage


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "lz4", "use_dictionary": False},
        OPTIONAL,
        {"compression": "zstd", "optional": True},
    ],
)
def test_of_a_hundred_and_twenty_flips_in_pages_none_gives_another_row(simple, options):
    """Caught, or in a part of a page's head that holds no values."""
    path, chance, outcomes = simple(**options), random.Random(30), Counter()
    expected, whole = gathered(reader(path, NUMBERS), 0), path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(n) for n in range(len(NUMBERS))]
    for _ in range(120):
        [chunk] = chance.choices(
            chunks, [chunk_stored.total_compressed_size for chunk_stored in chunks]
        )
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        content = bytearray(whole)
        content[begin + chance.randrange(chunk.total_compressed_size)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        groups = reader(path, NUMBERS)  # an open one would see that the file has changed
        try:
            assert gathered(groups, 0) == expected, chunk.path_in_schema
            outcomes["in a page's head"] += 1
        except SourceError as error:
            assert_names(str(error), path, "row group 0")
            outcomes["caught"] += 1
        groups.close()
    assert outcomes["in a page's head"] < 9


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
                outcomes.append(gathered(groups, 0))
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


def drawn_indices(chance, bits):
    """The runs of a page with indices of so many bits, and the indices."""
    content, indices = bytes([bits]), []
    for _ in range(chance.randrange(1, 9)):
        if chance.random() < 0.5:
            index, count = chance.getrandbits(bits), chance.choice([1, 7, 63, 64, 900])
            content += varint(count << 1) + index.to_bytes((bits + 7) // 8, "little")
            indices += [index] * count
        else:
            some = [chance.getrandbits(bits) for _ in range(8 * chance.randrange(1, 20))]
            packed = sum(index << bits * n for n, index in enumerate(some))
            content += varint(len(some) // 8 << 1 | 1) + packed.to_bytes(
                bits * len(some) // 8, "little"
            )
            indices += some
    return content, indices


@pytest.mark.parametrize("bits", range(32))
def test_indices_of_any_width_are_read_from_long_and_packed_runs(bits, last_bytes):
    chance = random.Random(bits)
    for _ in range(40):
        content, indices = drawn_indices(chance, bits)
        memory = last_bytes(content + bytes(READ_BEYOND))
        count = chance.randrange(1, len(indices) + 1)
        read = np.zeros(len(indices), np.int32)
        assert call_kernel("read_indices", memory, len(content), count, read)
        assert read[:count].tolist() == indices[:count]
        assert not read[count:].any()
        more = np.empty(20_000, np.int32)
        assert not call_kernel("read_indices", memory, len(content), len(indices) + 1, more)


def literal_of(content, more):
    """Snappy's bytes as they are, with their length in the tag or in `more` bytes after it."""
    length = len(content) - 1
    tag = (
        bytes([length << 2])
        if not more
        else bytes([59 + more << 2]) + length.to_bytes(more, "little")
    )
    return tag + content


def copy_of(period, length, kind):
    """Snappy's copy of bytes that came before."""
    if kind == 1:
        return bytes([period >> 8 << 5 | length - 4 << 2 | 1, period & 255])
    return bytes([length - 1 << 2 | kind]) + period.to_bytes(2 * (kind - 1), "little")


def unpack_page(codec, *places):
    return bool(call_kernel("unpack_page", codec, FUNCTIONS, *places))


def unpacked_snappy(packed, size, last_bytes):
    """What the compiled function makes of it, in memory that ends where it ends."""
    source, into = (last_bytes(data + bytes(READ_BEYOND)) for data in (packed, bytes(size)))
    places = source.ctypes.data, len(packed), into.ctypes.data, size
    return unpack_page(SNAPPY, *places) and into[:size].tobytes()


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("period", [*range(1, 13), 15, 16, 17, 300])
def test_a_copy_of_any_period_and_length_repeats_what_came_before(period, kind, last_bytes):
    before = random.Random(period).randbytes(period + 5)
    lengths = range(4, 12) if kind == 1 else range(1, 65)
    for length in lengths:
        content = bytearray(before)
        for _ in range(length):
            content.append(content[-period])
        content += b"end"
        packed = (
            varint(len(content))
            + literal_of(before, 2)
            + copy_of(period, length, kind)
            + literal_of(b"end", 0)
        )
        assert pa.decompress(packed, len(content), "snappy", asbytes=True) == content
        assert unpacked_snappy(packed, len(content), last_bytes) == content


@pytest.mark.parametrize(("codec", "number"), [("snappy", 1), ("zstd", 6), ("lz4_raw", 7)])
def test_a_damaged_page_or_one_of_another_size_than_its_head_says_is_refused(
    codec, number, last_bytes
):
    """300 pages are read and written within memory that ends where they end."""

    def unpack(packed, size):
        source, into = (last_bytes(data + bytes(READ_BEYOND)) for data in (packed, bytes(size)))
        done = unpack_page(number, source.ctypes.data, len(packed), into.ctypes.data, size)
        return done and into[:size].tobytes()

    content, chance = bytes(range(100)) * 9, random.Random(5)
    packed = pa.Codec(codec).compress(content, asbytes=True)
    assert unpack(packed, 900) == content
    for size in (1, 899, 901, 5000):
        assert not unpack(packed, size)
    for _ in range(300):
        damaged = bytearray(packed)
        damaged[chance.randrange(len(packed))] = chance.randrange(256)
        unpack(damaged, 900)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_are_whole_also_if_the_system_reads_less_than_it_was_asked_for(
    tmp_path, monkeypatch, seed
):
    chance = random.Random(seed)
    content = chance.randbytes(9000)
    (tmp_path / "a").write_bytes(content)
    ends = sorted(chance.sample(range(9001), 12))
    places = list(itertools.pairwise(ends))
    places = [*places[:3], *places[4:7], *places[8:]]  # runs of several chunks, with gaps
    chance.shuffle(places)
    plain, counts = os.preadv, []

    def read_less(descriptor, into, at):
        [part] = into
        counts.append(plain(descriptor, [part[: chance.choice([1, 7, 50, 200])]], at))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", read_less)
    with (tmp_path / "a").open("rb") as file:
        addresses, _data = pages.read_chunks(file.fileno(), np.array(places), Buffers())
        with raises(EOFError, "byte 9000", "cut off"):
            pages.read_chunks(file.fileno(), np.array([(8000, 9001)]), Buffers())
    assert len(counts) > 20
    for (begin, end), address in zip(places, addresses.tolist(), strict=True):
        assert ctypes.string_at(address, end - begin) == content[begin:end]


@pytest.fixture
def wrong_index(simple):
    """A file without checksums, whose second row group has an index beyond its dictionary."""
    path = simple(use_dictionary=["few"], write_page_checksum=False)
    chunk = pq.read_metadata(path).row_group(1).column(2)
    content, begin = bytearray(path.read_bytes()), chunk.data_page_offset
    numbers = np.empty((128, 2), np.int64)
    address = np.uint64(np.frombuffer(content, np.uint8).ctypes.data)
    _, at = thrift_numbers(address, begin, len(content), numbers)
    content[at + 8 : at + 14] = b"\xff" * 6
    path.write_bytes(content)
    return path


ROLES = {"label": "label", "dense": ["d", "double"], "sparse": ["few", "long"]}


def test_an_index_beyond_its_dictionary_is_an_error_with_file_row_group_and_column(wrong_index):
    with (
        open_loader(str(wrong_index), batch_size=500, roles=ROLES) as loader,
        raises(SourceError, wrong_index, "row group 1", "'few'"),
    ):
        list(loader)


def test_rows_of_a_page_that_cannot_be_unpacked_are_quarantined(wrong_index, tmp_path):
    errors = Errors(on_error="quarantine", quarantine=tmp_path / "bad.jsonl", max_rows=5000)
    with open_loader(str(wrong_index), batch_size=500, roles=ROLES, errors=errors) as loader:
        batches = list(loader)
        assert loader.quarantined["rows_set_aside"] == 2000
    assert sum(float(batch.weight.sum()) for batch in batches) == 2000
    assert_names((tmp_path / "bad.jsonl").read_text(), "simple.parquet", "few")


# ---- loading


@pytest.mark.parametrize("seed", range(6))
def test_batches_and_order_are_those_of_arrow(table, simple, seed, monkeypatch):
    """With any number of ranks and of workers, over windows that cut row groups, after a resumption, and in pieces."""
    chance = random.Random(seed)
    options = {
        "batch_size": 64,
        "seed": seed,
        "window_rows": chance.choice([100, 700, 8192]),
        "epochs": 2,
        "ranks": chance.choice([1, 2, 4]),
        "knobs": Knobs(workers={"decode": 1 + seed % 3}),
    }
    options["rank"] = options["ranks"] - 1
    if seed > 2:
        layout = OPTIONAL if seed == 3 else {"compression": "lz4", "use_dictionary": seed == 4}
        table, options["roles"] = str(simple(**layout)), ROLES
    hashes, sums = [], []
    for in_pages, piece in ((True, 0), (False, 0), (True, 20), (False, 20)):
        if piece:
            monkeypatch.setattr(module, "_MOST_AGAIN", 99)
            monkeypatch.setattr(module, "_LARGE_BYTES", 0)
            monkeypatch.setattr(module, "PIECE_ROWS", piece)
        with open_loader(table, **options) as loader:
            groups = loader._input.groups
            groups.in_pages = in_pages
            assert bool(groups.largest_read) == bool(piece), "row groups are cut"
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
    assert len(set(hashes)) == 1
    assert sums == 4 * [sums[0]]
    assert len(sums[0]) > 100


@pytest.mark.parametrize("seed", range(20))
def test_what_is_counted_for_pieces_is_what_they_read(seed):
    """A piece reads the dictionary of a column only if its pages need it."""
    chance = np.random.default_rng(seed)
    columns = {}
    for name in "abc":
        starts = [0, 0, *np.sort(chance.choice(np.arange(1, 50), chance.integers(9), False)), 50]
        bytes_of = np.cumsum(chance.integers(1, 99, len(starts)))
        needs = chance.integers(0, 2, len(starts))
        columns[name] = np.column_stack(
            [starts, bytes_of, chance.integers(1, 99, len(starts)), needs]
        )
        columns[name][[0, -1], 3] = 0
    table = PageTable(50, columns)
    cuts = table.cuts(int(chance.integers(2, 40)))
    counted = table.taken(cuts)
    for name, sums in zip(columns, counted, strict=True):
        for (first, end), (rows, size, _) in zip(itertools.pairwise(cuts), sums, strict=True):
            piece = table.pages_of(name, first, end - first)
            assert rows == piece.rows
            assert size == sum(to - begin for begin, to in piece.places)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_numbers_of_8_bytes_become_what_numpy_makes_of_them(tmp_path, compression):
    """Stored until they are moved, and decoded by Arrow."""
    doubles = np.resize([0.1, -0.0, np.nan, np.inf, -np.inf, 3.4e38, 1e-46, 2**53 + 1.0], 512)
    longs = np.resize([0, -1, 2**53 + 1, -(2**63), 2**31, 7, 2**24 + 1, 5], 512)
    ids = np.arange(512) * (2**22 + 1)
    table = pa.table({"y": np.resize([0, 1], 512), "x": doubles, "n": longs, "i": ids})
    pq.write_table(table, tmp_path / "a.parquet", compression=compression)
    roles = {"label": "y", "dense": ["x", "n"], "sparse": "i"}
    how = {"batch_size": 512, "shuffle": False, "streams": 1, "errors": Errors(finite=False)}
    with open_loader(str(tmp_path), roles=roles, **how) as loader:
        [batch] = loader
    expected = np.stack([doubles, longs], 1).astype(np.float32)
    expected[:, 1] = longs.astype(np.float32)
    assert batch.dense.numpy().tobytes() == expected.tobytes()
    assert batch.values.tolist() == ids.tolist()
    assert batch.label.tolist() == np.resize([0, 1], 512).tolist()


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [("x", 1e39, "1e+39"), ("i", -1, "-1"), ("i", 2**31, "2147483648"), ("i", 2**32, "4294967296")],
)
def test_a_number_of_8_bytes_that_does_not_fit_is_refused_with_its_row(
    tmp_path, compression, name, value, fact
):
    columns = {"y": np.resize([0, 1], 512), "x": np.ones(512), "i": np.arange(512)}
    columns[name][100] = value
    schema = pa.schema([pa.field(n, pa.array(c).type, nullable=False) for n, c in columns.items()])
    table = pa.table(columns, schema=schema)
    pq.write_table(table, tmp_path / "a.parquet", compression=compression, write_statistics=False)
    roles = {"label": "y", "dense": "x", "sparse": "i"}
    with (
        raises(ColumnError, "a.parquet, row group 0, row 100", repr(name), fact),
        open_loader(str(tmp_path), roles=roles, batch_size=64) as loader,
    ):
        list(loader)
