"""The memory that a process uses before it loads, and how much more it may take: `ProcessMemory`."""

from __future__ import annotations

import pyarrow as pa

from sluice.ingest.machine import Machine, give_back
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Governor, MemoryReadings


class ProcessMemory:
    """The memory in use when this object is made, and the limit that leaves less: the user's or a control group's."""

    def __init__(self, machine: Machine, limit: int | None, buffers: Buffers):
        """`limit` is the user's. `buffers` are those of the pipeline, whose unused arrays can be freed."""
        self._machine, self._buffers = machine, buffers
        self.base = machine.memory_used()
        """The bytes in use at the start."""
        self._own_at_start = machine.memory_own()
        self.limit = machine.memory_limit(limit)
        self._group, self._group_at_start = machine.memory_group(), 0
        if (group := self._group) is not None:
            # The group may also have other processes, so its limit may leave less than the user's limit.
            charged = self._group_at_start = max(self.base, group.charged() or 0)
            if group.limit - charged < self.limit - self.base:
                self.limit, self.base = group.limit, charged

    def new_governor(self, minimum: int, parts: str = "", outside: int = 0) -> Governor:
        """Returns a governor for a run. `outside` is the memory of worker processes. `parts` explains the minimum."""
        governor = Governor(
            self.limit,
            minimum,
            self.base,
            MemoryReadings(
                used=lambda: self.base + self._growth(governor.outside),
                idle=self._buffers.idle_bytes,
                reclaim=self._reclaim,
                pressure=self._machine.memory_pressure,
                limit=self._machine.memory_limit,
            ),
            parts,
        )
        governor.hold(outside, outside=True)
        return governor

    def _growth(self, outside: int) -> int:
        """Returns how many bytes of memory this process has taken since the start.

        If its control group has grown more, without the memory of worker processes, returns that growth."""
        own = self._machine.memory_own() - self._own_at_start
        charged = None if self._group is None else self._group.charged()
        return own if charged is None else max(own, charged - self._group_at_start - outside)

    def _reclaim(self) -> None:
        """Returns freed memory to the system. The buffers, Arrow and the C library each keep some."""
        self._buffers.trim()
        pa.default_memory_pool().release_unused()
        give_back()
