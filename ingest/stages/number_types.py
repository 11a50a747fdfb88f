"""Converts numbers of any type to a batch's types (float32, int32, uint32): `numbers`. It rejects values that would
change."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_LARGEST = float(np.finfo(np.float32).max)


class ValueRefused(ValueError):
    """A value does not fit. The message holds the value and says what to do."""

    def __init__(self, at: int, text: str):
        super().__init__(text)
        self.at = at
        """The place of the value among all values."""


def numbers(array: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    """Returns `array` as float32 or as ids. Does not copy it if it already has that type."""
    if array.dtype.kind not in "biuf":
        raise ValueRefused(
            0,
            f"{array.flat[0]!r}, which is no number"
            if array.size
            else f"{array.dtype}, no numbers",
        )
    if kind is not np.float32:
        return _ids(array, kind)
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(array, np.float32)
    except FloatingPointError:
        at = int(np.argmax(np.isfinite(array) & (np.abs(array) > _LARGEST)))
        raise ValueRefused(
            at, f"{array[at]}, which is too large for float32; clip it, or take its logarithm"
        ) from None


def to_batch_type(made: npt.NDArray[Any] | pa.Array) -> npt.NDArray[Any] | pa.Array:
    """Converts what a spec's operators made of a column to a batch's types. Raises ValueRefused for a value that does
    not fit."""
    is_number = isinstance(made, np.ndarray) and made.dtype == np.float64
    return numbers(made, np.float32) if is_number else made


def arrow_array(array: npt.NDArray[Any]) -> pa.Array:
    """Returns an Arrow array that shares the memory of contiguous numbers. `pa.array` would import pandas."""
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(array.dtype), len(array), [None, pa.py_buffer(array)]
    )


def _ids(array: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    fit = np.iinfo(kind)
    if array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = ~((np.floor(array) == array) & (array >= 0) & (array <= fit.max))
    else:
        wrong = array.astype(np.uint64) > fit.max
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueRefused(
            at,
            f"{array[at]}, which is no whole number from 0 to {fit.max} ({fit.dtype}), as ids are; "
            "hash, categorify or bucketize it",
        )
    return np.ascontiguousarray(array, kind)


def same_bytes(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two arrays hold the same bytes, so NaN equals NaN."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bool(
            (
                np.ascontiguousarray(one).view(np.uint8)
                == np.ascontiguousarray(other).view(np.uint8)
            ).all()
        )
    )
