"""Shared memory between this process and a worker: `Region`.

A region is a memfd. It has no name, so the kernel frees it when its last owner dies, even by kill -9, and the size of
/dev/shm does not matter. Its pages are reserved at once (posix_fallocate), so missing memory raises an error there and
never causes a bus error later.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from sluice.ingest.knobs import format_bytes
from sluice.ingest.process import protocol


class SharedMemoryError(RuntimeError):
    """The kernel refused the shared memory that an item needs."""


class Region:
    """Shared memory that this process made. A worker gets `fd` at its start, and both sides map it."""

    def __init__(self, charge: Callable[[int], None]):
        """`charge` is called with the bytes that the region takes (+) or gives back (-)."""
        self.fd = os.memfd_create("sluice", os.MFD_CLOEXEC)
        self.size = 0
        self._map: mmap.mmap | None = None
        self._charge = charge

    def reserve(self, size: int) -> None:
        """Grows the region to at least `size` bytes. Keeps its content."""
        if size > self.size:
            try:
                protocol.grow(self.fd, size)
            except OSError as error:
                raise self.refusal(size, str(error.strerror)) from error
            self.measure()

    def measure(self) -> None:
        """Charges and maps what the region has grown by, here or in a worker."""
        size = os.fstat(self.fd).st_size
        if size != self.size:
            self._charge(size - self.size)
            self.size = size
            self._map = mmap.mmap(self.fd, size)

    def refusal(self, size: int, why: str) -> SharedMemoryError:
        """Returns the error for `size` bytes that could not be reserved, and gives back what was."""
        os.ftruncate(self.fd, self.size)
        return SharedMemoryError(
            f"no shared memory for {format_bytes(size)} ({why}): raise the container's or the user's memory limit, "
            "make row groups or batches smaller, or run this transform with backend=thread"
        )

    def bytes(self) -> protocol.Array:
        """Returns all bytes of the region, as an array that keeps the mapping alive."""
        assert self._map is not None, "reserve() comes first"
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Closes the region. Its arrays stay readable, and the memory is freed with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self._charge(-self.size)
            self.fd = -1
            self.size = 0
            self._map = None
