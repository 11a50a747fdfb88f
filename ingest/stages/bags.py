"""Bags of ids, which have several ids a row: `bag_rows` says where each row's ids lie, and `copy_bags` copies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.ops.compiled import compile_function
from sluice.etl.spec.nested_columns import is_bytes
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.stages.number_types import ValueRefused, arrow_array, numbers
from sluice.ingest.stages.scatter_kernel import (
    copy,
    int32_at,
    int64_at,
    load_compiled,
    prefetch,
)

_ID_BYTES = 4  # bytes of an id
_BAGS_AHEAD = 6  # memory is prefetched so many bags ahead
_MOST_LINES = 6  # the most cache lines that are prefetched of a bag
_LINE = 64  # bytes of a cache line


class StoredBags(NamedTuple):
    """The bags of some rows as a row group has them."""

    begins: npt.NDArray[Any]
    """Where the ids of each row begin, as offsets from `ids`."""
    ends: npt.NDArray[Any]
    unit: int
    """The bytes that one unit of an offset stands for."""
    ids: npt.NDArray[Any]
    """Owns the ids. Ids beyond int32 are stored as the same 32 bits."""
    nbytes: int
    """The bytes of the ids of these rows."""


class BagRows(NamedTuple):
    """Where the bags of some rows lie. The first three have one element a row."""

    lengths: npt.NDArray[np.int32]
    """The number of ids."""
    low: npt.NDArray[np.uint32]
    """The low half of the address of the first id."""
    high: npt.NDArray[np.uint32]
    """The high half."""
    owners: list[npt.NDArray[Any]]
    """What owns the ids."""
    nbytes: int
    """The bytes of the ids of these rows."""


def stored_bags(column: pa.ChunkedArray, kind: Any, group_rows: int) -> StoredBags:
    """Returns the bags of a column. A missing bag has no ids. Ids that already have the type `kind` are not copied.
    `group_rows` is the number of rows of their row group. Raises ValueRefused, with the row if one bag is wrong."""
    array = column.chunk(0) if column.num_chunks == 1 else _joined(column)
    if pa.types.is_list_view(array.type):
        begins, ids = array.offsets.to_numpy(), array.values.to_numpy()
        # Histories share their events. All windows of a row group hold these, so each counts its share.
        share = ids.nbytes * len(array) // max(1, group_rows)
        return StoredBags(begins, begins + array.sizes.to_numpy(), _ID_BYTES, ids, share)
    unit = 1 if is_bytes(array.type) else _ID_BYTES
    offsets, ids = _packed(array) if unit == 1 else _listed(array, kind)
    nbytes = unit * int(offsets[-1] - offsets[0])
    return StoredBags(offsets[:-1], offsets[1:], unit, ids, nbytes)


def bag_rows(
    parts: Sequence[StoredBags], pieces: npt.NDArray[Any], rows: npt.NDArray[Any], buffers: Buffers
) -> BagRows:
    """Returns where bag `rows[n]` of part `pieces[n]` lies, for each n."""
    lengths = buffers.take_line(len(rows), np.int32)
    low, high = (buffers.take_line(len(rows), np.uint32) for _ in range(2))
    table = [
        (
            part.begins.ctypes.data,
            part.ends.ctypes.data,
            part.begins.itemsize == 8,
            part.unit,
            part.ids.ctypes.data,
        )
        for part in parts
    ]
    find_bags(np.array(table, np.int64), pieces, rows, lengths, low, high)
    owners = [part.ids for part in parts]
    return BagRows(lengths, low, high, owners, sum(part.nbytes for part in parts))


def with_copied_ids(bags: BagRows, buffers: Buffers) -> BagRows:
    """Returns the same bags, with their ids one after the other in other memory. Call this soon after decoding, while
    the ids are in the core's cache."""
    ids = buffers.take_line(int(bags.lengths.sum(dtype=np.int64)), np.int32)
    copy_bags(bags.lengths, bags.low, bags.high, ids)
    lay_in_line(bags.lengths, np.uint64(ids.ctypes.data), bags.low, bags.high)
    return bags._replace(owners=[ids])


def as_lists(bags: BagRows, kind: Any) -> pa.LargeListArray:
    """Returns bags as lists of ids of the type `kind`, in new memory."""
    offsets = np.zeros(len(bags.lengths) + 1, np.int64)
    np.cumsum(bags.lengths, out=offsets[1:])
    ids = np.empty(offsets[-1], np.int32)
    copy_bags(bags.lengths, bags.low, bags.high, ids)
    return pa.LargeListArray.from_arrays(arrow_array(offsets), arrow_array(ids.view(kind)))


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """Returns a column of several chunks as one. There are several if 32-bit offsets cannot count all bytes."""
    return (column.cast(pa.large_binary()) if is_bytes(column.type) else column).combine_chunks()


def _packed(array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the offsets of bags that are bytes, and their bytes."""
    _, buffer, data = array.buffers()
    if not len(array):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    kind = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    offsets = np.frombuffer(buffer, kind)[array.offset : array.offset + len(array) + 1]
    sizes = np.diff(offsets)
    if (odd := sizes % _ID_BYTES > 0).any():
        row = int(odd.argmax())
        raise ValueRefused(
            row, f"a bag of {sizes[row]} bytes, which is not a multiple of the four bytes of an id"
        )
    return offsets, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def _listed(array: pa.Array, kind: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the offsets of bags that are lists, and their ids."""
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise ValueRefused(None, f"a bag of {array.type}")
    if array.null_count:
        array = array.fill_null([])
    if array.values.null_count:
        raise ValueRefused(None, f"{array.values.null_count} empty values within bags")
    offsets, ids = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False)
    ids, offsets = ids[offsets[0] : offsets[-1]], offsets - offsets[0]
    try:
        return offsets, numbers(ids, kind)
    except ValueRefused as refused:
        row = int(np.searchsorted(offsets, refused.at or 0, "right")) - 1
        raise ValueRefused(row, str(refused)) from None


@compile_function
def _address(low: Any, high: Any, n: Any) -> Any:
    return np.uint64(high[n]) << np.uint64(32) | np.uint64(low[n])


@compile_function
def _copy_bags(lengths: Any, low: Any, high: Any, into: Any) -> None:
    begin = end = np.uint64(0)  # bags that lie one after the other are copied together
    for n in range(len(lengths)):
        source = _address(low, high, n)
        if source != end:
            soon = n + _BAGS_AHEAD
            if soon < len(lengths):
                for line in range(min(_MOST_LINES, 1 + 4 * lengths[soon] // _LINE)):
                    prefetch(_address(low, high, soon) + np.uint64(_LINE * line))
            copy(into, begin, end - begin)
            into += end - begin
            begin = source
        end = source + np.uint64(4 * lengths[n])
    copy(into, begin, end - begin)


def copy_bags(lengths: Any, low: Any, high: Any, into: Any) -> None:
    """Copies bags to `into`, one after the other. Each has `lengths` ids at an address that is given in two halves."""
    _copy_bags(lengths, low.view(np.uint32), high.view(np.uint32), np.uint64(into.ctypes.data))


@compile_function
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


@compile_function
def _offset(address: Any, wide: Any, row: Any) -> Any:
    """Returns the offset of a row. It has 8 bytes if `wide`, otherwise 4."""
    if wide:
        return int64_at(address)[row]
    return np.int64(int32_at(address)[row])


@compile_function
def find_bags(parts: Any, pieces: Any, rows: Any, lengths: Any, low: Any, high: Any) -> None:  # noqa: PLR0917
    """Finds the length and the address of each bag: bag `rows[n]` of part `pieces[n]`. A part has the addresses of the
    offsets where bags begin and end, whether an offset has 8 bytes, what it counts in bytes, and the address of the
    ids."""
    for n in range(len(rows)):
        p = pieces[n]
        wide, unit = parts[p, 2], parts[p, 3]
        begin = _offset(np.uint64(parts[p, 0]), wide, rows[n]) * unit
        size = _offset(np.uint64(parts[p, 1]), wide, rows[n]) * unit - begin
        lengths[n] = size // 4
        address = np.uint64(parts[p, 4] + begin)
        low[n] = address & np.uint64(0xFFFFFFFF)
        high[n] = address >> np.uint64(32)


@compile_function
def lay_in_line(lengths: Any, address: Any, low: Any, high: Any) -> None:
    """Sets the address of each bag as if they lay one after the other from `address` on."""
    for n in range(len(lengths)):
        low[n] = address & np.uint64(0xFFFFFFFF)
        high[n] = address >> np.uint64(32)
        address += np.uint64(4 * lengths[n])


def load_compiled_moves(bags: bool) -> None:
    """Loads the compiled functions that move rows. Those of bags are loaded only if there are `bags`."""
    load_compiled()
    if not bags:
        return
    rows, halves, line = np.zeros(0, np.int32), np.zeros(0, np.uint32), np.zeros(2, np.int64)
    find_pieces(line[:0].view(np.uint64), line, halves, halves)
    find_bags(np.zeros((1, 5), np.int64), halves, halves, rows, halves, halves)
    copy_bags(rows, halves, halves, rows)
    lay_in_line(rows, np.uint64(0), halves, halves)
