"""Compiled functions that move the rows of a window to their places in batches, as `scatter`.

`scatter` moves all columns of numbers in one call, from Arrow's memory or from the pages of a Parquet file. Between two
numpy calls, a thread may have to wait for the interpreter's lock. `scatter` releases the lock once for a whole window.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from zlib_ng import zlib_ng

from sluice.common.native import call_kernel
from sluice.ingest.columns import Columns

CONVERTED, WORDS, IDS, WORDS_TO_FLOATS = range(-1, 3)
DOUBLES_TO_FLOATS, LONGS_TO_FLOATS, LONGS_TO_IDS = range(3, 6)
"""What happens to a column's values. CONVERTED: they are converted before the call. WORDS: 4 bytes are copied
unchanged. IDS: the same, but none may be below 0. WORDS_TO_FLOATS: signed bytes that are stored in 4 bytes become
floats. The others: numbers of 8 bytes become numbers of 4 bytes that must hold their values."""
VALUES, INDICES, DICTIONARY = range(3)
"""What a page holds: values, indices into the column's dictionary, or the dictionary, which is the first page."""
PAGE = np.dtype(
    [
        ("address", np.uint64),
        ("size", np.int64),
        ("rows", np.int64),  # 0: a dictionary, or no page
        ("form", np.int64),  # one of the three above
        ("unpacked", np.int64),  # its size once it is unpacked; 0: it is not compressed
        ("codec", np.int64),
        ("waits", np.int64),  # 1: it is unpacked when it is moved
        ("checksum", np.int64),  # -1: it has none
    ]
)
"""Describes a page of a column in memory. A column in Arrow's memory counts as one page of values, without a size."""
PLACE = ["address", "size", "rows", "form"]
READ_BEYOND = 8  # bytes that may be read after the end of a page with indices
SNAPPY, _ZSTD, _LZ4_RAW = 1, 6, 7  # codecs in parquet.thrift; 0 is none
ROOM_OF_A_ROW = 40
"""The bytes that `scatter` needs for a row: 8 for a value of 8 bytes, and twice 16 for four columns."""
PLACE_FIELDS = 6
"""The number of values that describe a place: chunk, first batch in it, number of batches, first row in each batch,
rows in each batch, first row in the window."""


class DamagedPage(ValueError):
    """A stored page is not what was written. `decoded` has the row group of the page."""

    def __init__(self, text: str, decoded: Any = None):
        super().__init__(text)
        self.decoded = decoded


def _c_function(name: str, *libraries: str) -> int:
    """Returns the address of a function of the first of these libraries that is there. 0: this machine has none."""
    for library in libraries:
        with suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(library), name)
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


FUNCTIONS = np.zeros(8, np.uint64)
"""The addresses of C functions: at 0 the one for checksums, then those that unpack a codec. 0: there is none."""
FUNCTIONS[0] = _c_function("zng_crc32", zlib_ng.__file__)
FUNCTIONS[SNAPPY] = 1  # the kernel's own, which has no address
FUNCTIONS[_ZSTD] = _c_function("ZSTD_decompress", "libzstd.so.1", "libzstd.dylib")
FUNCTIONS[_LZ4_RAW] = _c_function("LZ4_decompress_safe", "liblz4.so.1", "liblz4.dylib")


def compose_order(outer: Any, inner: Any, rows: int) -> npt.NDArray[np.uint64]:
    """Combines two permutations (`RowsPlan.halves`) into the order of a window, in one call."""
    order = np.empty(rows, np.uint64)
    inner = np.ascontiguousarray(inner)
    call_kernel("compose_order", outer, inner, len(inner), rows, order)
    return order


def unpack_page(codec: int, source: int, size: int, into: int, room: int) -> bool:
    """Unpacks `size` bytes at an address to another one. False: they are damaged, or do not become `room` bytes. Up to
    `READ_BEYOND` bytes more are read and written."""
    return bool(call_kernel("unpack_page", codec, FUNCTIONS, source, size, into, room))


def unpack_column(pages: npt.NDArray[np.void], start: int, stop: int, into: Any) -> bool:
    """Unpacks the values of some rows of one column. False: a page is damaged."""
    return bool(
        call_kernel("unpack_rows", pages, len(pages), start, stop, into.itemsize, into, FUNCTIONS)
    )


def scatter(  # noqa: PLR0917
    pages: npt.NDArray[np.void],
    starts: Any,
    ends: Any,
    kinds: Any,
    order: Any,
    places: Any,
    targets: Any,
    strides: Any,
) -> int:
    """Moves rows. In every column c, the n-th row of the result is row `order[n]` of all pieces, or row n if `order` is
    empty. Each column is unpacked in the core's cache and moved with three others.

    pages[p, c]: the pages of column c in piece p, of which the rows from `starts[p]` on are moved. They end before row
    `ends[p]` of all pieces. kinds[p, c]: what happens to the values. targets[k, c]: address of column c in the first
    batch of chunk k. strides[c]: bytes from one batch to the next.

    Returns 0, or 1 + p * columns + c if a page of column c in piece p is damaged. Returns -1 - c if a value of column c
    does not fit."""
    room = np.empty(ROOM_OF_A_ROW * int(ends[-1]), np.uint8)
    pieces, columns, most = pages.shape
    return call_kernel(
        "scatter",
        room,
        FUNCTIONS,
        pages,
        most,
        pieces,
        columns,
        starts,
        ends,
        kinds,
        order if len(order) else None,
        places,
        len(places),
        np.ascontiguousarray(targets),
        strides,
    )


_KINDS = (
    {
        pa.float32(): (WORDS, WORDS),
        pa.float64(): (DOUBLES_TO_FLOATS, DOUBLES_TO_FLOATS),
        pa.int64(): (LONGS_TO_FLOATS, LONGS_TO_FLOATS),
        pa.int8(): (CONVERTED, WORDS_TO_FLOATS),
    },
    {
        pa.int32(): (IDS, IDS),
        pa.int64(): (LONGS_TO_IDS, LONGS_TO_IDS),
    },
)
"""What happens to floats and to ids, by their type: in Arrow's memory, and in stored pages."""


class NumberColumns:
    """Where row groups of one form have the columns of numbers: which ones are stored pages, and which are in Arrow's
    memory."""

    def __init__(self, schema: pa.Schema, columns: Columns, stored: tuple[str, ...] = ()):
        self.schema, self.stored = schema, stored
        wanted = [
            (name, kinds.get(schema.field(name).type, (CONVERTED, CONVERTED))[name in stored])
            for names, kinds in zip((columns.floats, columns.scalars), _KINDS, strict=True)
            for name in names
            if name not in columns.added
        ]
        self.kinds = np.array([kind for _, kind in wanted], np.int64)
        """What happens to each column: floats, then ids."""
        for n, (name, _) in enumerate(wanted):
            if self.kinds[n] == LONGS_TO_IDS and columns.id_kind(name) is not np.int32:
                self.kinds[n] = CONVERTED
        at = [n for n, (name, _) in enumerate(wanted) if name in stored]
        self.in_pages = at, [stored.index(wanted[n][0]) for n in at]
        """The indices of the columns that are stored pages, among all columns and among the stored ones."""
        self.in_arrow = {
            name: n
            for n, (name, _) in enumerate(wanted)
            if name not in stored and self.kinds[n] != CONVERTED
        }
        """The index of each column that is moved from Arrow's memory."""


def count_converted(schema: pa.Schema, columns: Columns) -> int:
    """Returns how many columns of numbers must be converted before they are moved."""
    return int(np.count_nonzero(NumberColumns(schema, columns).kinds == CONVERTED))


class ColumnPages:
    """The pages of a row group's columns of numbers. Their addresses are valid as long as this object."""

    def __init__(self, rows: Any, columns: NumberColumns):
        """`rows` are an Arrow table, or rows of which some columns are stored pages (`StoredRows`)."""
        table, stored = (rows, None) if isinstance(rows, pa.Table) else (rows.others, rows.pages)
        self.kinds = columns.kinds.copy()
        """What happens to each column. CONVERTED also where values are missing."""
        most = 1 if stored is None else max(1, stored.shape[1])
        self.pages = np.zeros((len(self.kinds), most), PAGE)
        if stored is not None:
            at, number = columns.in_pages
            self.pages[at, : stored.shape[1]] = stored[number]
        self._owner: Any = rows
        if not columns.in_arrow:
            return
        batches = table.to_batches()
        if len(batches) != 1:
            batches = table.select([*columns.in_arrow]).combine_chunks().to_batches()
        [batch] = batches
        self._owner = rows, batch
        for name, column in columns.in_arrow.items():
            array = batch.column(name)
            if array.null_count:
                self.kinds[column] = CONVERTED
            width = array.type.bit_width // 8
            address = array.buffers()[1].address + width * array.offset
            self.pages[PLACE][column, 0] = address, 0, len(array), VALUES
