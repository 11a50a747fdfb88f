"""Shuffles bags of ids, which have several ids a row: `Bags` holds all ids of a column, and where each row's ids
start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.stages.number_types import ValueRefused, arrow_array, numbers
from sluice.ingest.stages.scatter_kernel import (
    bag_ends,
    bag_size,
    copy_bags,
    copy_equal_bags,
    find_pieces,
)

_ID_BYTES = 4  # bytes of an id
_SMALL_BAG = 48  # bytes; bags up to this size are copied together before they are moved


class BagError(ValueError):
    """Bags do not hold ids. The message says what they hold."""

    def __init__(self, text: str, column: str = "", piece: int = 0):
        super().__init__(text)
        self.column = column
        self.piece = piece


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of a column. Row n has the ids `values[offsets[n]:offsets[n + 1]]`. Ids beyond int32 are stored as the
    same 32 bits."""

    values: npt.NDArray[np.int32]
    offsets: npt.NDArray[Any] | None
    """None: every row has `each` ids."""
    each: int = 0

    def lengths(self, start: int, stop: int) -> npt.NDArray[Any] | int:
        return self.each if self.offsets is None else np.diff(self.offsets[start : stop + 1])

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Returns all ids of the rows from `start` to `stop`."""
        return self.values[self._at(start) : self._at(stop)]

    def count(self, start: int, stop: int) -> int:
        return self._at(stop) - self._at(start)

    def _at(self, row: int) -> int:
        return row * self.each if self.offsets is None else int(self.offsets[row])

    def as_arrow(self, rows: int, kind: type[np.int32 | np.uint32 | np.float32]) -> pa.Array:
        """Returns the bags as an Arrow array with ids of type `kind`. The ids are not copied."""
        ends = (
            np.arange(rows + 1, dtype=np.int64) * self.each
            if self.offsets is None
            else self.offsets
        )
        return pa.LargeListArray.from_arrays(
            arrow_array(ends.astype(np.int64, copy=False)), arrow_array(self.values.view(kind))
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


@dataclass(frozen=True, slots=True)
class HistoryViews:
    """The histories of a window's rows in one column. Their events are in the row groups' memory, and are copied when
    batches are made."""

    events: tuple[npt.NDArray[np.int32], ...]
    """The events of each piece."""
    pieces: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    """Where each row's history begins among the events of its piece."""
    offsets: npt.NDArray[np.int64]
    """The number of events in the histories of all rows before a row."""
    nbytes: int

    def lengths(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets[start : stop + 1])

    def count(self, start: int, stop: int) -> int:
        return int(self.offsets[stop] - self.offsets[start])

    def copy_ids(self, start: int, stop: int, into: npt.NDArray[np.int32]) -> None:
        """Copies the histories of the rows from `start` to `stop`."""
        each = len(self.events)
        copy_bags(
            _addresses(self.events),
            np.full(each, _address(self.starts)),
            np.ones(each, np.int64),
            np.full(each, _ID_BYTES),
            self.pieces[start:stop],
            np.arange(start, stop, dtype=np.uint32),
            self.offsets[start : stop + 1],
            _address(into) - np.uint64(_ID_BYTES * self.offsets[start]),
        )

    def as_arrow(self, rows: int, kind: type[np.int32 | np.uint32 | np.float32]) -> pa.Array:
        """Returns the histories as an Arrow array with values of type `kind`."""
        values = np.empty(self.count(0, rows), np.int32)
        self.copy_ids(0, rows, values)
        return pa.LargeListArray.from_arrays(
            arrow_array(self.offsets), arrow_array(values.view(kind))
        )


def history_views(
    columns: Mapping[str, Sequence[pa.Array]],
    rows: Sequence[int],
    order: npt.NDArray[np.uint64] | None,
) -> dict[str, HistoryViews]:
    """Puts the histories of a window's rows in `order`, or leaves them as they are stored. All columns have the same
    number of events a row. `rows` are those of the row group of each piece."""
    if not columns:
        return {}
    arrays = next(iter(columns.values()))
    sizes = [_view(array) for array in arrays]
    pieces = np.repeat(np.arange(len(arrays), dtype=np.uint32), [len(array) for array in arrays])
    starts = np.concatenate([start for start, _ in sizes]).astype(np.int64)
    lengths = np.concatenate([length for _, length in sizes])
    if order is not None:
        pieces = pieces[order]
        starts = starts[order]
        lengths = lengths[order]
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    found: dict[str, HistoryViews] = {}
    for name, some in columns.items():
        events = tuple(array.values.to_numpy().view(np.int32) for array in some)
        # All windows of a row group hold its events, so each counts its share.
        held = sum(
            e.nbytes * len(a) // max(1, n) for e, a, n in zip(events, some, rows, strict=True)
        )
        views = 0 if found else pieces.nbytes + starts.nbytes + offsets.nbytes
        found[name] = HistoryViews(events, pieces, starts, offsets, views + held)
    return found


def _view(array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns where each row's events begin, and how many there are. A worker sends lists instead of views."""
    offsets = array.offsets.to_numpy()
    if pa.types.is_list_view(array.type):
        return offsets, array.sizes.to_numpy()
    return offsets[:-1], np.diff(offsets)


def unit_of(kind: pa.DataType) -> int:
    """Returns how many bytes one unit of an offset stands for. 0: the column has no bags, or its ids cannot stay
    packed."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return 1
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return _ID_BYTES if lists and kind.value_type == pa.int32() else 0


def shuffle_bags(
    columns: Mapping[str, Sequence[pa.Array]],
    order: npt.NDArray[np.uint64] | None,
    buffers: Buffers,
    kind: Callable[[str], type[np.int32 | np.uint32]] = lambda _: np.int32,
) -> dict[str, Bags]:
    """Puts the bags of a window's columns in `order`. If `order` is None, they keep the stored order. Each id is moved
    once, out of Arrow's pieces. A missing bag becomes an empty one. `kind` returns the type of a column's ids."""
    if not columns:
        return {}
    stored = {name: _Column(name, arrays, kind(name)) for name, arrays in columns.items()}
    counts = np.array([len(array) for array in next(iter(columns.values()), ())], np.int64)
    if order is None:
        if len(counts) == 1:
            return {name: column.as_stored() for name, column in stored.items()}
        order = np.arange(counts.sum(), dtype=np.uint64)
    pieces = np.empty(len(order), np.uint32)
    rows = np.empty(len(order), np.uint32)
    find_pieces(order, np.cumsum(counts), pieces, rows)
    ends = {name: column.ends(pieces, rows) for name, column in stored.items() if column.size < 0}
    ids = [
        int(ends[name][-1]) if name in ends else len(order) * column.size // _ID_BYTES
        for name, column in stored.items()
    ]
    found = {}
    start = 0
    all_ids = buffers.take_line(sum(ids), np.int32)
    scratch = buffers.take_line(max(column.scratch for column in stored.values()), np.int32)
    for (name, column), count in zip(stored.items(), ids, strict=True):
        values = all_ids[start : start + count]
        start += count
        piece_ids = column.values(scratch)
        if name in ends:
            copy_bags(
                _addresses(piece_ids) - column.bytes_before_first(),
                *column.offsets,
                pieces,
                rows,
                ends[name],
                _address(values),
            )
            found[name] = Bags(values, ends[name])
        else:
            if column.size:
                copy_equal_bags(_addresses(piece_ids), column.size, pieces, rows, _address(values))
            found[name] = Bags(values, None, column.size // _ID_BYTES)
    return found


# The offsets of a piece's bags, their ids, and the bytes that one unit of an offset stands for.
_Part = tuple[npt.NDArray[Any], npt.NDArray[np.int32], int]


class _Column:
    """The stored bags of one column, in all pieces of a window."""

    def __init__(self, name: str, arrays: Sequence[pa.Array], kind: type[np.int32 | np.uint32]):
        self._parts = list[_Part]()
        for piece, array in enumerate(arrays):
            try:
                self._parts.append(_parts_of(array, kind))
            except BagError as error:
                raise BagError(str(error), name, piece) from None
        offsets = np.array([_address(offsets) for offsets, _, _ in self._parts], np.uint64)
        wide = np.array([offsets.itemsize == 8 for offsets, _, _ in self._parts], np.int64)
        unit = np.array([unit for _, _, unit in self._parts], np.int64)
        self.offsets = offsets, wide, unit
        """For each piece: the address of its offsets, whether an offset has 8 bytes, and its unit."""
        self.size: int
        rows = np.array([len(array) for array in arrays], np.int64)
        self.size, piece, row = bag_size(offsets, wide, unit, rows)
        """The bytes of every bag. -1: the sizes differ. -2: bag `row` of `piece` does not consist of whole ids."""
        if self.size < -1:
            start, end = self._parts[piece][0][row : row + 2]
            raise BagError(
                f"a bag of {end - start} bytes, which is not a multiple of the four bytes of an id",
                name,
                piece,
            )
        self._copied_first = 0 <= self.size <= _SMALL_BAG
        self._id_ranges = [
            (int(offsets[0]) * unit // _ID_BYTES, int(offsets[-1]) * unit // _ID_BYTES)
            for offsets, _, unit in self._parts
        ]
        self.scratch = (
            sum(last - first for first, last in self._id_ranges) if self._copied_first else 0
        )
        """The number of ids that are copied into scratch memory before they are moved."""

    def values(self, scratch: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Returns the ids of each piece, from its first bag to its last. Small bags are first put into `scratch`. There
        they stay in the core's cache while they are moved one by one."""
        found = []
        done = 0
        for (_, stored, _), (first, last) in zip(self._parts, self._id_ranges, strict=True):
            ids = stored[first:last]
            if self._copied_first:
                ids = scratch[done : done + last - first]
                done += len(ids)
                np.copyto(ids, stored[first:last])
            found.append(ids)
        return found

    def as_stored(self) -> Bags:
        """Returns the bags of the only piece, in the stored order and not copied."""
        [(offsets, stored, unit)], [(first, last)] = self._parts, self._id_ranges
        values = stored[first:last]
        return (
            Bags(values, (offsets - offsets[0]) * unit // _ID_BYTES)
            if self.size < 0
            else Bags(values, None, self.size // _ID_BYTES)
        )

    def bytes_before_first(self) -> npt.NDArray[np.uint64]:
        """Returns the bytes of values before the first bag of each piece."""
        return np.array([int(offsets[0]) * unit for offsets, _, unit in self._parts], np.uint64)

    def ends(
        self, pieces: npt.NDArray[np.uint32], rows: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.int64]:
        """Returns where each bag's ids start in the shuffled column, and where the last bag's ids end."""
        ends = np.empty(len(rows) + 1, np.int64)
        bag_ends(*self.offsets, pieces, rows, ends)
        return ends


def _address(array: npt.NDArray[Any]) -> np.uint64:
    return np.uint64(array.__array_interface__["data"][0])


def _addresses(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    return np.array([_address(array) for array in arrays], np.uint64)


def _parts_of(array: pa.Array, kind: type[np.int32 | np.uint32]) -> _Part:
    """Returns the offsets of the bags, their ids, and the bytes that an offset counts. Nothing is copied if the ids
    already have the type `kind`."""
    if pa.types.is_large_binary(array.type) or pa.types.is_binary(array.type):
        offset = np.int64 if pa.types.is_large_binary(array.type) else np.int32
        _, offsets, data = array.buffers()
        if not len(array):
            return np.zeros(1, offset), np.empty(0, np.int32), 1
        ends = np.frombuffer(offsets, offset)[array.offset : array.offset + len(array) + 1]
        size = int(ends[-1]) // _ID_BYTES
        return ends, np.frombuffer(data, "<i4", size) if size else np.empty(0, np.int32), 1
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise BagError(f"a bag of {array.type}")
    if array.null_count:
        array = array.fill_null([])
    if array.values.null_count:
        raise BagError(f"{array.values.null_count} empty values within bags")
    ends, ids = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False)
    if ids.dtype != kind:
        ids, ends = ids[ends[0] : ends[-1]], ends - ends[0]
        try:
            ids = numbers(ids, kind)
        except ValueRefused as refused:
            raise BagError(str(refused)) from None
    return ends, np.ascontiguousarray(ids).view(np.int32), _ID_BYTES
