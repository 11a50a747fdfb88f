"""Counts the work of a stage in counters that never fall: `StageCounters`. Each worker counts its time through a
`WorkerClock`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sluice.ingest.machine import core_wait_s
from sluice.ingest.stats import STAGE_COUNTERS, Durations, StageStats

_ASK_S = 0.05
"""A worker asks for its waits for a core at most this often."""


class StageCounters:
    """Adds up the time that workers were busy or waiting since the start.

    It outlives the pools of its stage, because a pipeline makes new pools after an abandoned epoch."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self.name = name
        self._clock = clock
        self._at = clock()
        # The lock of a pool would not do: a pipeline also reads the counters of a stage that has no pool at the moment.
        self._lock = threading.RLock()
        self._busy = self._waiting = 0
        self._blocked = 0
        self.durations = Durations()
        self.items = self.rows = self.bytes = self.process_bytes = 0
        self.busy_s = self.finished_s = self.cpu_s = self.core_wait_s = 0.0
        self.wait_input_s = self.wait_output_s = 0.0

    def change(self, *, busy: int = 0, waiting: int = 0, blocked: int = 0) -> None:
        """Notes that workers changed their state. While one is `blocked`, all that wait do so for space after the
        stage, not for input."""
        with self._lock:
            now = self._clock()
            elapsed = now - self._at
            self._at = now
            self.busy_s += elapsed * self._busy
            if self._blocked:
                self.wait_output_s += elapsed * self._waiting
            else:
                self.wait_input_s += elapsed * self._waiting
            self._busy += busy
            self._waiting += waiting
            self._blocked += blocked

    def passed(self, rows: int, size: int) -> None:
        """Counts a finished item."""
        self.items += 1
        self.rows += rows
        self.bytes += size

    def stats(self, **now: Any) -> StageStats:
        """Returns the counters, with what a stage has `now`."""
        self.change()
        return StageStats(
            name=self.name,
            process_bytes=self.process_bytes,
            **now,
            **{name: getattr(self, name) for name in STAGE_COUNTERS},
        )


class WorkerClock:
    """Measures one worker's time at the items of its stage.

    To ask the kernel how long a thread has waited for a core gives the interpreter's lock away. So only some items are
    asked about. The share that the last of these has waited is taken for the others."""

    def __init__(self, stage: StageCounters):
        self._stage = stage
        self._cpu_s = self._core_wait_s = self._began = self._asked = self._share = 0.0

    def begin(self) -> None:
        """Notes that the worker got an item."""
        self._stage.change(waiting=-1, busy=1)
        self._began = time.monotonic()
        self._cpu_s = time.thread_time()
        self._asks = self._began >= self._asked + _ASK_S
        if self._asks:
            self._asked = self._began
            self._core_wait_s = core_wait_s()

    def end(self, is_item: bool = True) -> None:
        """Adds the time of the item, and notes that the worker waits again. The caller has the lock of the pool. Time
        that is for several items is no item's duration (`is_item`)."""
        cpu_s = time.thread_time()
        elapsed = time.monotonic() - self._began
        if self._asks:
            self._share = (core_wait_s() - self._core_wait_s) / (elapsed or 1)
        stage = self._stage
        if is_item:
            stage.durations.add(elapsed)
        stage.finished_s += elapsed
        stage.cpu_s += cpu_s - self._cpu_s
        stage.core_wait_s += self._share * elapsed
        stage.change(waiting=1, busy=-1)
