"""Bags of ids, several a row: `Bags`, a column's values one after the other with where each row's begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_ID = 4  # bytes
_INT32 = np.iinfo(np.int32)


class BagError(ValueError):
    """Bags that do not hold int32 ids: the message says what they hold."""


@dataclass(frozen=True, slots=True)
class Bags:
    """Row n has the ids `values[offsets[n]:offsets[n + 1]]`."""

    offsets: npt.NDArray[Any]
    values: npt.NDArray[np.int32]

    def lengths(self, start: int, stop: int) -> npt.NDArray[Any]:
        return np.diff(self.offsets[start:stop + 1])

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """All ids of some rows."""
        return self.values[self.offsets[start]:self.offsets[stop]]

    def count(self, start: int, stop: int) -> int:
        return int(self.offsets[stop] - self.offsets[start])

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.values.nbytes


def shuffled(arrays: Sequence[pa.Array], order: npt.NDArray[np.int64] | None) -> Bags:
    """The bags of some arrays, one after the other, in `order` (as they lie if None). A missing bag is an empty one."""
    binary = [_as_binary(array) for array in arrays]
    whole = binary[0] if len(binary) == 1 else pa.concat_arrays(binary)
    offsets, values = _parts(whole)
    if order is None:
        return Bags(offsets - offsets[0], values[offsets[0]:offsets[-1]])
    rows, size = len(whole), int(offsets[-1] - offsets[0])
    each = size // rows if rows else 0
    if each * rows == size and bool((np.diff(offsets) == each).all()):  # all of one length: rows of a matrix
        block = values[offsets[0]:offsets[-1]].reshape(rows, each)
        taken = np.take(block, order, axis=0, mode="clip") if each else block[:len(order)]
        return Bags(np.arange(len(order) + 1, dtype=np.int64) * each, taken.reshape(-1))
    offsets, values = _parts(whole.take(pa.array(order)))
    return Bags(offsets - offsets[0], values[offsets[0]:offsets[-1]])


def _as_binary(array: pa.Array) -> pa.Array:
    """Bags as bytes, little-endian int32 one after the other: without a copy if they are int32 already."""
    if pa.types.is_large_binary(array.type):
        return array
    if pa.types.is_binary(array.type):
        return array.cast(pa.large_binary())
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
    """Offsets, counted in ids, and all values."""
    _, offsets, data = binary.buffers()
    ends = np.frombuffer(offsets, np.int64)[binary.offset:binary.offset + len(binary) + 1]
    if bool((ends % _ID).any()):
        row = int(np.argmax(np.diff(ends) % _ID != 0))
        raise BagError(f"a bag of {ends[row + 1] - ends[row]} bytes, which is no whole number of int32 ids")
    size = int(ends[-1]) // _ID
    return ends // _ID, np.frombuffer(data, "<i4", size) if size else np.empty(0, np.int32)
