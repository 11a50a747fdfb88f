"""Arrays that are used again: `Buffers`. Fresh memory costs more in page faults than filling it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

# References to an array that nobody uses: the list, the loop's variable and the argument of getrefcount.
_OURS = 3


class Buffers:
    """Hands out an array only when nobody refers to it any more, be it through a view or a torch tensor.

    So a batch that a user still holds is never written again, and nothing has to be given back explicitly."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns an array of this shape; its content is left over from its last use."""
        dtype = np.dtype(dtype)
        with self._lock:
            for array in self._arrays:
                if array.shape == shape and array.dtype == dtype and sys.getrefcount(array) == _OURS:
                    return array
            array = np.empty(shape, dtype)
            self._arrays.append(array)
            return array

    def take_line(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns `size` elements of an array of one of a few lengths, so that it fits other sizes later."""
        step = 1 << max(0, size.bit_length() - 3)  # up to a quarter too long
        return self.take((max(1, -(-size // step)) * step,), dtype)[:size]

    def idle_bytes(self) -> int:
        """The number of bytes that nobody uses now."""
        with self._lock:
            return sum(array.nbytes for array in self._arrays if sys.getrefcount(array) == _OURS)

    def trim(self) -> None:
        """Gives back the arrays that nobody uses."""
        with self._lock:
            kept = [array for array in self._arrays if sys.getrefcount(array) > _OURS]
            self._arrays = kept
