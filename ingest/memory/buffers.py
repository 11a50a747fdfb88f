"""`Buffers` reuses arrays, because page faults on new memory cost more than filling it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


class _Lease:
    """Ends when nothing refers to an array any more. It is the object at which numpy's chain of `base` ends. So each
    view of the array keeps it: slices of slices, torch tensors, Arrow buffers and DLPack capsules."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: npt.NDArray[Any], interface: Mapping[str, Any]):
        self._memory = memory  # it may be needed for longer than the `Buffers`
        self.__array_interface__ = interface


class _Memory:
    """Memory for one array at a time, of one shape and type."""

    __slots__ = ("_array", "_interface", "_lease", "nbytes")

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic]):
        self._array = np.empty(shape, dtype)
        self._interface = (
            self._array.__array_interface__
        )  # made once, because it costs as much as the rest
        self._lease: weakref.ref[_Lease] | None = None
        self.nbytes = self._array.nbytes

    def is_used(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def lend(self) -> npt.NDArray[Any]:
        lease = _Lease(self._array, self._interface)
        self._lease = weakref.ref(lease)
        return np.asarray(lease)


class Buffers:
    """Hands out an array again only when nothing refers to it any more, including views and torch tensors.

    So a batch that a user still holds is never overwritten, and users need not return arrays. It counts no references,
    because each release of Python may count them differently."""

    def __init__(self) -> None:
        self._memory: dict[tuple[tuple[int, ...], type[np.generic]], list[_Memory]] = {}
        """The memory by an array's shape and type."""
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Returns an array of this shape. It is not cleared."""
        with self._lock:
            same_kind = self._memory.setdefault((shape, dtype), [])
            for memory in same_kind:
                if not memory.is_used():
                    return memory.lend()
            same_kind.append(memory := _Memory(shape, dtype))
            return memory.lend()

    def take_line(self, size: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Returns an array of `size` elements. It is a view of an array with one of a few lengths, so that other sizes
        can reuse the memory."""
        step = 1 << max(0, size.bit_length() - 3)  # up to a quarter too long
        return self.take((max(1, -(-size // step)) * step,), dtype)[:size]

    def idle_bytes(self) -> int:
        """Returns the bytes of unused arrays."""
        with self._lock:
            return sum(
                memory.nbytes
                for same_kind in self._memory.values()
                for memory in same_kind
                if not memory.is_used()
            )

    def trim(self) -> None:
        """Frees unused arrays."""
        with self._lock:
            used = {
                kind: [memory for memory in same_kind if memory.is_used()]
                for kind, same_kind in self._memory.items()
            }
            self._memory = {kind: memory for kind, memory in used.items() if memory}
