"""Calls the compiled function that takes a row group from its bytes to its places in batches: `place_rows`.

The function verifies and unpacks pages, converts their values, and moves the rows. It does all that for all columns in
one call, without the interpreter's lock. Between two numpy calls, a thread may have to wait for it.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from sluice.common.native import call_kernel

CONVERTED, WORDS, IDS, WORDS_TO_FLOATS = range(-1, 3)
DOUBLES_TO_FLOATS, LONGS_TO_FLOATS, LONGS_TO_IDS = range(3, 6)
"""What happens to a column's values. CONVERTED: they are converted before the call. WORDS: 4 bytes are copied
unchanged. IDS: the same, but none may be below 0. WORDS_TO_FLOATS: signed bytes that are stored in 4 bytes become
floats. The others: numbers of 8 bytes become numbers of 4 bytes that must hold their values."""
PLACED, LEFT, DIFFERS, DAMAGED = range(4)
"""What became of a column. LEFT: its pages are not understood, or a value does not fit, so Arrow must decode it.
DIFFERS: a page is not what its checksum says. DAMAGED: a page cannot be unpacked."""
COLUMN = np.dtype(
    [
        ("pages", np.uint64),  # where the bytes of its pages are; 0: its values are in memory
        ("size", np.int64),
        ("dictionary", np.uint64),  # where its dictionary's page is, if that is not the first page
        ("dictionary_size", np.int64),
        ("values", np.uint64),  # where its values are in memory
        ("width", np.int64),  # the bytes of a stored value
        ("is_optional", np.int64),
        ("codec", np.int64),
        ("skip", np.int64),  # rows of its pages before the first that is wanted
        ("rows", np.int64),  # the rows of its pages
        ("most", np.int64),  # the rows of its row group
        ("kind", np.int64),  # what happens to its values
        ("must_be_finite", np.int64),
        ("block", np.int64),  # which array of a batch it goes to
        ("offset", np.int64),  # and where it begins there, in bytes
        ("state", np.int64),  # what became of it
    ]
)
PART = np.dtype(
    [
        ("window", np.int64),  # the rows of the window
        ("low", np.int64),  # the rows of the window that are read now
        ("high", np.int64),
        ("start", np.int64),  # the first of them, among the rows that are read
        ("first", np.int64),  # the first row of the window in its stream
        ("lane", np.int64),  # where batches have the rows of the stream
        (
            "outer",
            np.uint64,
        ),  # two permutations that make the window's order; 0: as they are stored
        ("inner", np.uint64),
        ("length", np.int64),  # the length of each
        ("places", np.uint64),  # or the place of each row in the window's order
    ]
)
BAGS = np.dtype(
    [
        ("begins", np.uint64),  # where the ids of each row begin and end, as offsets from `ids`
        ("ends", np.uint64),
        ("is_wide", np.int64),  # whether an offset has 8 bytes
        ("unit", np.int64),  # what it counts in bytes
        ("ids", np.uint64),
        ("line", np.uint64),  # memory to which all ids are copied; 0: they stay
        ("line_size", np.int64),
        ("lengths", np.int64),  # where batches have the lengths, and both halves of the addresses
        ("low", np.int64),
        ("high", np.int64),
    ]
)
BLOCKS = 4
"""The arrays of a batch: floats, ids of columns with one id a row, lengths of bags, and addresses of bags."""
_GROUP = (
    *("functions", "columns", "column_count", "rows", "parts", "part_count", "each", "first_step"),
    *("steps", "targets", "moved", "room", "wide", "slots", "slot_size", "beside", "source"),
    *("place", "runs", "most_runs", "bags", "bag_count", "wrong", "run_count"),
)
"""What a call gets, in this order."""
_AT = {name: number for number, name in enumerate(_GROUP)}
_RUN_FIELDS, _FOUR, _PADDING = 4, 4, 64
READ_BEYOND = 8
"""Bytes that may be read after the end of a page."""
SCRATCH_OF_A_ROW = 48
"""The bytes that a call needs for a row, besides those of one column while it is unpacked."""
UNPACKED_OF_A_ROW = 18
"""At most so many bytes of a row are there while a column is unpacked: a page and its dictionary."""
SNAPPY, _ZSTD, _LZ4_RAW = 1, 6, 7  # codecs in parquet.thrift; 0 is none


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
    call_kernel("compose_order", outer, inner, len(inner), rows, order)
    return order


def find_places(outer: Any, inner: Any, rows: int) -> npt.NDArray[np.uint32]:
    """Returns for each row of a window its place in the window's order."""
    places = np.empty(rows, np.uint32)
    places[compose_order(outer, inner, rows)] = np.arange(rows, dtype=np.uint32)
    return places


class Moved(NamedTuple):
    """What a call has done."""

    state: int
    """The worst state of all columns."""
    column: int
    """The column that is in this state."""
    rows: npt.NDArray[np.int64]
    """The number of rows that were moved to each batch."""


class Scratch:
    """The memory of one thread for its calls of `place`. It grows with the row groups."""

    def __init__(self) -> None:
        self._rows = self._most = -1
        self._runs = np.empty((0, _RUN_FIELDS), np.int64)
        self._group = np.zeros(len(_GROUP), np.int64)
        self._set(functions=FUNCTIONS)

    def place(
        self,
        columns: npt.NDArray[np.void],
        bags: npt.NDArray[np.void],
        parts: npt.NDArray[np.void],
        *,
        rows: int,
        each: int,
        first_step: int,
        targets: npt.NDArray[np.uint64],
    ) -> Moved:
        """Reads the `rows` rows of all columns and bags, and moves those of the `parts` to their batches.

        `each` is the number of rows of a stream in a batch. `targets` has the addresses of the arrays of each batch
        from `first_step` on. Rows of earlier batches are not needed. Sets the state of each column."""
        pages = columns["pages"] > 0
        self._grow(
            max(rows, int(columns["rows"].max(initial=0))),
            int(columns["most"].max(where=pages, initial=0)),
        )
        runs = int(np.minimum(parts["high"] - parts["low"], self._most_runs(parts, each)).sum())
        if len(self._runs) < runs:
            self._runs = np.empty((runs, _RUN_FIELDS), np.int64)
            self._set(runs=self._runs, most_runs=runs)
        moved = np.zeros(len(targets), np.int64)
        self._set(
            columns=columns,
            column_count=len(columns),
            bags=bags,
            bag_count=len(bags),
            parts=parts,
            part_count=len(parts),
            rows=rows,
            each=each,
            first_step=first_step,
            steps=len(targets),
            targets=targets,
            moved=moved,
        )
        state = call_kernel("place_rows", self._group)
        if state < 0:
            raise RuntimeError("the rows do not fit the memory that was given for them")
        return Moved(state, int(self._group[_AT["wrong"]]), moved)

    @staticmethod
    def _most_runs(parts: npt.NDArray[np.void], each: int) -> npt.NDArray[np.int64]:
        most: npt.NDArray[np.int64] = np.where(
            parts["places"] > 0, parts["high"] - parts["low"], parts["window"] // each + 2
        )
        return most

    def _grow(self, rows: int, most: int) -> None:
        """Makes room for rows, of row groups of at most `most` rows with pages."""
        if rows > self._rows:
            self._rows = rows
            words = rows + _PADDING
            self._wide = np.empty(8 * words, np.uint8)
            self._slots, self._beside = np.empty((2, _FOUR * words), np.uint32)
            self._source, self._place = np.empty((2, words), np.uint32)
            self._set(
                wide=self._wide,
                slots=self._slots,
                slot_size=words,
                beside=self._beside,
                source=self._source,
                place=self._place,
            )
        if most > self._most:
            self._most = most
            self._room = np.empty(2 * (9 * most + 256) + _PADDING, np.uint8)
            self._set(room=self._room)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            self._group[_AT[name]] = value.ctypes.data if isinstance(value, np.ndarray) else value
