"""Counts the work of a stage in counters that never fall: `StageCounters`. Each worker adds to them through a
`WorkerClock`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sluice.ingest.machine import core_wait_s
from sluice.ingest.stats import StageStats


class StageCounters:
    """Adds up the time that workers were busy or waiting since the start.

    It outlives the pools of its stage, because a pipeline makes new pools after an abandoned epoch."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self.name, self._clock = name, clock
        self._at = clock()
        self._busy = self._waiting = 0
        self._blocked = False
        self.items = self.rows = self.bytes = self.process_bytes = 0
        self.busy_s = self.cpu_s = self.core_wait_s = self.wait_input_s = self.wait_output_s = 0.0

    def change(self, *, busy: int = 0, waiting: int = 0, blocked: bool | None = None) -> None:
        """Notes that workers changed their state. `blocked`: they wait for space after the stage, not for input."""
        now = self._clock()
        elapsed, self._at = now - self._at, now
        self.busy_s += elapsed * self._busy
        if self._blocked:
            self.wait_output_s += elapsed * self._waiting
        else:
            self.wait_input_s += elapsed * self._waiting
        self._busy += busy
        self._waiting += waiting
        if blocked is not None:
            self._blocked = blocked

    def passed(self, rows: int, size: int) -> None:
        """Counts a finished item."""
        self.items += 1
        self.rows += rows
        self.bytes += size

    def stats(
        self, workers: int, backend: str, queue_bytes: int, queue_limit_bytes: int
    ) -> StageStats:
        self.change()
        return StageStats(
            name=self.name,
            items=self.items,
            rows=self.rows,
            bytes=self.bytes,
            busy_s=self.busy_s,
            cpu_s=self.cpu_s,
            core_wait_s=self.core_wait_s,
            wait_input_s=self.wait_input_s,
            wait_output_s=self.wait_output_s,
            workers=workers,
            backend=backend,
            queue_bytes=queue_bytes,
            queue_limit_bytes=queue_limit_bytes,
            process_bytes=self.process_bytes,
        )


class WorkerClock:
    """Measures one worker's time. Its waiting counts for its own stage. It may also work for other stages."""

    def __init__(self, tally: StageCounters, lock: threading.RLock):
        """`lock` guards all counters of a pipeline."""
        self._own = self._for = tally
        self._lock = lock
        self._cpu_s = self._core_wait_s = 0.0

    def begin(self) -> None:
        """Notes that the worker got an item."""
        with self._lock:
            self._own.change(waiting=-1, busy=1)
        self._cpu_s, self._core_wait_s = time.thread_time(), core_wait_s()

    def go_over(self, tally: StageCounters) -> None:
        """Counts the time from now on as work of that stage."""
        if tally is not self._for:
            self._turn(tally)

    def passed(self, tally: StageCounters, rows: int, size: int) -> None:
        """Counts a finished item of another stage."""
        with self._lock:
            tally.passed(rows, size)

    def end(self) -> None:
        """Notes that the worker waits again."""
        with self._lock:
            self._turn(self._own)
            self._own.change(waiting=1, busy=-1)

    def _turn(self, tally: StageCounters) -> None:
        cpu_s, waited_s = time.thread_time(), core_wait_s()
        with self._lock:
            self._for.cpu_s += cpu_s - self._cpu_s
            self._for.core_wait_s += waited_s - self._core_wait_s
            if tally is not self._for:
                self._for.change(busy=-1)
                tally.change(busy=1)
        self._for = tally
        self._cpu_s = cpu_s
        self._core_wait_s = waited_s
