"""Reads columns of numbers as a Parquet file stores them: `StoredRows`, the rows of a row group of which some columns
are still pages.

Most of the time of a row goes into decoding. Arrow decodes a column into memory, and the move to batches reads it from
there again. A column that stays stored is decoded in the core's cache, at the moment of the move
(`sluice.ingest.stages.scatter_kernel`).

A column of a row group stays stored if no value is missing and each value has 4 or 8 bytes. Its pages must be plain, or
indices into a dictionary. They may be compressed by Snappy, Zstandard or LZ4, and are unpacked here. Arrow decodes
all other columns, and those whose pages this module does not understand.

Every number that a file gives is checked here before anything is read through it. `page_heads` leaves out a column with
a page that lies outside its chunk, or whose sizes contradict each other. That no value is missing is what the footer
says, and what each page says: its definition levels. The indices of a dictionary are checked when they are looked up.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.native import call_kernel
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.plain.footer_chunks import (
    CODEC,
    ENCODINGS,
    NULLS,
    START,
    STORED,
    VALUE_COUNT,
    chunk_numbers,
    group_rows,
)
from sluice.ingest.stages.scatter_kernel import (
    FUNCTIONS,
    PAGE,
    READ_BEYOND,
    DamagedPage,
    unpack_column,
)

_WIDTHS = {
    ("INT32", pa.int32()): 4,
    ("INT32", pa.int8()): 4,
    ("FLOAT", pa.float32()): 4,
    ("INT64", pa.int64()): 8,
    ("DOUBLE", pa.float64()): 8,
}
"""The types of columns that may stay stored, Parquet's and Arrow's, and the bytes of a stored value."""
_ENCODINGS = 0b1_0001_1101  # by bit: plain, indices (2 and 8), levels (3 and 4)
_MOST_NUMBERS = 128  # numbers in the head of a page; a head with more is not understood
_LEAST_STEP = 12  # bits of the least difference between the lengths of two buffers
_PAGE_ROWS = 1024  # a chunk with more pages than one for so many rows is left to Arrow


def page_heads(  # noqa: PLR0917
    data: npt.NDArray[np.uint8], chunks: Any, rows: int, waits: bool, pages: Any, counts: Any
) -> int:
    """Reads the heads of all pages of columns. `chunks` has for each column where its chunk begins and ends in `data`,
    the bytes of a value, the highest definition level, and the codec. Writes the `pages` of each column, and how many
    they are: 0 if anything is not understood. `waits`: values may be unpacked when they are moved.

    Returns the bytes that unpacking the others takes."""
    numbers = np.empty((_MOST_NUMBERS, 2), np.int64)
    how = rows, waits, pages, pages.shape[1], counts, numbers, len(numbers)
    return call_kernel("page_heads", data, chunks, len(chunks), *how)


def prepare_pages(chunks: Any, pages: Any, counts: Any, room: npt.NDArray[np.uint8]) -> int:
    """Verifies checksums, and unpacks pages to `room`, each with `READ_BEYOND` bytes more, except those that wait.
    Takes the levels away. Sets a count to 0 if a value is missing, or sizes contradict each other.

    Returns 0, or 1 + c if a page of column c differs from its checksum. Returns -1 - c if one cannot be unpacked."""
    how = pages, pages.shape[1], counts, room, FUNCTIONS
    return call_kernel("prepare_pages", chunks, len(chunks), *how)


class StoredColumns:
    """Which columns of an open file may stay stored, and where their chunks are."""

    def __init__(self, metadata: pq.FileMetaData, schema: pa.Schema, size: int):
        """`size` is the number of bytes of the file."""
        self._rows = group_rows(metadata)
        leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
        self._leaves: dict[str, tuple[int, pa.Field]] = {}
        """By name: which leaf it is, and the column as Arrow would decode it."""
        widths, levels = np.zeros((2, len(leaves)), np.int64)
        for number, leaf in enumerate(leaves):
            field = schema.get_field_index(leaf.path)
            width = 0 if field < 0 else _WIDTHS.get((leaf.physical_type, schema.types[field]), 0)
            levels[number] = leaf.max_definition_level
            if (
                width
                and leaf.name == leaf.path  # not within another column
                and levels[number] <= 1
                and not leaf.max_repetition_level
            ):
                self._leaves[leaf.path] = number, schema.field(field)
                widths[number] = width
        if not self._leaves:
            return
        chunk = chunk_numbers(metadata)
        at, length, codec = chunk[START], chunk[STORED], chunk[CODEC]
        everywhere = (np.broadcast_to(column, at.shape) for column in (widths, levels))
        self._chunks = np.stack([at, at + length, *everywhere, codec], -1)
        """By row group and leaf: what `page_heads` takes."""
        self._may_stay = (
            np.isin(codec, np.flatnonzero(FUNCTIONS))
            & (chunk[ENCODINGS] & ~_ENCODINGS == 0)
            & (chunk[VALUE_COUNT] == np.array(self._rows).reshape(-1, 1))
            & ((levels == 0) | (chunk[NULLS] == 0))
            & (FUNCTIONS[0] > 0)
            & (at >= 4)
            & (length > 0)
            & (length <= size - at)
        )

    def fetch(
        self,
        descriptor: int,
        group: int,
        portions: Sequence[Sequence[str]],
        buffers: Buffers,
        waits: bool,
    ) -> StoredRows | None:
        """Reads those columns of a row group that may stay stored, one portion after the other. None: there are none.
        Raises DamagedPage if a page differs from its checksum, or cannot be unpacked."""
        rows = StoredRows(self._rows[group])
        for columns in portions:
            known = filter(None, map(self._leaves.get, columns))
            wanted = [leaf for leaf in known if self._may_stay[group, leaf[0]]]
            if wanted:
                numbers, fields = zip(*wanted, strict=True)
                chunks = self._chunks[group, list(numbers)]
                rows.add(fields, chunks, _read_chunks(descriptor, chunks, buffers), buffers, waits)
        return rows if rows.stored else None


def stored_places(metadata: pq.FileMetaData) -> npt.NDArray[np.int64]:
    """Returns where a footer says that column chunks are: by row group and leaf, the first byte and the one after the
    last. Nothing is checked."""
    chunk = chunk_numbers(metadata)
    return np.stack([chunk[START], chunk[START] + chunk[STORED]], -1)


def _read_chunks(
    descriptor: int, chunks: npt.NDArray[np.int64], buffers: Buffers
) -> npt.NDArray[np.uint8]:
    """Reads chunks of columns, usually in one call. Changes where `chunks` begin and end to places in the result, of
    which `READ_BEYOND` bytes more may be read."""
    runs: list[list[int]] = []
    size = 0
    places = chunks[:, :2].tolist()
    for place in sorted(places):
        begin, end = place
        if runs and begin == runs[-1][1]:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
        place[:] = size, size + end - begin
        size += end - begin
    chunks[:, :2] = places
    data = _take(buffers, size + READ_BEYOND)
    done = 0
    for begin, end in runs:
        at = begin
        while at < end:
            count = os.preadv(descriptor, [data[done : done + end - at].data], at)
            if not count:
                raise EOFError(
                    f"the file ends at byte {at}, before the end of a column; it was cut off"
                )
            at += count
            done += count
    return data


def _take(buffers: Buffers, size: int) -> npt.NDArray[np.uint8]:
    """Returns an array of at least so many bytes. Arrays of few lengths can be used again."""
    step = 1 << max(_LEAST_STEP, size.bit_length() - 7)
    return buffers.take((-(-size // step) * step,), np.uint8)


class StoredRows:
    """A row group of which some columns are stored pages. Arrow decodes the `others`."""

    def __init__(self, rows: int):
        self.num_rows = rows
        self.nbytes = 0
        self.stored: tuple[str, ...] = ()
        self._fields: list[pa.Field] = []
        self._pages: list[npt.NDArray[np.void]] = []
        """The fields and the pages of the stored columns, in portions."""
        self._memory: list[npt.NDArray[np.uint8]] = []
        """The arrays in which the pages are."""
        self.replacement: Callable[[DamagedPage], pa.Table]
        """Returns rows to take instead of these, because a page is damaged, or raises."""

    def add(
        self,
        fields: Sequence[pa.Field],
        chunks: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
        buffers: Buffers,
        waits: bool,
    ) -> None:
        """Adds columns whose chunks are in `data`, except those of which anything is not understood. Raises DamagedPage
        if a page differs from its checksum, or cannot be unpacked."""
        pages = np.zeros((len(chunks), 8 + self.num_rows // _PAGE_ROWS), PAGE)
        counts, address = np.zeros(len(chunks), np.int64), np.uint64(data.ctypes.data)
        room = _take(buffers, page_heads(data, chunks, self.num_rows, waits, pages, counts))
        wrong = prepare_pages(chunks, pages, counts, room)
        if wrong:
            how = "differs from its checksum (CRC-32)" if wrong > 0 else "cannot be unpacked"
            raise DamagedPage(
                f"column {fields[abs(wrong) - 1].name!r}: a page {how}. The file is damaged; write it again"
            )
        pages = pages[counts > 0, : counts.max()]
        self._fields += itertools.compress(fields, counts)
        self._pages.append(pages)
        self.stored = tuple(field.name for field in self._fields)
        is_in_data = pages["address"] - address < data.nbytes
        used = [data, room] if is_in_data.any() else [room]
        self._memory += used
        self.nbytes += sum(array.nbytes for array in used)

    def complete(self, columns: Sequence[str], others: pa.Table) -> None:
        """Sets the columns that Arrow has decoded, and the order of all columns. ValueError if they have other rows."""
        if others.num_columns and others.num_rows != self.num_rows:
            raise ValueError(f"{others.num_rows} rows can be decoded")
        self.others = others
        fields = {field.name: field for field in (*self._fields, *others.schema)}
        self.schema = pa.schema([fields[name] for name in columns])
        self.nbytes += others.get_total_buffer_size()
        self.pages = np.zeros(
            (len(self.stored), max(pages.shape[1] for pages in self._pages)), PAGE
        )
        first = 0
        for pages in self._pages:
            self.pages[first : first + len(pages), : pages.shape[1]] = pages
            first += len(pages)
        """The pages of each stored column. Pages beyond its last one have no rows."""

    def column(self, name: str, start: int, stop: int) -> pa.ChunkedArray:
        """Returns some rows of a column as Arrow's reader decodes it. Raises DamagedPage."""
        if name not in self.stored:
            return self.others.column(name).slice(start, stop - start)
        kind = self.schema.field(name).type
        dtype = kind.to_pandas_dtype()
        words = np.empty(stop - start, np.int32 if kind == pa.int8() else dtype)
        if not unpack_column(self.pages[self.stored.index(name)], start, stop, words):
            raise DamagedPage(name)
        # A column of int8 has 4 bytes a value, of which Arrow takes the lowest.
        return pa.chunked_array([pa.array(words.astype(dtype, copy=False))])
