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

    def __init__(self, at: int | None, text: str):
        super().__init__(text)
        self.at = at
        """The place of the value among all values. None: the message is about several."""

    def message(self, where: str, name: str, rows: Any) -> str:
        """Returns a message about this value of a column. `rows` has the row of each value, by its place."""
        row = "" if self.at is None else f", row {rows[self.at]}"
        return f"{where}{row}: column {name!r} holds {self}"


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


def is_finite(column: pa.ChunkedArray) -> bool:
    """Whether a column without nulls has no NaN and no infinity. `to_numpy` would import pandas."""
    return not pa.types.is_floating(column.type) or all(
        np.isfinite(np.from_dlpack(c)).all() for c in column.chunks
    )


def filled_numbers(
    name: str, column: pa.ChunkedArray, kind: Any, fill: float | None
) -> npt.NDArray[Any]:
    """Returns a stored column as `numbers` does, with `fill` for missing values, NaN and infinities. Raises
    ValueRefused for missing values without a fill."""
    if column.null_count and fill is None:
        raise ValueRefused(
            None,
            f'{column.null_count} empty values; fill them in the spec (op = "fill"), or by name, '
            f"fill={{{name!r}: 0}} (--fill 0)",
        )
    if column.null_count:
        try:
            if pa.types.is_boolean(column.type):
                fill = {0.0: False, 1.0: True}[fill or 0.0]  # Arrow makes True of any number
            column = column.fill_null(pa.scalar(fill).cast(column.type))
        except (pa.ArrowException, KeyError):
            raise ValueRefused(
                None,
                f"{column.null_count} empty values, and {fill:g} to fill them is no {column.type}; give the column "
                "a fill of that type",
            ) from None
    array = column.to_numpy()
    if fill is not None and array.dtype.kind == "f":
        array = np.where(np.isfinite(array), array, array.dtype.type(fill))
    return numbers(array, kind)


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
    wrong: Any = np.False_
    if array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = ~((np.floor(array) == array) & (array >= 0) & (array <= fit.max))
    elif array.size and not 0 <= array.min() <= array.max() <= fit.max:
        wrong = array.astype(np.uint64) > fit.max
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueRefused(
            at,
            f"{array[at]}, which is no whole number from 0 to {fit.max} ({fit.dtype}), as ids are; "
            "hash, categorify or bucketize it",
        )
    return np.ascontiguousarray(array, kind)


def same_bytes(array: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two arrays hold the same bytes, so NaN equals NaN."""
    same_form = array.dtype == other.dtype and array.shape == other.shape
    return same_form and array.tobytes() == other.tobytes()
