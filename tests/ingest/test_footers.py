"""Footers: damaged ones give our errors, and another file in the place of the first is noticed."""

import os
import tracemalloc
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import History, Loader
from sluice.ingest.plain.footer_chunks import (
    ThriftError,
    check_chunks,
    chunk_numbers,
    parsing_bytes,
)
from sluice.ingest.plain.row_selection import RowSelection
from sluice.ingest.read.footers import HeldFooters
from sluice.ingest.read.parquet_files import ParquetError
from sluice.ingest.read.user_history import HistoryError
from tests.etl.tables import write_rows
from tests.product import (
    DataFile,
    FileColumns,
    ParquetFiles,
    RowGroupReader,
    Spec,
    UsageError,
    probe,
)
from tests.raises import raises
from tests.run_program import run_program
from tests.thrift_structs import read_footer, write_footer

ROLES = {"label": "label", "dense": "d", "sparse": "s"}
BY_TIME = """
[input]
format = "parquet"
columns = ["label:int", "s:int"]
[table]
split_time = "s"
split = {train = 0, test = 20}
[[column]]
name = "label"
role = "label"
[[column]]
name = "s"
role = "sparse"
ops = [{op = "hash", size = 100}]
"""


@pytest.fixture
def folder(tmp_path):
    """Two files of three row groups each."""
    for number in range(2):
        pq.write_table(
            pa.table(
                {
                    "label": np.arange(300) % 2,
                    "d": np.ones(300),
                    "s": np.arange(300),
                    "bag": pa.array([[n] for n in range(300)]),
                }
            ),
            tmp_path / f"part-{number}.parquet",
            row_group_size=100,
            write_page_checksum=True,
        )
    return tmp_path


_MUTATE = """
import os, random, sys
from sluice.etl.schema import DataFile
from sluice.ingest.read.parquet_files import ParquetError, ParquetFiles
from sluice.ingest.row_order import Read, WindowPart
from sluice.ingest.errors import SourceError
from sluice.ingest.read.reader import RowGroupReader

good = open(sys.argv[1], "rb").read()
path = os.path.join(sys.argv[2], "mutated.parquet")
length = int.from_bytes(good[-8:-4], "little")
chance, outcomes = random.Random(8), {}
for n in range(300):
    data = bytearray(good)
    for _ in range(1 if n % 2 else chance.randint(2, 6)):
        at = len(data) - 8 - length + chance.randrange(length + 8)
        data[at] = data[at] ^ 1 << chance.randrange(8) if n % 3 else chance.randrange(256)
    with open(path, "wb") as file:
        file.write(data)
    try:
        files = ParquetFiles.open([path], {"label": "label", "dense": "d", "sparse": "s", "id_list": "bag"}).files
        groups = RowGroupReader(files, ("label", "d", "s", "bag"))
        try:
            for number, rows in enumerate(groups.row_groups[0]):
                groups.read(Read(0, number, rows, (WindowPart(0, 0, 0, rows),)))
        finally:
            groups.close()
        end = "read"
    except (ParquetError, SourceError) as error:
        assert "mutated.parquet" in str(error) or "'" in str(error), repr(error)
        end = type(error).__name__
    # As a table's file: its log says what row groups it has, only its size is compared.
    try:
        groups = RowGroupReader([DataFile(path=path, rows=300, bytes=len(data), row_group_rows=(100, 100, 100))],
                           ("label", "d", "s", "bag"))
        try:
            groups.read(Read(0, 1, 100, (WindowPart(0, 0, 0, 100),)))
        finally:
            groups.close()
    except SourceError as error:
        assert "mutated.parquet" in str(error), repr(error)
    outcomes[end] = outcomes.get(end, 0) + 1
print(outcomes.get("read", 0), outcomes.get("ParquetError", 0), outcomes.get("SourceError", 0))
"""


@pytest.mark.slow
def test_three_hundred_mutated_footers_give_our_errors_only(folder, tmp_path_factory):
    """In a process of its own, which must live."""
    done = run_program(
        "-c", _MUTATE, folder / "part-0.parquet", tmp_path_factory.mktemp("m"), check=True
    )
    read, at_the_start, later = map(int, done.stdout.split())
    assert at_the_start > 100, "most are found before anything is read"
    assert later > 0
    assert read > 0, "some bits are of no consequence"


@pytest.mark.parametrize(("value", "is_same"), [(1.0, True), (2.0, False)])
def test_a_file_in_the_place_of_another_is_the_same_if_its_footer_is(tmp_path, value, is_same):
    path, other, held = tmp_path / "a.parquet", tmp_path / "b.parquet", HeldFooters()
    write_rows(path, row_group_size=100, d=[1.0] * 300)
    write_rows(other, row_group_size=100, d=[value] * 300)
    with path.open("rb") as file:
        assert held.is_unchanged(0, file.fileno())
    before = path.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert other.stat().st_size == before.st_size
    other.replace(path)
    with path.open("rb") as file:
        assert held.is_unchanged(0, file.fileno()) == is_same


def test_row_groups_that_do_not_add_up_to_the_files_rows_are_damage(folder):
    path = folder / "part-0.parquet"
    content, rows = (
        path.read_bytes(),
        b"\x16\xd8\x04\x19",
    )  # 300 as Thrift has it, then the row groups
    assert content.count(rows) == 1
    path.write_bytes(content.replace(rows, b"\x16\xda\x04\x19"))
    with raises(ParquetError, "part-0.parquet"):
        ParquetFiles.open(folder, ROLES)


@pytest.mark.parametrize(
    ("rows", "groups"), [(2**40, (1,)), (2**31, (0, 2)), (2**27, (1,)), (2**62, (0,))]
)
def test_rows_that_a_file_cannot_hold_are_refused_before_anything_counts_them_off(
    folder, rows, groups
):
    path = folder / "part-1.parquet"
    footer = read_footer(path)
    for number in groups:
        group = footer[4][1][1][number]
        for numbers in (group, *(chunk[3][1] for chunk in group[1][1][1])):
            numbers[3 if numbers is group else 5][1] = rows
    footer[3][1] = sum(group[3][1] for group in footer[4][1][1])
    write_footer(path, footer)
    # What the last case claims is little enough for its bytes, and too much for the memory.
    tracemalloc.start()
    with raises(UsageError, *([] if rows < 2**31 else [path, rows, "the file is damaged"])):
        Loader(str(folder), batch_size=10, roles=ROLES, memory_limit=2**34)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**28


def test_a_row_without_a_time_is_in_no_split_where_footers_tell_the_others(tmp_path):
    path = str(tmp_path / "a.parquet")
    write_rows(path, label=[0, 1, 0], s=[3, None, 5])
    counts = RowSelection(Spec.parse(BY_TIME), "train").counts({path: FileColumns()})
    assert counts == {"train": [(2,)], "test": [(0,)], "": [(1,)]}


_EACH_BIT = """
import pyarrow as pa, pyarrow.parquet as pq
from sluice.ingest.plain.footer_chunks import ThriftError, check_chunks

table = pa.table({"a": [1, 2], "b": [1.0, 2.0], "c": ["x", "y"], "d": [[1, 2], []]})
sink = pa.BufferOutputStream()
pq.write_table(table, sink)
good = sink.getvalue().to_pybytes()
check_chunks(pq.read_metadata(pa.BufferReader(good)))
refused = read = 0
for bit in range(8 * (len(good) - 8 - int.from_bytes(good[-8:-4], "little")), 8 * (len(good) - 8)):
    data = bytearray(good)
    data[bit // 8] ^= 1 << bit % 8
    try:
        metadata = pq.read_metadata(pa.BufferReader(bytes(data)))
        check_chunks(metadata)
        for group in range(metadata.num_row_groups):
            for leaf in range(metadata.num_columns):
                metadata.row_group(group).column(leaf).statistics
        read += 1
    except ThriftError:
        refused += 1
    except Exception:  # Arrow refuses most damaged footers by itself
        pass
print(refused, read)
"""


def test_no_flipped_bit_ends_the_process_where_statistics_are_read():
    """Without the check, about a hundredth of the bits did: Arrow cannot raise an error there."""
    done = run_program("-c", _EACH_BIT, check=True)
    refused, read = map(int, done.stdout.split())
    assert refused > 20
    assert read > 100, "many bits are of no consequence"


@pytest.fixture
def contradicting(tmp_path):
    """A file with one flipped bit, by which a column has another type than in the schema."""
    path = tmp_path / "damaged.parquet"
    write_rows(path, label=np.arange(30) % 2, s=np.arange(30))
    good, schema = path.read_bytes(), pq.read_metadata(path).schema.to_arrow_schema()
    for bit in range(8 * (len(good) - 8 - int.from_bytes(good[-8:-4], "little")), 8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with suppress(pa.ArrowException, OSError, UnicodeDecodeError):
            metadata = pq.read_metadata(pa.BufferReader(bytes(data)))
            if metadata.schema.to_arrow_schema() != schema:
                continue
            try:
                check_chunks(metadata)
            except ThriftError as error:
                if "contradicts" in str(error):
                    path.write_bytes(data)
                    return path
    raise AssertionError("no bit does that")


def test_a_footer_that_contradicts_itself_is_refused_wherever_statistics_are_read(contradicting):
    files, message = {str(contradicting): FileColumns()}, "contradicts the schema"
    with raises(ParquetError, "damaged.parquet", message, "damaged"):
        probe(files, ["s"])
    with raises(ParquetError, "damaged.parquet", message, "damaged"):
        RowSelection(Spec.parse(BY_TIME), "train").counts(files)
    for number in range(19):  # the guess looks at eight of these files
        table = pa.table({"label": np.arange(30) % 2, "s": np.arange(30)})
        pq.write_table(table, contradicting.with_name(f"{'ae'[number > 0]}-{number:02}.parquet"))
    how = {"batch_size": 8, "roles": {"label": "label", "sparse": "s"}}
    history = History(by="s", time="label", columns=["s"], last=2)
    with raises(HistoryError, "damaged.parquet", message, "damaged"):
        Loader(str(contradicting.parent), history=history, **how)


def test_opening_a_file_with_a_large_footer_takes_no_more_than_its_minimum_memory_counts(tmp_path):
    table = pa.table({f"d{n}": np.zeros(90, np.float32) for n in range(400)})
    path = tmp_path / "wide.parquet"
    pq.write_table(table, path, row_group_size=3)
    metadata = pq.read_metadata(path)
    assert metadata.serialized_size > 2**20
    tracemalloc.start()
    chunk_numbers(metadata)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak + 2 * metadata.serialized_size <= parsing_bytes(metadata) < 4 * peak
    columns = FileColumns({"split": pa.scalar(1)})
    file = DataFile(path=str(path), rows=90, bytes=path.stat().st_size)
    counted = RowGroupReader([file], table.column_names, located=[columns]).decoding.extra_bytes
    assert counted > parsing_bytes(metadata)
