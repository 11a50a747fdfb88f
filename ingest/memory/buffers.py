"""`Buffers` reuses arrays, because page faults on new memory cost more than filling it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

# References to an unused array: the list, the loop's variable and the argument of getrefcount.
_UNUSED = 3


class Buffers:
    """Hands out an array again only when nothing refers to it any more, including views and torch tensors.

    So a batch that a user still holds is never overwritten, and users need not return arrays."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[tuple[int, ...], type[np.generic]], list[npt.NDArray[Any]]] = {}
        """The arrays by shape and type."""
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Returns an array of this shape. It is not cleared."""
        with self._lock:
            same_kind = self._arrays.setdefault((shape, dtype), [])
            for array in same_kind:
                if sys.getrefcount(array) == _UNUSED:
                    return array
            array = np.empty(shape, dtype)
            same_kind.append(array)
            return array

    def take_line(self, size: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Returns an array of `size` elements. It is a view of an array with one of a few lengths, so that other sizes
        can reuse the memory."""
        step = 1 << max(0, size.bit_length() - 3)  # up to a quarter too long
        return self.take((max(1, -(-size // step)) * step,), dtype)[:size]

    def idle_bytes(self) -> int:
        """Returns the bytes of unused arrays."""
        with self._lock:
            return sum(
                array.nbytes
                for same_kind in self._arrays.values()
                for array in same_kind
                if sys.getrefcount(array) == _UNUSED
            )

    def trim(self) -> None:
        """Frees unused arrays."""
        with self._lock:
            used = {
                kind: [array for array in same_kind if sys.getrefcount(array) > _UNUSED]
                for kind, same_kind in self._arrays.items()
            }
            self._arrays = {kind: arrays for kind, arrays in used.items() if arrays}
