"""Compiled functions that move the rows of a window to their places in batches, as `scatter`.

`scatter` moves all columns of numbers in one call. `scatter_packed` does so from packed columns. `copy_equal_bags` and
`copy_bags` move a column of bags. Between two numpy calls, a thread may have to wait for the interpreter's lock.
`scatter` releases the lock once for a whole window.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from sluice.ingest.columns import Columns
from sluice.ingest.errors import warn

CONVERTED, WORDS, BYTES_TO_FLOATS, BYTES_TO_WORDS = range(-1, 3)
"""What happens to a column's values. CONVERTED: they are converted before the call. WORDS: 4 bytes are copied
unchanged. The others: signed bytes become numbers of 4 bytes."""
RAW, PACKED, INDICES, LENGTHS = range(4)
"""How numbers are packed. RAW: unchanged. PACKED: as differences from the smallest. INDICES: as indices into the
distinct values. LENGTHS: offsets as differences of neighbours."""
PART = np.dtype(
    [
        (name, np.int64)
        for name in (
            "kind",  # one of the four above
            "width",  # bytes of a number
            "bits",  # bits of a packed number
            "base",  # the number to add to a packed number
            "at",  # where the part starts in the unpacked stream
            "count",  # how many numbers it has
            "begin",  # where its packed numbers start
            "values",  # INDICES: where the distinct values start
            "distinct",  # INDICES: how many distinct values there are
            "checksum",
            "column",  # from 1 on; below 0: a part of the column, or one that cannot be scattered; 0: no column
        )
    ]
)
"""Describes one packed part of a table (`sluice.ingest.read.packed_copy`)."""
LANES = 256  # numbers that are unpacked together; a block has 32 such rows, and the last block is smaller
PLACE_FIELDS = 6
"""The number of values that describe a place: chunk, first batch in it, number of batches, first row in each batch,
rows in each batch, first row in the window."""


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function to run without the interpreter's lock. Numba keeps the code next to the sources, or in the
    user's cache. If it can write to neither, each process compiles again."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder that it can write to
        _warn_uncached()
        return njit(nogil=True)(function)


@cache
def _warn_uncached() -> None:
    warn(
        "this process compiles its inner loops again, which takes seconds, because it cannot write next to its "
        "sources or into the user's cache; set NUMBA_CACHE_DIR to a folder that it can write to",
    )


def _pointer_to(kind: Any) -> Any:
    def pointer(_context: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uint64), generate  # type: ignore[no-untyped-call]

    return intrinsic(pointer)


_int32_at, _int8_at, _uint64_at = (
    _pointer_to(kind) for kind in (types.int32, types.int8, types.uint64)
)


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


_copy: Any = intrinsic(_copy_bytes)
_prefetch: Any = intrinsic(_prefetch_line)


def compose_order(outer: Any, inner: Any, rows: int) -> Any:
    """Combines two permutations (`RowsPlan.halves`) into the order of a window, in one call."""
    order = np.empty(rows, np.uint64)
    _compose(outer, inner.view(np.uint64), order)
    return order


@compiled
def _compose(outer: Any, inner: Any, order: Any) -> None:
    count = 0
    for n in range(len(inner)):
        row = outer[inner[n]]
        if row < len(order):
            order[count] = row
            count += 1


@compiled
def copy_values(into: Any, values: Any) -> None:
    """Fills `into` with values. An assignment to a slice would take Numba seconds to compile, and would run slower."""
    for n in range(len(into)):
        into[n] = values[n]


@compiled
def _scatter(  # noqa: PLR0917
    values: Any, column: Any, order: Any, places: Any, targets: Any, strides: Any
) -> None:
    """Moves the values of one column to their places (see `scatter`)."""
    for m in range(len(places)):
        chunk, step, steps, at, width, row = places[m]
        for s in range(step, step + steps):
            target = carray(
                _int32_at(targets[chunk, column] + np.uint64(s * strides[column] + 4 * at)),
                (width,),
            )
            if len(order):
                for n in range(width):
                    target[n] = values[order[row + n]]
            else:
                for n in range(width):
                    target[n] = values[row + n]
            row += width


def scatter(  # noqa: PLR0917
    sources: Any,
    ends: Any,
    kinds: Any,
    order: Any,
    places: Any,
    targets: Any,
    strides: Any,
) -> None:
    """Moves rows. In every column c, the n-th row of the result is row `order[n]` of all pieces, or row n if `order` is
    empty.

    sources[c, p]: address of column c in piece p, whose rows end before row `ends[p]` of all. targets[k, c]: address of
    column c in the first batch of chunk k. strides[c]: bytes from one batch to the next."""
    # The values of one column, which stay in the core's cache.
    values = np.empty(ends[-1], np.int32)
    as_floats = values.view(np.float32)
    address = np.uint64(values.ctypes.data)
    _scatter_columns(
        values, as_floats, address, sources, ends, kinds, order, places, targets, strides
    )


@compiled
def _scatter_columns(  # noqa: PLR0917
    values: Any,
    as_floats: Any,
    address: Any,
    sources: Any,
    ends: Any,
    kinds: Any,
    order: Any,
    places: Any,
    targets: Any,
    strides: Any,
) -> None:
    for c in range(len(kinds)):
        start = 0
        for p in range(len(ends)):
            count = ends[p] - start
            if kinds[c] == WORDS:
                _copy(address + np.uint64(4 * start), sources[c, p], np.uint64(4 * count))
            elif kinds[c] == BYTES_TO_FLOATS:
                copy_values(as_floats[start : ends[p]], carray(_int8_at(sources[c, p]), (count,)))
            else:
                copy_values(values[start : ends[p]], carray(_int8_at(sources[c, p]), (count,)))
            start = ends[p]
        _scatter(values, c, order, places, targets, strides)


@compiled
def pack_numbers(numbers: Any, bits: Any) -> Any:
    """Packs numbers below 2**`bits` into words. `unpack_numbers` unpacks them."""
    words = np.zeros(bits * ((len(numbers) + 31) // 32), np.uint32)
    start = 0
    word = 0
    while start < len(numbers) and bits:
        lanes = min(LANES, (len(numbers) - start + 31) // 32)
        for n in range(min(32 * lanes, len(numbers) - start)):
            shift = n // lanes * bits % 32
            at = word + n // lanes * bits // 32 * lanes + n % lanes
            words[at] |= numbers[start + n] << np.uint32(shift)
            if shift + bits > 32:
                words[at + lanes] |= numbers[start + n] >> np.uint32(32 - shift)
        start += 32 * lanes
        word += bits * lanes
    return words.view(np.uint8)


@compiled
def unpack_numbers(  # noqa: PLR0917
    kind: Any,
    words: Any,
    bits: Any,
    base: Any,
    values: Any,
    first: Any,
    count: Any,
    into: Any,
) -> None:
    """Unpacks `len(into)` of `count` numbers, starting with number `first`. For lengths, `first` must be 0."""
    numbers: Any = np.empty(LANES, np.uint32)  # one row of lanes, which stays in the core's cache
    last, total = first + len(into), into[0]
    if kind == LENGTHS:
        total = into[0] = 0
        into = into[1:]
        last = last - 1
        count = count - 1
    start = first // (32 * LANES) * (32 * LANES)
    word = start // 32 * bits
    while start < last:
        lanes = min(LANES, (count - start + 31) // 32)
        for row in range(32):
            low, high = max(start, first), min(start + lanes, last)
            if low < high:
                at, shift = word + row * bits // 32 * lanes, row * bits % 32
                lower = words[at : at + lanes]
                by = np.uint32(shift)
                mask = np.uint32((1 << bits) - 1)
                if bits == 0:
                    numbers[:] = 0
                elif shift + bits <= 32:
                    for n in range(lanes):
                        numbers[n] = np.uint32(lower[n] >> by) & mask
                else:
                    upper, rest = words[at + lanes : at + 2 * lanes], np.uint32(32 - shift)
                    for n in range(lanes):
                        numbers[n] = (
                            np.uint32(np.uint32(lower[n] >> by) | np.uint32(upper[n] << rest))
                            & mask
                        )
                target, some = into[low - first : high - first], numbers[low - start : high - start]
                if kind == PACKED:
                    for n in range(len(target)):
                        target[n] = some[n] + base
                elif kind == INDICES:
                    most = np.uint32(len(values) - 1)
                    for n in range(len(target)):
                        target[n] = values[min(some[n], most)]
                else:
                    for n in range(len(target)):
                        total = total + some[n] + base
                        target[n] = total
            start += lanes
        word += bits * lanes


@compiled
def unpack_words(stored: Any, part: Any, first: Any, into: Any) -> None:
    """Unpacks words of a column, starting with word `first`. `part` describes the packed data at address `stored` (see
    `sluice.ingest.read.packed_copy`)."""
    source = stored + np.uint64(part.begin)
    if part.kind == RAW:
        copy_values(into, carray(_int32_at(source + np.uint64(4 * first)), (len(into),)))
        return
    words = carray(_int32_at(source), (part.bits * ((part.count + 31) // 32),)).view(np.uint32)
    known = carray(_int32_at(stored + np.uint64(part.values)), (part.distinct,)).view(np.uint32)
    target = into.view(np.uint32)
    unpack_numbers(
        part.kind, words, part.bits, np.uint32(part.base), known, first, part.count, target
    )


@compiled
def scatter_packed(  # noqa: PLR0917
    stored: Any,
    parts: Any,
    starts: Any,
    ends: Any,
    kinds: Any,
    order: Any,
    places: Any,
    targets: Any,
    strides: Any,
) -> None:
    """Moves rows as `scatter` does, from packed columns. Each column is unpacked in the core's cache and moved at once.

    stored[p]: address of the packed data of piece p. Rows from `starts[p]` on are moved. parts[p, c] describes column c
    there (see `sluice.ingest.read.packed_copy`)."""
    values = np.empty(ends[-1], np.int32)
    as_floats = values.view(np.float32)
    for c in range(len(kinds)):
        start = 0
        for p in range(len(ends)):
            into, part = values[start : ends[p]], parts[p, c]
            if part.kind == RAW and kinds[c] != WORDS:
                source = stored[p] + np.uint64(part.begin + starts[p])
                copy_values(into, carray(_int8_at(source), (len(into),)))
            else:  # the lower 32 bits of the sum are also right for signed bytes
                unpack_words(stored[p], part, starts[p], into)
            if kinds[c] == BYTES_TO_FLOATS:
                copy_values(as_floats[start : ends[p]], into)
            start = ends[p]
        _scatter(values, c, order, places, targets, strides)


@compiled
def unpack_parts(parts: Any, stored: Any, stream: Any) -> None:
    """Unpacks all parts of a stream. The caller has checked the parts (`sluice.ingest.read.packed_copy`)."""
    for n in range(len(parts)):
        part = parts[n]
        kind, width = part.kind, part.width
        into = stream[part.at : part.at + part.count * width]
        if kind == RAW:
            copy_values(into, stored[part.begin : part.begin + part.count])
            continue
        known = stored[part.values : part.values + part.distinct * width]
        size = 4 * part.bits * ((part.count - (kind == LENGTHS) + 31) // 32)
        words = stored[part.begin : part.begin + size].view(np.uint32)
        bits, count = part.bits, part.count
        if width == 1:
            unpack_numbers(kind, words, bits, np.uint8(part.base), known, 0, count, into)
        elif width == 2:
            base16 = np.uint16(part.base)
            unpack_numbers(
                kind, words, bits, base16, known.view(np.uint16), 0, count, into.view(np.uint16)
            )
        elif width == 4:
            base32 = np.uint32(part.base)
            unpack_numbers(
                kind, words, bits, base32, known.view(np.uint32), 0, count, into.view(np.uint32)
            )
        else:
            base64 = np.uint64(part.base)
            unpack_numbers(
                kind, words, bits, base64, known.view(np.uint64), 0, count, into.view(np.uint64)
            )


@compiled
def read_children(struct: Any, places: Any, widths: Any, values: Any, nulls: Any) -> None:
    """Reads an ArrowArray of Arrow's C data interface. For the columns at `places`, whose values have `widths` bytes,
    writes the address of the first value into `values`, and the number of nulls (-1: unknown) into `nulls`."""
    head = carray(_uint64_at(struct), (7,))
    columns = carray(_uint64_at(head[6]), (head[4],))
    for c in range(len(widths)):
        _, count, offset, _, _, buffers = carray(_uint64_at(columns[places[c]]), (6,))
        validity, data = carray(_uint64_at(buffers), (2,))
        values[c] = data + offset * np.uint64(widths[c])
        nulls[c] = np.int64(count) if validity else 0


_LINE = 64  # bytes of a cache line
_BAGS_AHEAD = 6  # memory is prefetched so many bags ahead
_MOST_LINES = 6  # the most cache lines that are prefetched of a bag


@compiled
def find_pieces(order: Any, ends: Any, pieces: Any, rows: Any) -> None:
    """Finds for each row of the order its piece and its row there. The rows of piece p end before row `ends[p]`."""
    for n in range(len(order)):
        low, high = 0, len(ends) - 1
        while low < high:
            middle = (low + high) // 2
            if order[n] < ends[middle]:
                high = middle
            else:
                low = middle + 1
        pieces[n] = low
        rows[n] = order[n] - (ends[low - 1] if low else 0)


@compiled
def _offset(address: Any, wide: Any, row: Any) -> Any:
    """Returns the offset of a row. It has 8 bytes if `wide`, otherwise 4."""
    if wide:
        return np.int64(carray(_uint64_at(address + np.uint64(8 * row)), (1,))[0])
    return np.int64(carray(_int32_at(address + np.uint64(4 * row)), (1,))[0])


@compiled
def _count_uneven(offsets: Any, step: Any) -> Any:
    """Counts the bags with these offsets whose length is not `step`. It has no branch, so that the processor compares
    many at a time."""
    count = 0
    for n in range(len(offsets) - 1):
        count += offsets[n + 1] - offsets[n] != step
    return count


@compiled
def bag_size(offsets: Any, wide: Any, unit: Any, rows: Any) -> Any:
    """Returns (bytes of every bag, 0, 0) if all bags have one size, and (-1, 0, 0) if sizes differ. Returns
    (-2, piece, row) for a bag whose bytes are not a multiple of an id's. `offsets` are addresses, `unit` is what an
    offset counts."""
    size = np.int64(-1)
    equal = True
    for p in range(len(offsets)):
        before = _offset(offsets[p], wide[p], 0)
        if rows[p]:
            first = _offset(offsets[p], wide[p], 1) - before
            bag = first * unit[p]
            if (
                bag % 4 == 0
                and (size < 0 or bag == size)
                and not (
                    _count_uneven(
                        carray(_uint64_at(offsets[p]), (rows[p] + 1,)).view(np.int64), first
                    )
                    if wide[p]
                    else _count_uneven(carray(_int32_at(offsets[p]), (rows[p] + 1,)), first)
                )
            ):
                size = bag
                continue
        for row in range(rows[p]):
            after = _offset(offsets[p], wide[p], row + 1)
            bag = (after - before) * unit[p]
            if bag % 4:
                return -2, p, row
            if size < 0:
                size = bag
            equal &= bag == size
            before = after
    return (max(size, 0) if equal else -1), 0, 0


@compiled
def copy_equal_bags(values: Any, size: Any, pieces: Any, rows: Any, into: Any) -> None:
    """Copies bags of `size` bytes each. The n-th bag of the result is bag `rows[n]` at address `values[pieces[n]]`."""
    each = np.uint64(size)
    if size == 4:
        target = carray(_int32_at(into), (len(rows),))
        for n in range(len(rows)):
            target[n] = carray(
                _int32_at(values[pieces[n]] + np.uint64(4) * np.uint64(rows[n])), (1,)
            )[0]
        return
    lines = min(_MOST_LINES, 1 + size // _LINE)
    for n in range(len(rows)):
        if n + _BAGS_AHEAD < len(rows):
            soon = values[pieces[n + _BAGS_AHEAD]] + each * np.uint64(rows[n + _BAGS_AHEAD])
            for line in range(lines):
                _prefetch(soon + np.uint64(_LINE * line))
        _copy(into, values[pieces[n]] + each * np.uint64(rows[n]), each)
        into += each


@compiled
def bag_ends(offsets: Any, wide: Any, unit: Any, pieces: Any, rows: Any, ends: Any) -> None:  # noqa: PLR0917
    """Computes where each bag's ids end in the result, counted in ids. `ends[0]` is 0."""
    ends[0] = 0
    for n in range(len(rows)):
        p, row = pieces[n], np.int64(rows[n])
        bag = _offset(offsets[p], wide[p], row + 1) - _offset(offsets[p], wide[p], row)
        ends[n + 1] = ends[n] + bag * unit[p] // 4


@compiled
def copy_bags(  # noqa: PLR0917
    values: Any,
    offsets: Any,
    wide: Any,
    unit: Any,
    pieces: Any,
    rows: Any,
    ends: Any,
    into: Any,
) -> None:
    """Copies bags of different sizes. `ends` comes from `bag_ends`."""
    for n in range(len(rows)):
        if n + _BAGS_AHEAD < len(rows):
            p = pieces[n + _BAGS_AHEAD]
            _prefetch(
                values[p]
                + np.uint64(_offset(offsets[p], wide[p], np.int64(rows[n + _BAGS_AHEAD])) * unit[p])
            )
        p = pieces[n]
        source = values[p] + np.uint64(_offset(offsets[p], wide[p], np.int64(rows[n])) * unit[p])
        _copy(into + np.uint64(4 * ends[n]), source, np.uint64(4 * (ends[n + 1] - ends[n])))


def load_compiled(bags: bool = False) -> None:
    """Loads the compiled functions by calling each once with its types. Those for `bags` are loaded only on request.
    They take tens of MiB, and seconds if numba's cache is empty."""
    order = compose_order(np.zeros(1, np.int64), np.zeros(1, np.int64), 1)
    row, into = np.zeros(1, np.int32), np.zeros(1, np.int32)
    address, zero = np.array([[row.ctypes.data]], np.uint64), np.zeros(1, np.int64)
    scatter(
        address,
        zero + 1,
        zero,
        order,
        np.array([[0, 0, 1, 0, 1, 0]], np.int64),
        np.array([[into.ctypes.data]], np.uint64),
        zero + 4,
    )
    nothing = np.zeros(8, np.uint64)
    read_children(
        np.uint64(nothing.ctypes.data), zero[:0], zero[:0], np.empty(0, np.uint64), zero[:0].copy()
    )
    if not bags:
        return
    pieces = rows = np.zeros(1, np.uint32)
    find_pieces(order, zero + 1, pieces.copy(), rows.copy())
    offsets = np.array([zero.ctypes.data], np.uint64)
    bag_size(offsets, zero, zero, zero)
    copy_equal_bags(address[0], 4, pieces, rows, np.uint64(into.ctypes.data))
    bag_ends(offsets, zero, zero, pieces, rows, np.zeros(2, np.int64))
    copy_bags(
        address[0],
        offsets,
        zero,
        zero,
        pieces,
        rows,
        np.zeros(2, np.int64),
        np.uint64(into.ctypes.data),
    )


def load_packed() -> None:
    """Loads the compiled functions for packed columns, by calling them with no rows."""
    parts = np.zeros((1, 1), PART)
    zero = np.zeros(1, np.int64)
    nowhere = np.zeros((1, 0), np.uint64)
    unpack_words(np.uint64(0), parts[0, 0], 0, np.empty(0, np.int32))
    scatter_packed(
        zero.view(np.uint64),
        parts[:, :0],
        zero,
        zero,
        zero[:0],
        nowhere[0],
        zero[:0].reshape(0, PLACE_FIELDS),
        nowhere,
        zero[:0],
    )


_KINDS = (
    {pa.float32(): WORDS, pa.int8(): BYTES_TO_FLOATS},
    {pa.int32(): WORDS, pa.int8(): BYTES_TO_WORDS},
)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class ColumnAddresses:
    """How to read the columns of numbers directly from Arrow's memory, for tables of one schema."""

    def __init__(self, schema: pa.Schema, columns: Columns):
        self.schema = schema
        wanted = [
            (name, kinds)
            for names, kinds in zip((columns.floats, columns.scalars), _KINDS, strict=True)
            for name in names
            if name not in columns.added
        ]
        types = [schema.field(name).type for name, _ in wanted]
        moves = (known.get(kind, CONVERTED) for kind, (_, known) in zip(types, wanted, strict=True))
        self.kinds = np.array(list(moves), np.int64)
        """The kind of each stored column: floats, then ids."""
        self.names = tuple(
            name for (name, _), kind in zip(wanted, self.kinds, strict=True) if kind != CONVERTED
        )
        self.copied = len(self.names) == len(wanted) > 0
        """Whether no column needs conversion."""
        self.at = np.cumsum(self.kinds != CONVERTED) - 1
        """The index of each column in `names`, if it is there."""
        self.indices = np.array([schema.get_field_index(name) for name in self.names], np.int64)
        """The index of each of `names` in the schema."""
        self.widths = np.array(
            [schema.field(name).type.bit_width // 8 for name in self.names], np.int64
        )


def count_converted(schema: pa.Schema, columns: Columns) -> int:
    """Returns how many columns of numbers must be converted before they are moved."""
    return int(np.count_nonzero(ColumnAddresses(schema, columns).kinds == CONVERTED))


class Addresses:
    """The addresses of a table's columns. They are valid as long as this object."""

    def __init__(self, table: pa.Table, layout: ColumnAddresses):
        batches, places = table.to_batches(), layout.indices
        if len(batches) != 1:
            batches, places = (
                table.select(layout.names).combine_chunks().to_batches(),
                np.arange(len(layout.names)),
            )
        [batch] = batches
        _, self._owner = batch.__arrow_c_array__()
        self.values = np.empty(len(layout.names), np.uint64)
        """The address of the first value of each of the layout's columns."""
        self.nulls = np.empty(len(layout.names), np.int64)
        """The number of nulls in each column. -1: not known yet."""
        read_children(
            np.uint64(_pointer(self._owner, b"arrow_array")),
            places,
            layout.widths,
            self.values,
            self.nulls,
        )
