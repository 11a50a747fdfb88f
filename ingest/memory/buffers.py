"""Arrays that are used again: `Buffers`. Fresh memory costs more in page faults than filling it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

# References to an array that nobody uses: the list, the loop's variable and the argument of getrefcount.
_UNUSED = 3


class Buffers:
    """Hands out an array only when nobody refers to it any more, be it through a view or a torch tensor.

    So a batch that a user still holds is never written again, and nothing has to be given back explicitly."""

    def __init__(self) -> None:
        self._arrays: dict[
            tuple[tuple[int, ...], type[np.generic]], list[npt.NDArray[Any]]
        ] = {}  # by shape and type
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Returns an array of this shape; its content is left over from its last use."""
        with self._lock:
            alike = self._arrays.setdefault((shape, dtype), [])
            for array in alike:
                if sys.getrefcount(array) == _UNUSED:
                    return array
            array = np.empty(shape, dtype)
            alike.append(array)
            return array

    def take_line(self, size: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Returns `size` elements of an array of one of a few lengths, so that it fits other sizes later."""
        step = 1 << max(0, size.bit_length() - 3)  # up to a quarter too long
        return self.take((max(1, -(-size // step)) * step,), dtype)[:size]

    def idle_bytes(self) -> int:
        """The number of bytes that nobody uses now."""
        with self._lock:
            return sum(
                array.nbytes
                for alike in self._arrays.values()
                for array in alike
                if sys.getrefcount(array) == _UNUSED
            )

    def trim(self) -> None:
        """Gives back the arrays that nobody uses."""
        with self._lock:
            used = {
                kind: [array for array in alike if sys.getrefcount(array) > _UNUSED]
                for kind, alike in self._arrays.items()
            }
            self._arrays = {kind: arrays for kind, arrays in used.items() if arrays}
