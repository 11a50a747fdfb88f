"""Shared memory between this process and its workers: `Region`, and `Shelf`, which reuses regions.

A region is a memfd. It has no name, so the kernel frees it when its last owner dies, even by kill -9, and the size of
/dev/shm does not matter. Its pages are reserved at once (posix_fallocate), so missing memory raises an error there and
never causes a bus error later.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from sluice.ingest.knobs import format_bytes
from sluice.ingest.process import protocol

_numbers = itertools.count(1)


class SharedMemoryError(RuntimeError):
    """The kernel refused the shared memory that an item needs."""


class Region:
    """Shared memory that this process made. `fd` is sent to a worker once, and both sides map it."""

    def __init__(self, charge: Callable[[int], None]):
        """`charge` is called with the bytes that the region takes (+) or gives back (-)."""
        self.number = next(_numbers)
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


class Shelf:
    """Regions that carry items. One is lent out with each result and returns when the last array on it is gone."""

    def __init__(self, charge: Callable[[int], None], most_idle: int = 1):
        self._charge = charge
        self._most_idle = most_idle
        # Garbage collection returns regions at any moment, perhaps while this very thread holds a lock: appending to
        # a deque needs none.
        self._idle: deque[Region] = deque()
        self._all: dict[int, Region] = {}

    def take(self) -> Region:
        """Returns an idle region, or a new one. Closes idle regions beyond the number of spares."""
        while len(self._idle) > self._most_idle:
            self._drop(self._idle.popleft())
        region = self._idle.pop() if self._idle else Region(self._charge)
        self._all[region.number] = region
        return region

    def lend(self, region: Region) -> protocol.Array:
        """Returns the region's bytes. When the last array on them is gone, the region is idle again."""
        data = region.bytes()
        weakref.finalize(data, self._idle.append, region).atexit = False
        return data

    def give_back(self, region: Region) -> None:
        """Puts a taken region back that holds no result."""
        self._idle.append(region)

    @property
    def bytes(self) -> int:
        return sum(region.size for region in list(self._all.values()))

    def numbers(self) -> list[int]:
        """Returns the numbers of all existing regions. A worker closes all others."""
        return list(self._all)

    def close(self) -> None:
        """Closes all regions. Arrays in use keep their memory, but it is no longer counted."""
        for region in list(self._all.values()):
            self._drop(region)
        self._idle.clear()

    def _drop(self, region: Region) -> None:
        del self._all[region.number]
        region.close()
