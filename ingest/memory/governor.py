"""Admits work within a memory limit: `Governor`, with a `Charge` for the memory of each piece of work.

Deadlock is impossible. Work is *due* when everything before it in its stage has left. Due work is always admitted,
because done one after the other it never needs more than `minimum`. All other work is *early*. It is admitted only into
what the limit leaves above the minimum.

A process uses more memory than is charged: allocators keep freed memory, decoding needs more than its result, a
trainer builds its model. So the governor regularly measures the process. The difference is the overhead, and a recent
peak of it is kept free too.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sluice.common.errors import UsageError
from sluice.ingest.knobs import format_bytes

_MEASURE_EVERY_S = 0.05
_LONGEST_WAIT_S = 0.25
_PRESSURE_EVERY_S = 1.0
_OVERHEAD_DECAY = 0.95  # the share of the peak overhead that is kept after each measurement
_FREE_PARTS = 16  # early work leaves 1/16 of the limit free, because measurements lag behind
# A limit may be 1/256 of the start memory too small, because that varies between runs.
_START_TOLERANCE = 256
# Early work stops if something waits for memory in more than 20 % of the time.
_PRESSURE_LIMIT = 20.0


class MemoryLimitError(UsageError):
    """A memory limit is below what the plan needs. The message holds a sufficient number."""


@dataclass(frozen=True, kw_only=True)
class MemoryReadings:
    """How a governor measures and frees memory of its process. The defaults do nothing."""

    used: Callable[[], int] = lambda: 0
    """Returns the bytes of this process alone, including shared memory."""
    idle: Callable[[], int] = lambda: 0
    """Returns the bytes of unused buffers."""
    reclaim: Callable[[], None] = lambda: None
    """Frees unused memory."""
    pressure: Callable[[], float] = lambda: 0.0
    """Returns the per cent of the recent time in which something waited for memory."""
    clock: Callable[[], float] = time.monotonic
    limit: Callable[[], int] = lambda: 2**62
    """Returns the limit of the control groups, which may change during a run."""


class Charge:
    """The bytes that one piece of work holds until `release`."""

    __slots__ = ("_governor", "bytes", "early")

    def __init__(self, governor: Governor, size: int, early: bool):
        self._governor = governor
        self.bytes = size
        self.early = early

    def correct(self, size: int) -> None:
        """Changes the charge from what was reserved to the actual `size`."""
        self._governor.move(self, size)

    def release(self) -> None:
        self._governor.move(self, 0)


class Governor:
    """Accounts for the memory of a pipeline and admits its work. All pools of the pipeline share its lock."""

    def __init__(
        self,
        limit: int,
        minimum: int,
        base: int = 0,
        readings: MemoryReadings | None = None,
        parts: str = "",
    ):
        """`base` is what the process held before. `parts` explains the minimum in messages."""
        if base - base // _START_TOLERANCE + minimum > limit:
            needs = f"loading needs {format_bytes(minimum)}" + (f" ({parts})" if parts else "")
            raise MemoryLimitError(
                f"memory limit {format_bytes(limit)} is too small: {format_bytes(base)} are in use before loading, and "
                f"{needs}; take at least {base + minimum} bytes ({format_bytes(base + minimum)}), files with "
                "smaller row groups, or smaller windows (--window-rows; in Python Order(window_rows=…))"
            )
        self.lock = threading.RLock()
        self.limit = self._limit_at_start = limit
        self.minimum = minimum
        self.base = base
        self.reasons: Counter[str] = Counter()
        """How often work was held back, by reason: `limit` or `pressure`."""
        self.overhead = 0
        """A recent peak of the bytes in use that are not charged."""
        self._readings = readings or MemoryReadings()
        self.charged = 0
        """The bytes that work in the pipeline holds now."""
        self.outside = 0
        """The bytes that only worker processes use."""
        self._early = self._shared = self._largest_due = 0
        self._waiting: list[threading.Condition] = []
        self._under_pressure = self._one_runs_alone = False
        self._alone_lock = threading.Lock()
        self._measured_at = self._pressure_at = float("-inf")
        self._thread = threading.local()

    @property
    def held(self) -> int:
        """The bytes that worker processes use, alone or shared with this process."""
        return self._shared + self.outside

    @property
    def free(self) -> int:
        """The bytes that work in advance, or another worker process, may take now."""
        with self.lock:
            return max(0, self._free_for_early())

    def admit(self, size: int, due: bool) -> Charge | None:
        """Returns a charge of `size` bytes, or None if the work has to wait. Call it with the lock held."""
        self._measure()
        tight = size > self._free_for_early() and not self._reclaim(size)
        if not due and (tight or self._under_pressure or self._one_runs_alone):
            return None
        charge = Charge(self, 0, early=not due)
        self.move(charge, size)
        return charge

    def hold(self, change: int, outside: bool = False) -> None:
        """Notes memory that worker processes take (+) or give back (-). `outside`: their own memory, otherwise memory
        that they share with this process."""
        with self.lock:
            if outside:
                self.outside += change
            else:
                self._shared += change
            if change < 0:
                self._wake()

    @contextmanager
    def run_alone(self) -> Iterator[int]:
        """Returns a context in which no early work starts. One thread at a time can have it. It frees unused memory and
        yields the number of free bytes."""
        with self._alone_lock:
            with self.lock:
                self._one_runs_alone = True
                self._readings.reclaim()
            try:
                yield max(0, self.limit - self.base - self.charged - self.held - self._overhead())
            finally:
                with self.lock:
                    self._one_runs_alone = False
                    self._wake()

    def wait_on(self, condition: threading.Condition, again: bool) -> None:
        """Waits until memory is released, `condition` is notified, or `_LONGEST_WAIT_S` has passed, because other
        programs may free memory. `again`: the wait is for the same work as before, so it is not counted again."""
        if not again:
            self.reasons["pressure" if self._under_pressure else "limit"] += 1
        self._waiting.append(condition)
        try:
            condition.wait(_LONGEST_WAIT_S)
        finally:
            self._waiting.remove(condition)

    def move(self, charge: Charge, size: int) -> None:
        with self.lock:
            change = size - charge.bytes
            charge.bytes = size
            self.charged += change
            if charge.early:
                self._early += change
            else:  # due work may exceed the plan, because a transform may enlarge its rows
                self._largest_due = max(self._largest_due, self.charged - self._early)
            if change < 0:
                self._wake()

    def _wake(self) -> None:
        for condition in self._waiting:
            condition.notify_all()

    def _free_for_early(self) -> int:
        """Returns the bytes that early work may still take."""
        taken = (
            self.base
            + max(self.minimum, self._largest_due)
            + self._early
            + self.held
            + self.overhead
        )
        return self.limit - self.limit // _FREE_PARTS - taken - self._readings.idle()

    def _measure(self) -> None:
        """Measures the overhead and the pressure, unless the last measurement is recent."""
        now = self._readings.clock()
        if now >= self._measured_at + _MEASURE_EVERY_S:
            self._measured_at = now
            self.limit = min(self._limit_at_start, self._readings.limit())
            self.overhead = max(self._overhead(), int(self.overhead * _OVERHEAD_DECAY))
        if now >= self._pressure_at + _PRESSURE_EVERY_S:
            self._pressure_at = now
            self._under_pressure = self._readings.pressure() > _PRESSURE_LIMIT

    def _overhead(self) -> int:
        return max(
            0,
            self._readings.used() - self.base - self.charged - self._shared - self._readings.idle(),
        )

    def _reclaim(self, size: int) -> bool:
        """Frees unused memory, unless this thread did so a moment ago. Returns whether `size` bytes fit afterwards.

        Each thread does this for itself, because some allocators only free the memory of the calling thread."""
        now = self._readings.clock()
        if now < getattr(self._thread, "reclaimed", float("-inf")) + _MEASURE_EVERY_S:
            return False
        self._thread.reclaimed = now
        before = self._overhead()
        self._readings.reclaim()
        after = self._overhead()
        self.overhead = max(after, self.overhead - max(0, before - after))
        return size <= self._free_for_early()
