"""Reads columns of numbers as a Parquet file stores them: `StoredRows`, the rows of a row group of which some columns
are still pages.

Most of the time of a row goes into decoding. Arrow decodes a column into memory, and the move to batches reads it from
there again. A column that stays stored is decoded in the core's cache, at the moment of the move
(`sluice.ingest.flow.place_rows`).

A column of a row group stays stored if no value is missing and each value has 4 or 8 bytes. Its pages must be plain, or
indices into a dictionary. They may be compressed by Snappy, Zstandard or LZ4. Arrow decodes all other columns, and
those whose pages turn out to be different (`StoredRows.decode`).

The places that a footer gives are checked here. All that pages say is checked where they are unpacked.
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
from sluice.ingest.flow.decoded import DamagedPage
from sluice.ingest.flow.place_rows import COLUMN, FUNCTIONS, PLACED, READ_BEYOND
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
from sluice.ingest.row_order import Read

_WIDTHS = {
    ("INT32", pa.int32()): 4,
    ("INT32", pa.int8()): 4,
    ("FLOAT", pa.float32()): 4,
    ("INT64", pa.int64()): 8,
    ("DOUBLE", pa.float64()): 8,
}
"""The types of columns that may stay stored, Parquet's and Arrow's, and the bytes of a stored value."""
_ENCODINGS = 0b1_0001_1101  # by bit: plain, indices (2 and 8), levels (3 and 4)
InMemory = tuple[npt.NDArray[np.int64], Sequence[npt.NDArray[np.uint8]]]
"""The address of each chunk's bytes, after which `READ_BEYOND` more may be read, and the arrays that hold them."""
_LEAST_STEP = 12  # bits of the least difference between the lengths of two buffers


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
        """By row group and leaf: where its chunk begins and ends, the bytes of a value, the highest definition level,
        and the codec."""
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
        group: int,
        columns: Sequence[str],
        read: Callable[[Any], InMemory],
        piece: Read | None = None,
    ) -> StoredRows | None:
        """Reads those columns of a row group, or of a piece, that may stay stored. None: there are none. `read` gets
        where bytes begin and end in the file, and returns where they are in memory."""
        known = filter(None, map(self._leaves.get, columns))
        wanted = [leaf for leaf in known if self._may_stay[group, leaf[0]]]
        if not wanted:
            return None
        numbers, fields = zip(*wanted, strict=True)
        chunks, rows = self._chunks[group, list(numbers)], self._rows[group]
        pages = np.zeros(len(fields), COLUMN)
        pages["rows"] = pages["most"] = rows
        places = chunks[:, :2]
        if piece and piece.pages:
            rows = piece.rows
            own = [piece.pages.pages_of(field.name, piece.first, rows) for field in fields]
            places = np.array([place for one in own for place in one.places])
            pages["skip"], pages["rows"] = [one.skip for one in own], [one.rows for one in own]
        addresses, data = read(places)
        sizes = places[:, 1] - places[:, 0]
        if len(places) > len(pages):  # a dictionary before each one's pages
            pages["dictionary"], pages["dictionary_size"] = addresses[::2], sizes[::2]
            addresses, sizes = addresses[1::2], sizes[1::2]
        pages["pages"], pages["size"] = addresses, sizes
        for number, name in enumerate(("width", "is_optional", "codec"), 2):
            pages[name] = chunks[:, number]
        call_kernel("check_heads", pages, len(pages))
        kept = pages["state"] == PLACED
        fields = tuple(itertools.compress(fields, kept))
        return StoredRows(rows, fields, pages[kept], data) if fields else None


def stored_places(metadata: pq.FileMetaData) -> npt.NDArray[np.int64]:
    """Returns where a footer says that column chunks are: by row group and leaf, the first byte and the one after the
    last. Nothing is checked."""
    chunk = chunk_numbers(metadata)
    return np.stack([chunk[START], chunk[START] + chunk[STORED]], -1)


def read_chunks(descriptor: int, chunks: npt.NDArray[np.int64], buffers: Buffers) -> InMemory:
    """Reads chunks of columns, usually in one call."""
    runs: list[list[int]] = []
    size = 0
    places = chunks.tolist()
    for place in sorted(places):
        begin, end = place
        if runs and begin == runs[-1][1]:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
        place[0] = size
        size += end - begin
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
    return data.ctypes.data + np.array([start for start, _ in places]), [data]


def _take(buffers: Buffers, size: int) -> npt.NDArray[np.uint8]:
    """Returns an array of at least so many bytes. Arrays of few lengths can be used again."""
    step = 1 << max(_LEAST_STEP, size.bit_length() - 7)
    return buffers.take((-(-size // step) * step,), np.uint8)


class StoredRows:
    """A row group of which some columns are stored pages. Arrow decodes the `others`."""

    def __init__(
        self,
        rows: int,
        fields: Sequence[pa.Field],
        pages: npt.NDArray[np.void],
        data: Sequence[npt.NDArray[np.uint8]],
    ):
        """The `pages` of the columns are in `data`."""
        self.num_rows = rows
        self.stored = tuple(field.name for field in fields)
        self._fields, self._data = fields, data
        self.pages = pages
        """The pages of each stored column. Their addresses are valid as long as this object."""
        self.decode: Callable[[str], pa.ChunkedArray]
        """Decodes a column by Arrow. Raises SourceError."""
        self.replacement: Callable[[DamagedPage], pa.Table]
        """Returns rows to take instead of these, because a page is damaged, or raises."""

    def complete(self, columns: Sequence[str], others: pa.Table) -> None:
        """Sets the columns that Arrow has decoded, and the order of all columns. ValueError if they have other rows."""
        if others.num_columns and others.num_rows != self.num_rows:
            raise ValueError(f"{others.num_rows} rows can be decoded")
        self.others = others
        fields = {field.name: field for field in (*self._fields, *others.schema)}
        self.schema = pa.schema([fields[name] for name in columns])

    def column(self, name: str) -> pa.ChunkedArray:
        """Returns a column as Arrow's reader decodes it."""
        return self.decode(name) if name in self.stored else self.others.column(name)
