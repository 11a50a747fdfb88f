"""Numbers as batches hold them, float32 and int32: what does not fit is an error, never another number."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_INT32 = np.iinfo(np.int32)


class FloatRangeError(ValueError):
    """A finite number that float32 would take for infinite: the message says which."""


class IdRangeError(ValueError):
    """Ids that int32 would take for others: the message says which."""


def as_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Infinite and missing numbers stay what they are."""
    if values.dtype != np.float64:  # no other number that a column may hold is too large
        return np.ascontiguousarray(values, np.float32)
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(values, np.float32)
    if np.isinf(narrow).any():
        lost = np.isinf(narrow) & np.isfinite(values)
        if lost.any():
            raise FloatRangeError(f"{values[lost][0]:g}, which float32 takes for infinite")
    return narrow


def as_int32(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Of whole numbers of any width."""
    if len(values) and not np.can_cast(values.dtype, np.int32) and not \
            _INT32.min <= values.min() <= values.max() <= _INT32.max:
        raise IdRangeError(f"ids from {values.min()} to {values.max()}, which do not fit int32")
    return np.ascontiguousarray(values, np.int32)
