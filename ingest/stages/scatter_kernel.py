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
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from zlib_ng import zlib_ng

from sluice.etl.ops.compiled import compile_function
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
PLACE_FIELDS = 6
"""The number of values that describe a place: chunk, first batch in it, number of batches, first row in each batch,
rows in each batch, first row in the window."""


class DamagedPage(ValueError):
    """A stored page is not what was written. `decoded` has the row group of the page."""

    def __init__(self, text: str, decoded: Any = None):
        super().__init__(text)
        self.decoded = decoded


def _pointer_to(kind: Any) -> Any:
    def pointer(_context: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uint64), generate  # type: ignore[no-untyped-call]

    return intrinsic(pointer)


int32_at, _float32_at, bytes_at, int64_at, _uint64_at, _float64_at = (
    _pointer_to(kind)
    for kind in (
        types.int32,
        types.float32,
        types.uint8,
        types.int64,
        types.uint64,
        types.float64,
    )
)
"""They return memory at an address. An array of it would take numba much longer to compile."""


def _copy_bytes(_context: Any, _into: Any, _source: Any, _size: Any) -> Any:
    """Copies bytes from one address to another."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> None:
        into, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in arguments[:2])
        cgutils.raw_memcpy(builder, into, source, arguments[2], 1)  # type: ignore[no-untyped-call]

    return types.void(types.uint64, types.uint64, types.uint64), generate


def _prefetch_line(_context: Any, _address: Any) -> Any:
    """Prefetches the cache line at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> None:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        name = "llvm.prefetch.p0i8"
        prefetch = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        builder.call(
            prefetch, [builder.inttoptr(arguments[0], pointer), *(number(n) for n in (0, 3, 1))]
        )

    return types.void(types.uint64), generate


def _call_function(_context: Any, _address: Any, _a: Any, _b: Any, _c: Any, _d: Any) -> Any:
    """Calls a C function of four words at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * 4).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])

    return types.int64(*[types.uint64] * 5), generate


call: Any = intrinsic(_call_function)
copy: Any = intrinsic(_copy_bytes)
prefetch: Any = intrinsic(_prefetch_line)


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
FUNCTIONS[SNAPPY] = 1  # `unpack_snappy`, which has no address
FUNCTIONS[_ZSTD] = _c_function("ZSTD_decompress", "libzstd.so.1", "libzstd.dylib")
FUNCTIONS[_LZ4_RAW] = _c_function("LZ4_decompress_safe", "liblz4.so.1", "liblz4.dylib")


def compose_order(outer: Any, inner: Any, rows: int) -> Any:
    """Combines two permutations (`RowsPlan.halves`) into the order of a window, in one call."""
    order = np.empty(rows, np.uint64)
    _compose(outer, inner.view(np.uint64), order)
    return order


@compile_function
def _compose(outer: Any, inner: Any, order: Any) -> None:
    count = 0
    for n in range(len(inner)):
        row = outer[inner[n]]
        if row < len(order):
            order[count] = row
            count += 1


@compile_function
def _scatter(  # noqa: PLR0917
    values: Any, column: Any, order: Any, places: Any, targets: Any, strides: Any
) -> None:
    """Moves the values of one column to their places (see `scatter`)."""
    for m in range(len(places)):
        chunk, step, steps, at, width, row = places[m]
        for s in range(step, step + steps):
            target = int32_at(targets[chunk, column] + np.uint64(s * strides[column] + 4 * at))
            if len(order):
                for n in range(width):
                    target[n] = values[order[row + n]]
            else:
                for n in range(width):
                    target[n] = values[row + n]
            row += width


@compile_function
def varint(raw: Any, at: Any, end: Any) -> Any:
    """Returns a number and where it ends. -1: it has no end."""
    value = np.int64(0)
    shift = 0
    while at < end and shift < 63:
        byte = np.int64(raw[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(-1), end + 1


@compile_function
def unpack_snappy(source: Any, size: Any, into: Any, room: Any) -> Any:
    """Unpacks Snappy to address `into`. False: it is damaged, or has not `room` bytes. Up to `READ_BEYOND` bytes more
    are read and written."""
    raw, target = bytes_at(source), bytes_at(into)
    whole, at = varint(raw, np.int64(0), size)
    done: Any = np.int64(0)
    while whole == room and at < size:
        tag = np.int64(raw[at])
        at += 1
        kind, length = tag & 3, (tag >> 2) + 1
        more: Any = 1 << (kind - 1) if kind else max(length - 60, 0)
        if more > size - at:
            return False
        bits = (1 << (8 * more)) - 1
        number = int32_at(source + np.uint64(at))[0] & bits
        at += more
        if kind == 0:  # bytes as they are
            length = number + 1 if more else length
            begin, left = source + np.uint64(at), size - at
            at += length
        else:  # bytes that came before
            if kind == 1:
                length, number = (tag >> 2 & 7) + 4, tag >> 5 << 8 | number
            begin, left = into + np.uint64(done - number), length if 0 < number <= done else 0
        if length > min(left, room - done):
            return False
        if kind and number < 4:
            for n in range(done, done + length):
                target[n] = target[n - number]
        else:
            for n in range((length + 3) // 4):
                int32_at(into + np.uint64(done))[n] = int32_at(begin)[n]
        done += length
    return done == room


@compile_function
def unpack_page(codec: Any, functions: Any, source: Any, size: Any, into: Any, room: Any) -> Any:  # noqa: PLR0917
    """Unpacks `size` bytes to address `into`. False: they are damaged, or do not become `room` bytes."""
    if codec == SNAPPY:
        return unpack_snappy(source, size, into, room)
    if codec == _LZ4_RAW:
        return (
            np.int32(call(functions[codec], source, into, np.uint64(size), np.uint64(room))) == room
        )
    return call(functions[codec], into, np.uint64(room), source, np.uint64(size)) == room


@compile_function
def _index_at(begin: Any, bit: Any, mask: Any) -> Any:
    """Returns the packed index at this bit. It reads eight bytes."""
    word = _uint64_at(begin + (bit >> np.uint64(3)))[0]
    return np.int32((word >> (bit & np.uint64(7))) & mask)


@compile_function
def _read_indices(source: Any, size: Any, skip: Any, count: Any, into: Any) -> Any:
    """Reads `count` indices of a page to address `into`, after `skip` others. False: the page holds fewer, or is
    damaged.

    The page has the bits of an index, then runs. A run repeats one index, or packs groups of eight."""
    data = bytes_at(source)
    bits = np.int64(data[0])
    mask = np.uint64((1 << bits) - 1)
    at: Any = 1
    while count > 0:
        head, at = varint(data, at, size)
        is_packed = head & 1
        units = head >> 1
        stored = units * bits if is_packed else (bits + 7) // 8
        if bits > 31 or not 0 < units < 1 << 32 or stored > size - at:
            return False
        rows = 8 * units if is_packed else units
        low = min(skip, rows)
        taken = min(count, rows - low)
        target = int32_at(into)
        if is_packed:
            begin = source + np.uint64(at)
            n = 0
            while n < taken:
                if (low + n) % 8 or n + 8 > taken:
                    target[n] = _index_at(begin, np.uint64((low + n) * bits), mask)
                    n += 1
                    continue
                first = begin + np.uint64((low + n) // 8 * bits)
                for k in range(8):  # a group of eight begins at a byte
                    target[n + k] = _index_at(first, np.uint64(k * bits), mask)
                n += 8
        else:
            index: Any = np.int64(0)
            for k in range(stored):
                index |= np.int64(data[at + k]) << (8 * k)
            if index > 0x7FFFFFFF:
                return False
            for n in range(taken):
                target[n] = np.int32(index)
        skip -= low
        count -= taken
        into += np.uint64(4 * taken)
        at += stored
    return True


@compile_function
def _look_up(begin: Any, count: Any, known: Any, distinct: Any, width: Any, into: Any) -> Any:  # noqa: PLR0917
    """Writes the values at these indices, which may begin at `into`, or in its second half. False: an index is too
    large."""
    indices = int32_at(begin)
    highest: Any = np.int32(0)
    for n in range(count):
        highest = max(highest, indices[n])
    if highest >= distinct:
        return False
    if width == 4:
        for n in range(count):
            int32_at(into)[n] = int32_at(known)[indices[n]]
    else:
        for n in range(count):
            int64_at(into)[n] = int64_at(known)[indices[n]]
    return True


@compile_function
def _unpack_rows(pages: Any, start: Any, stop: Any, width: Any, into: Any, functions: Any) -> Any:  # noqa: PLR0917
    """Unpacks the values of some rows of a column to address `into`. False: a page is damaged, or a page that waits is
    not wanted as a whole."""
    row = 0
    known = np.uint64(0)
    distinct = 0
    for n in range(len(pages)):
        page = pages[n]
        if page.form == DICTIONARY:
            known, distinct = page.address, page.size // width
            continue
        low, high = max(start - row, 0), min(stop - row, page.rows)
        row += page.rows
        if low >= high:
            continue
        count = high - low
        if page.waits:
            if count < page.rows or not unpack_page(
                page.codec, functions, page.address, page.size, into, page.unpacked
            ):
                return False
        elif page.form == VALUES:
            copy(into, page.address + np.uint64(width * low), np.uint64(width * count))
        else:
            indices = into + np.uint64((width - 4) * count)
            if not _read_indices(page.address, page.size, low, count, indices):
                return False
            if not _look_up(indices, count, known, distinct, width, into):
                return False
        into += np.uint64(width * count)
    return True


def unpack_column(pages: npt.NDArray[np.void], start: int, stop: int, into: Any) -> bool:
    """Unpacks the values of some rows of one column. False: a page is damaged."""
    return bool(
        _unpack_rows(pages, start, stop, into.itemsize, np.uint64(into.ctypes.data), FUNCTIONS)
    )


def scatter(pages: npt.NDArray[np.void], starts: Any, ends: Any, *how: Any) -> int:
    """Moves rows. In every column c, the n-th row of the result is row `order[n]` of all pieces, or row n if `order` is
    empty. Each column is unpacked in the core's cache and moved at once.

    pages[p, c]: the pages of column c in piece p, of which the rows from `starts[p]` on are moved. They end before row
    `ends[p]` of all pieces. `how` has kinds, order, places, targets and strides. kinds[p, c]: what happens to the
    values. targets[k, c]: address of column c in the first batch of chunk k. strides[c]: bytes from one batch to the
    next.

    Returns 0, or 1 + p * columns + c if a page of column c in piece p is damaged. Returns -1 - c if a value of column c
    does not fit."""
    values = np.empty(3 * ends[-1], np.int32)  # those of 8 bytes, then those to move
    return int(
        _scatter_columns(np.uint64(values.ctypes.data), FUNCTIONS, pages, starts, ends, *how)
    )


@compile_function
def _scatter_columns(  # noqa: PLR0917
    address: Any,
    functions: Any,
    pages: Any,
    starts: Any,
    ends: Any,
    kinds: Any,
    order: Any,
    places: Any,
    targets: Any,
    strides: Any,
) -> Any:
    result = address + np.uint64(8 * ends[-1])
    for c in range(pages.shape[1]):
        start = 0
        for p in range(len(ends)):
            kind, count = kinds[p, c], ends[p] - start
            into = result + np.uint64(4 * start)
            words, floats = int32_at(into), _float32_at(into)
            is_wide = kind >= DOUBLES_TO_FLOATS
            width, unpacked = (8, address) if is_wide else (4, into)
            if not _unpack_rows(
                pages[p, c], starts[p], starts[p] + count, width, unpacked, functions
            ):
                return 1 + p * pages.shape[1] + c
            if is_wide:
                if not _narrow(kind, address, count, into):
                    return -1 - c
            elif kind == WORDS_TO_FLOATS:
                for n in range(count):
                    floats[n] = np.float32(np.int8(words[n]))
            elif kind == IDS:
                least: Any = np.int32(0)
                for n in range(count):
                    least = min(least, words[n])
                if least < 0:
                    return -1 - c
            start = ends[p]
        _scatter(int32_at(result), c, order, places, targets, strides)
    return 0


@compile_function
def _narrow(kind: Any, address: Any, count: Any, into: Any) -> Any:
    """Converts values of 8 bytes to 4 bytes. False: one does not fit."""
    lost = 0
    doubles, longs = _float64_at(address), int64_at(address)
    words, floats = int32_at(into), _float32_at(into)
    if kind == DOUBLES_TO_FLOATS:
        for n in range(count):
            floats[n] = np.float32(doubles[n])
            lost += np.isinf(floats[n]) != np.isinf(doubles[n])
    elif kind == LONGS_TO_FLOATS:
        for n in range(count):
            floats[n] = np.float32(longs[n])
    else:
        for n in range(count):
            words[n] = np.int32(longs[n])
            lost += longs[n] != longs[n] & 0x7FFFFFFF
    return lost == 0


def load_compiled() -> None:
    """Loads the compiled functions by calling each once with its types. They take tens of MiB, and seconds if numba's
    cache is empty."""
    line, table = np.zeros(2, np.int64), np.zeros((1, 1), np.int64)
    order = compose_order(line, line, 1)
    scatter(np.zeros((1, 0, 1), PAGE), line, line, table, order, table, table.view(np.uint64), line)


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
