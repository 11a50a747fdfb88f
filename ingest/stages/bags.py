"""Bags of ids, several a row: `Bags`, a column's values one after the other, and where each row's values begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.memory.buffers import Buffers

_ID = 4  # bytes of an id
_INT32 = np.iinfo(np.int32)


class BagError(ValueError):
    """Bags that do not hold int32 ids: the message says what they hold."""


@dataclass(frozen=True, slots=True)
class Bags:
    """Row n has the ids `values[offsets[n]:offsets[n + 1]]`; without `offsets`, every row has `each` of them."""

    values: npt.NDArray[np.int32]
    offsets: npt.NDArray[Any] | None
    each: int = 0

    def lengths(self, start: int, stop: int) -> npt.NDArray[Any] | int:
        return self.each if self.offsets is None else np.diff(self.offsets[start:stop + 1])

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """All ids of the rows from `start` to `stop`."""
        return self.values[self._at(start):self._at(stop)]

    def count(self, start: int, stop: int) -> int:
        return self._at(stop) - self._at(start)

    def _at(self, row: int) -> int:
        return row * self.each if self.offsets is None else int(self.offsets[row])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


def shuffled(arrays: Sequence[pa.Array], order: npt.NDArray[np.int64] | None, buffers: Buffers) -> Bags:
    """The bags of some arrays, one after the other, in `order` (as they are stored if None). A missing bag is an empty
    one."""
    binary = [_as_binary(array) for array in arrays]
    whole = binary[0] if len(binary) == 1 else pa.concat_arrays([b.cast(pa.large_binary()) for b in binary])
    ends, values = _parts(whole)
    rows, first, last = len(whole), int(ends[0]), int(ends[-1])
    each = (last - first) // rows if rows else 0
    if each * rows == last - first and each % _ID == 0 and bool((np.diff(ends) == each).all()):
        each //= _ID  # all bags have one length: they are the rows of a matrix
        values = values[first // _ID:last // _ID]
        if order is not None:
            taken = buffers.take_line(len(order) * each, np.int32)
            if each:
                values.reshape(rows, each).take(order, axis=0, out=taken.reshape(len(order), each), mode="clip")
            values = taken
        return Bags(values, None, each)
    _check_sizes(ends)
    if order is not None:
        ends, values = _parts(whole.cast(pa.large_binary()).take(pa.array(order)))
    return Bags(values[int(ends[0]) // _ID:int(ends[-1]) // _ID], (ends - ends[0]) // _ID)


def _as_binary(array: pa.Array) -> pa.Array:
    """The bags as bytes, little-endian int32 one after the other: without a copy if they are int32 already."""
    if pa.types.is_large_binary(array.type) or pa.types.is_binary(array.type):
        return array
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise BagError(f"a bag of {array.type}")
    if array.null_count:
        array = array.fill_null([])
    values = array.values
    if values.null_count:
        raise BagError(f"{values.null_count} empty values within bags")
    numbers = values.to_numpy(zero_copy_only=False)
    if not np.can_cast(numbers.dtype, np.int32):
        used = numbers[array.offsets[0].as_py():array.offsets[-1].as_py()]
        if len(used) and not _INT32.min <= used.min() <= used.max() <= _INT32.max:
            raise BagError(f"ids from {used.min()} to {used.max()}, which do not fit int32")
    numbers = np.ascontiguousarray(numbers, np.int32)
    offsets = array.offsets.to_numpy().astype(np.int64) * _ID
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(array),
                                            [None, pa.py_buffer(offsets), pa.py_buffer(numbers)])


def _parts(binary: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Where each bag ends, in bytes after the beginning of the first; and all values."""
    _, offsets, data = binary.buffers()
    kind = np.int64 if pa.types.is_large_binary(binary.type) else np.int32
    ends = np.frombuffer(offsets, kind)[binary.offset:binary.offset + len(binary) + 1]
    size = int(ends[-1]) // _ID
    return ends, np.frombuffer(data, "<i4", size) if size else np.empty(0, np.int32)


def _check_sizes(ends: npt.NDArray[Any]) -> None:
    odd = np.diff(ends) % _ID != 0
    if odd.any():
        row = int(np.argmax(odd))
        raise BagError(f"a bag of {ends[row + 1] - ends[row]} bytes, which is no whole number of int32 ids")
