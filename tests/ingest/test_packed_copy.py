"""The packed copy gives the rows of Parquet, or none: whatever happens to it, or to the file that it was made of."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.etl.schema import DataFile
from sluice.ingest.choices import READERS
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.packed_copy import DamagedCopy, PackedCopy, PackedTable, packed
from sluice.ingest.read.reader import RowGroupReader, SourceError
from sluice.ingest.stages import shuffle
from sluice.ingest.stages.bags import shuffle_bags
from sluice.ingest.stages.scatter_kernel import BYTES_TO_FLOATS, WORDS, scatter_packed
from tests.open_loader import open_loader
from tests.raises import assert_names, raises

ROWS = 9000  # more than one whole block of lanes, and a part of one
GROUP = 500


def some(value, rows=ROWS):
    chance = random.Random(5)
    return [None if chance.random() < 0.1 else value(n) for n in range(rows)]


def of_all_types(rows=ROWS):
    chance = np.random.default_rng(2)
    limits = {np.dtype(kind): np.iinfo(kind) for kind in "bhiqBHIQ"}
    ids = [chance.integers(0, 1000, n % 7).astype("<i4") for n in range(rows)]
    return pa.table(
        {
            str(kind): chance.integers(limit.min, limit.max, rows, dtype=kind)
            for kind, limit in limits.items()
        }
        | {
            "few bits": chance.integers(-3, 900, rows),
            "negative": pa.array(chance.integers(-(2**31), -(2**31) + 5000, rows), pa.int32()),
            "wide but few": chance.integers(0, 7, rows) * 2**60,
            "missing": pa.array(some(int, rows), pa.int32()),
            "nothing": pa.array([None] * rows, pa.int32()),
            "null": pa.nulls(rows),
            "float": pa.array(chance.normal(size=rows), pa.float32()),
            "few floats": pa.array(
                some(lambda n: [0.0, -0.0, float("nan"), float("inf"), 1.5][n % 5], rows),
                pa.float32(),
            ),
            "half": chance.normal(size=rows).astype(np.float16),
            "flag": some(lambda n: n % 3 == 0, rows),
            "text": some(lambda n: f"t{n % 97}ä" * 9, rows),
            "word": pa.array(some(lambda n: f"t{n % 97}", rows)).dictionary_encode(),
            "bags": [one.tobytes() for one in ids],
            "equal bags": [struct.pack("<3i", n, -n, 5) for n in range(rows)],
            "odd bytes": some(lambda n: b"x" * (n % 5), rows),
            "list": pa.array(some(lambda n: list(range(n % 7)), rows), pa.list_(pa.int32())),
            "lists of lists": [[[n], [n, n]] for n in range(rows)],
            "part": some(lambda n: {"a": n, "b": str(n)}, rows),
            "money": some(lambda n: Decimal(n).scaleb(-2), rows),
            "time": pa.array(range(rows), pa.timestamp("us", "UTC")),
        }
    )


def entry(table, key="k"):
    """An entry in memory as it is when it comes from the disk."""
    return np.frombuffer(bytearray(packed(table, key)), np.uint8)


@pytest.fixture(scope="module")
def every_type():
    return of_all_types()


def test_every_type_comes_back_as_it_was_to_the_bit(every_type):
    found = PackedTable(entry(every_type), "k").table()
    assert found.schema.equals(every_type.schema, check_metadata=True)
    for name in every_type.column_names:
        was, now = (t[name].combine_chunks() for t in (every_type, found))
        now.validate(full=True)
        as_bits = (
            pa.types.is_floating(was.type) and not was.null_count
        )  # NaN is not equal to itself
        assert (
            was.to_numpy().tobytes() == now.to_numpy().tobytes()
            if as_bits
            else was.equals(now) or repr(was.to_pylist()) == repr(now.to_pylist())
        ), name


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 8191, 8192, 8193, 16384, 16385])
def test_any_number_of_rows_and_slices_of_tables_come_back(rows):
    for bits in (0, 1, 5, 13, 17, 31, 32):
        values = np.random.default_rng(bits).integers(0, 2**bits, rows)
        table = pa.table(
            {"v": pa.array(values), "l": pa.array([[n] * (n % 3) for n in range(rows)])}
        )
        assert PackedTable(entry(table), "k").table().equals(table)
    part = table.slice(rows // 3)
    assert PackedTable(entry(part), "k").table().equals(part)
    assert packed(table.slice(0, 0), "k") is None


def test_numbers_take_as_many_bits_as_their_range_or_their_dictionary_needs(every_type):
    size = {
        name: len(packed(every_type.select([name]), "k")) / ROWS
        for name in ("few bits", "wide but few", "equal bags", "float", "few floats")
    }
    assert size["few bits"] < 10 / 8 + 0.2
    assert size["wide but few"] < 4 / 8 + 0.2  # 8 bytes each, as indices of nine values
    assert size["equal bags"] < 12 * 14 / 32 + 1.5  # no lengths, as all are equal
    assert 4 < size["float"] < 4.2
    assert size["few floats"] < 1


def gathered(found, names, order, start=0, stop=None):
    """Rows of columns of a packed table as 4 bytes each, unpacked where they are moved."""
    stop = found.num_rows if stop is None else stop
    columns = np.array([found.schema.get_field_index(name) for name in names])
    kinds = np.array(
        [BYTES_TO_FLOATS if found.schema.types[n] == pa.int8() else WORDS for n in columns]
    )
    address, parts = found.packed(columns)
    into = np.zeros((len(names), stop - start), np.int32)
    targets = np.uint64(into.ctypes.data) + np.arange(len(names), dtype=np.uint64) * np.uint64(
        into.strides[0]
    )
    scatter_packed(
        np.array([address], np.uint64),
        parts[None],
        np.array([start]),
        np.array([stop - start]),
        kinds,
        order,
        np.array([[0, 0, 1, 0, stop - start, 0]]),
        targets[None],
        np.zeros(len(names), np.int64),
    )
    return into


PLACES = [(0, 20_000), (0, 1), (255, 257), (8191, 8193), (5000, 16_384), (16_385, 20_000)]


def test_any_rows_are_gathered_straight_from_packed_columns():
    chance, rows = np.random.default_rng(8), 20_000  # two whole blocks of lanes, and a part of one
    table = pa.table(
        {
            str(bits): chance.integers(0, 2**bits, rows).astype(np.uint32).view(np.int32)
            for bits in (0, 1, 5, 13, 17, 31, 32)
        }
        | {
            "negative": pa.array(chance.integers(-(2**31), -(2**31) + 5000, rows), pa.int32()),
            "few floats": pa.array(chance.choice([0.5, -0.0, np.inf, np.nan], rows), pa.float32()),
            "floats": pa.array(chance.normal(size=rows), pa.float32()),
            "all bytes": pa.array(chance.integers(-128, 128, rows), pa.int8()),
        }
    )
    found = PackedTable(entry(table), "k")
    assert found.can_scatter
    for start, stop in PLACES:
        for order in (np.empty(0, np.uint64), chance.permutation(stop - start).astype(np.uint64)):
            moved = gathered(found, table.schema.names, order, start, stop)
            for name, values in zip(table.schema.names, moved, strict=True):
                part = table[name].to_numpy()[start:stop]
                part = part[order] if len(order) else part
                expected = part.astype(np.float32) if part.dtype == np.int8 else part
                assert expected.tobytes() == values.tobytes(), (name, start, stop)
    for other in (
        table.append_column("wide", pa.array(range(rows))),
        table.set_column(0, "0", pa.array([None, *range(rows - 1)], pa.int32())),
        table.append_column("other", pa.array([b"123"] * rows)),
        table.append_column("other", pa.array([[1, None]] * rows, pa.list_(pa.int32()))),
    ):
        assert not PackedTable(entry(other), "k").can_scatter


def test_bags_of_any_form_are_gathered_straight_from_packed_columns():
    chance, rows = np.random.default_rng(4), 20_000
    lengths = {
        "equal": [3] * rows,
        "several": chance.integers(0, 9, rows).tolist(),
        "a huge one": [40_000, *[n % 2 for n in range(rows - 1)]],
    }
    bags = {
        name: [chance.integers(-9, 2**17, n).astype("<i4") for n in sizes]
        for name, sizes in lengths.items()
    }
    table = pa.table(
        {
            f"{name}, {kind}": pa.array(
                [one if pa.types.is_list(kind) else one.tobytes() for one in some], kind
            )
            for name, some in bags.items()
            for kind in (pa.binary(), pa.large_binary(), pa.list_(pa.int32()))
        }
    )
    found = PackedTable(entry(table), "k")
    assert found.can_scatter
    for start, stop in PLACES:
        arrow = {
            name: [table[name].combine_chunks()[at] for at in (slice(5), slice(start, stop))]
            for name in table.schema.names
        }
        packed_bags = {
            name: [there[0], found.bags(n, start, stop)]
            for n, (name, there) in enumerate(arrow.items())
        }
        order = chance.permutation(5 + stop - start).astype(np.uint64)[1:]
        expected, moved = (shuffle_bags(one, order, Buffers()) for one in (arrow, packed_bags))
        for name, one in expected.items():
            whole = one.as_arrow(len(order), np.int32)
            assert moved[name].as_arrow(len(order), np.int32).equals(whole), (name, start, stop)


def test_a_hundred_and_twenty_of_as_many_flipped_bits_are_found(every_type):
    whole, chance = packed(every_type.slice(0, 700), "k"), random.Random(30)
    front = 8 * 11 * int(np.frombuffer(whole[:32], np.int64)[1])
    places = [chance.randrange(front) for _ in range(40)] + [
        chance.randrange(len(whole)) for _ in range(80)
    ]
    for at in places:
        harmed = np.frombuffer(bytearray(whole), np.uint8)
        harmed[at] ^= 1 << chance.randrange(8)
        with pytest.raises(DamagedCopy):
            PackedTable(harmed, "k")


def test_what_is_cut_foreign_or_of_another_version_is_refused(every_type):
    whole = entry(every_type)
    for size in (0, 7, 8, 55, 56, 2000, len(whole) - 1):
        with pytest.raises(DamagedCopy):
            PackedTable(whole[:size], "k")
    middle = whole.copy()
    middle[len(middle) // 2] ^= 1
    with raises(DamagedCopy, "column", "checksum"):
        PackedTable(middle, "k")
    with raises(DamagedCopy, "another row group"):
        PackedTable(whole, "another")
    other = whole.copy()
    other[7] = ord("1")
    with raises(DamagedCopy, "version"):
        PackedTable(other, "k")


# ---- as a reader uses it


@pytest.fixture
def files(tmp_path):
    """Two files of three row groups each."""
    found = []
    for number in range(2):
        path = tmp_path / "data" / f"part-{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        write(path, number)
        found.append(path)
    return found


def write(path, seed):
    chance = np.random.default_rng(seed)
    pq.write_table(
        pa.table(
            {
                "label": pa.array(chance.integers(0, 2, 3 * GROUP), pa.int8()),
                "d": pa.array(chance.normal(size=3 * GROUP), pa.float32()),
                "s": pa.array(chance.integers(0, 1000, 3 * GROUP), pa.int32()),
                "bags": pa.array(
                    [chance.integers(0, 1000, n % 4).tolist() for n in range(3 * GROUP)],
                    pa.list_(pa.int32()),
                ),
                "equal": pa.array(
                    [chance.integers(0, 2**31, 3, "<i4").tobytes() for n in range(3 * GROUP)],
                    pa.binary(),
                ),
            }
        ),
        path,
        row_group_size=GROUP,
        write_page_checksum=True,
        compression="lz4",
    )


def reader(files, how=None, opened=None, columns=("label", "d", "s")):
    described = [
        DataFile(path=str(path), rows=3 * GROUP, bytes=os.path.getsize(path)) for path in files
    ]
    return RowGroupReader(described, columns, opened=opened, packed=how)


def stored(groups):
    """Every row group as it lies in its file."""
    return {
        (file, group): pq.ParquetFile(described.path).read_row_group(group, groups.columns)
        for file, described in enumerate(groups.files)
        for group in range(3)
    }


def same(groups, place, table):
    rows = groups.decoded(*place)
    return (rows if isinstance(rows, pa.Table) else rows.table()).equals(table)


def read_all(groups):
    """Every row group that the reader gives, held against Parquet; the reader is closed."""
    for place, table in stored(groups).items():
        assert same(groups, place, table), place
    stats = groups.stats()
    groups.close()
    return stats


def entries(tmp_path):
    return [
        path for path in (tmp_path / "data" / ".sluice-packed").rglob("*") if len(path.name) == 64
    ]


def test_the_first_reader_makes_it_and_the_next_one_reads_no_parquet(
    files, tmp_path, capsys, monkeypatch
):
    first = read_all(reader(files, PackedCopy()))
    assert (first["packed_hits"], first["packed_misses"], len(entries(tmp_path))) == (0, 6, 6)
    assert first["packed_bytes"] >= sum(path.stat().st_size for path in entries(tmp_path))
    with monkeypatch.context() as patched:
        groups = reader(files, PackedCopy())
        patched.setattr(RowGroupReader, "_take", lambda *_: pytest.fail("Parquet was read"))
        assert read_all(groups)["packed_hits"] == 6
    assert capsys.readouterr().err == ""


def test_other_columns_have_a_copy_of_their_own(files):
    read_all(reader(files, PackedCopy()))
    assert read_all(reader(files, PackedCopy(), columns=("s",)))["packed_hits"] == 0


@pytest.mark.parametrize("how", ["replaced", "rewritten in place", "of the same size and time"])
def test_a_stale_copy_is_never_read(files, how):
    read_all(reader(files, PackedCopy()))
    status = files[0].stat()
    new = files[0].with_name("new")
    write(new, 77)
    if how == "rewritten in place":
        files[0].write_bytes(new.read_bytes())
    else:
        new.replace(files[0])
    if (
        how == "of the same size and time"
    ):  # as the footer holds other statistics, its digest differs
        os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    new.unlink(missing_ok=True)
    assert read_all(reader(files, PackedCopy()))["packed_hits"] <= 3


def test_what_was_read_from_a_file_that_is_no_longer_there_is_not_kept_as_the_new_ones(
    files, tmp_path, capsys
):
    groups = reader(files, PackedCopy())
    old = pq.ParquetFile(files[0]).read_row_group(1, groups.columns)
    groups.decoded(0, 0)  # the file stays open
    write(tmp_path / "new", 77)
    (tmp_path / "new").replace(files[0])
    assert groups.decoded(0, 1).equals(old)  # as without a copy: the file that was opened
    assert_names(capsys.readouterr().err, "replaced")
    groups.close()
    assert read_all(reader(files, PackedCopy()))["packed_hits"] == 0


def flipped(path, at, chance):
    """Flips a bit of a file, where it lies."""
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), at)


def test_of_a_hundred_and_twenty_flips_in_pages_none_gives_another_row(files):
    """Caught, in a column that is not read, or in a part of a page's head that holds no values."""
    groups, chance = reader(files, columns=("label", "d", "bags", "equal")), random.Random(30)
    expected, outcomes = stored(groups), Counter()
    whole = [path.read_bytes() for path in files]
    chunks = [
        (place, pq.read_metadata(files[place[0]]).row_group(place[1]).column(n))
        for place in expected
        for n in range(5)
    ]
    sizes = [chunk.total_compressed_size for _, chunk in chunks]
    for _ in range(120):
        [(place, chunk)] = chance.choices(chunks, sizes)
        path = files[place[0]]
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        flipped(path, begin + chance.randrange(chunk.total_compressed_size), chance)
        try:
            assert same(groups, place, expected[place]), (place, chunk.path_in_schema)
            outcomes["not read" if chunk.path_in_schema == "s" else "in a page's head"] += 1
        except SourceError as error:
            outcomes["caught"] += f"{path}, row group {place[1]}: " in str(error)
        path.write_bytes(whole[place[0]])
    groups.close()
    assert outcomes.total() == 120
    assert outcomes["caught"] > 100, outcomes
    assert outcomes["in a page's head"] < 6, outcomes


def test_of_a_hundred_and_twenty_flips_in_packed_copies_all_are_caught(files, tmp_path, capsys):
    read_all(reader(files, PackedCopy()))
    groups, chance, there = (
        reader(files, PackedCopy()),
        random.Random(31),
        sorted(entries(tmp_path)),
    )
    expected = stored(groups)
    for count in range(1, 121):
        path = chance.choice(there)
        whole = path.read_bytes()
        flipped(path, chance.randrange(len(whole)), chance)
        assert all(same(groups, *one) for one in expected.items())
        assert groups.stats()["packed_corrupt"] == count
        assert path.read_bytes() == whole  # made anew
    groups.close()
    assert capsys.readouterr().err.count("not valid") == 1


@pytest.mark.parametrize(
    "how", ["damaged", "truncated", "emptied", "of another version", "another's"]
)
def test_a_copy_that_is_not_as_it_was_costs_a_line_and_is_made_anew(files, tmp_path, capsys, how):
    read_all(reader(files, PackedCopy()))
    first, second = entries(tmp_path)[:2]
    content = bytearray(first.read_bytes())
    if how == "damaged":
        content[-100] ^= 4
    elif how == "of another version":
        content[27] = ord("0")
    elif how == "another's":
        content = second.read_bytes()
    first.write_bytes({"truncated": content[:-9], "emptied": b""}.get(how, content))
    stats = read_all(reader(files, PackedCopy()))
    assert stats["packed_corrupt"] == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert_names(said, "not valid", "again")
    assert read_all(reader(files, PackedCopy()))["packed_corrupt"] == 0


def test_copies_that_are_deleted_while_they_are_read_are_missed_alone(files, tmp_path, capsys):
    read_all(reader(files, PackedCopy()))
    groups = reader(files, PackedCopy())
    groups.decoded(0, 0)
    shutil.rmtree(tmp_path / "data" / ".sluice-packed")
    stats = read_all(groups)
    assert stats["packed_hits"] == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert_names(said, "no more", "No such file")


def test_its_limit_is_kept_and_nothing_leaves_for_what_would_leave_again(files, tmp_path, capsys):
    read_all(reader(files, PackedCopy()))
    one = -(-entries(tmp_path)[0].stat().st_size // 4096) * 4096
    shutil.rmtree(tmp_path / "data" / ".sluice-packed")
    limit, made = 3 * one + 100, set()
    for epoch in range(3):
        stats = read_all(reader(files, PackedCopy(limit_bytes=limit)))
        made |= set(entries(tmp_path))
        assert len(made) == 3
        assert stats["packed_bytes"] <= limit
        assert stats["packed_hits"] == (3 if epoch else 0)
        assert_names(capsys.readouterr().err, "no more", "limit")


def test_a_folder_that_cannot_be_used_costs_a_line(files, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert read_all(reader(files, PackedCopy(folder=str(folder)))) == {}
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert_names(said, folder)
    (tmp_path / "strange" / "sluice-cache").mkdir(parents=True)
    (tmp_path / "strange" / "sluice-cache").chmod(0o777)
    assert read_all(reader(files, PackedCopy(folder=str(tmp_path / "strange")))) == {}
    assert_names(capsys.readouterr().err, "strange", "other users")


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC])
def test_a_read_only_folder_and_a_full_disk_cost_a_line(files, capsys, monkeypatch, error):
    groups = reader(files, PackedCopy())

    def refused(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refused)
    assert read_all(groups)["packed_bytes"] == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert os.strerror(error) in said


def test_two_writers_at_once_both_go_on(files, tmp_path, capsys, monkeypatch):
    groups, link = [reader(files, PackedCopy()) for _ in range(2)], os.link
    meet = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(os, "link", lambda *paths: (meet.wait(), link(*paths)))
    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(read_all, groups))) == 2
    assert len(entries(tmp_path)) == 6
    assert not list(tmp_path.rglob("*.part"))
    assert capsys.readouterr().err == ""
    assert read_all(reader(files, PackedCopy()))["packed_hits"] == 6


def test_files_in_a_store_have_no_copy_which_is_logged(files, capsys):
    groups = reader(files, PackedCopy(), opened=FileOpener(disturbed="latency_ms=0"))
    assert not any(name.startswith("packed") for name in read_all(groups))
    assert_names(capsys.readouterr().err, "store", "no packed copy")


def batches(loader):
    found = [
        tuple(
            one.numpy().tobytes() for one in (batch.dense, batch.values, batch.lengths, batch.label)
        )
        for batch in loader
    ]
    return found, loader.order_hash


@pytest.mark.parametrize("window_rows", [128, 900])  # parts of a row group, and several of them
@pytest.mark.parametrize(
    ("name", "bags"), [(READERS[0], []), (READERS[1], []), ("arrow", ["bags", "equal"])]
)
def test_every_value_is_that_of_parquet_where_columns_stay_packed(
    files, monkeypatch, name, bags, window_rows
):
    roles = {"label": "label", "dense": ["d"], "sparse": ["s"], "id_list": bags}
    calls, how = [], {"batch_size": 96, "streams": 2, "roles": roles}
    how |= {"window_rows": window_rows, "reader": name}
    monkeypatch.setattr(shuffle, "scatter_packed", lambda *a: calls.append(1) or scatter_packed(*a))
    unpacked, tables = PackedTable.table, []
    monkeypatch.setattr(
        PackedTable, "table", lambda self: tables.append(self.num_rows) or unpacked(self)
    )
    paths = [str(path) for path in files]
    with open_loader(paths, **how) as loader:
        expected = batches(loader)
    with open_loader(paths, packed=PackedCopy(), **how) as loader:
        loader._input.groups.decoded(
            0, 1
        )  # its copy is there at once: some windows have rows of both forms
        assert batches(loader) == expected
    calls.clear()
    tables.clear()
    with open_loader(paths, packed=PackedCopy(), **how) as loader:
        assert batches(loader) == expected
        assert loader.store["packed_misses"] == 0
    assert calls
    assert GROUP not in tables
    with open_loader(
        paths, packed=PackedCopy(), fill=0.5, **how
    ) as loader:  # values are looked at before they move
        calls.clear()
        assert batches(loader) == expected
    assert not calls


def test_a_loader_makes_all_copies_that_are_missing_when_it_is_asked_to(table, tmp_path):
    with open_loader(table, batch_size=160, packed=PackedCopy(folder=str(tmp_path))) as loader:
        loader.pack()
        made = loader.store["packed_misses"]
        deque(loader, maxlen=0)
        assert (loader.store["packed_misses"], loader.store["packed_hits"]) == (made, made)


def test_memory_of_packed_rows_is_used_again_but_not_while_they_are_held(files):
    read_all(reader(files, PackedCopy()))
    groups = reader(files, PackedCopy())
    held, expected = [groups.decoded(0, n) for n in range(3)], stored(groups)
    assert all(one.table().equals(expected[0, n]) for n, one in enumerate(held))
    [address, *_] = {one.packed(np.array([0]))[0] for one in held}
    held.clear()
    later = [groups.decoded(0, n) for n in range(3)]
    assert address in {one.packed(np.array([0]))[0] for one in later}
    groups.close()
