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

_LOOK_S = 0.05
_PATIENCE_S = 0.25
_PRESSURE_S = 1.0
_FADES = 0.95  # share of the peak overhead that remains after each measurement
_MARGIN = 16  # early work leaves 1/16 of the limit free, because measurements come a little late
_STARTS = 256  # memory at start may vary by 1/256 between runs, so that a printed minimum suffices
_PRESSED = 20.0  # per cent of the time waiting for memory, above which early work stops


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
    """The memory account of a whole pipeline. Its lock is the pipeline's: pools wait on conditions of it."""

    def __init__(
        self,
        limit: int,
        minimum: int,
        base: int = 0,
        senses: MemoryReadings | None = None,
        parts: str = "",
    ):
        """`base` is what the process held before. `parts` explains the minimum in messages."""
        if base - base // _STARTS + minimum > limit:
            needs = f"loading needs {format_bytes(minimum)}" + (f" ({parts})" if parts else "")
            raise MemoryLimitError(
                f"memory limit {format_bytes(limit)} is too small: {format_bytes(base)} are in use before loading, and "
                f"{needs}; take at least {base + minimum} bytes ({format_bytes(base + minimum)}), files with "
                "smaller row groups, or smaller windows (--window-rows; in Python Order(window_rows=…))"
            )
        self.lock = threading.RLock()
        self.limit = limit
        self.minimum = minimum
        self.base = base
        self.reasons: Counter[str] = Counter()
        """How often work was held back, by reason: `limit` or `pressure`."""
        self.overhead = 0
        """A recent peak of the bytes in use that are not charged."""
        self._senses = senses or MemoryReadings()
        self._charged = self._early = self._shared = self._outside = self._due_most = 0
        self._waiting: list[threading.Condition] = []
        self._pressed = self._held_for_one = False
        self._one = threading.Lock()
        self._looked = self._felt = float("-inf")
        self._own = threading.local()

    @property
    def charged(self) -> int:
        """The bytes that work in the pipeline holds now."""
        return self._charged

    @property
    def held(self) -> int:
        """The bytes of worker processes and of the memory that they share with this one."""
        return self._shared + self._outside

    @property
    def outside(self) -> int:
        """The bytes that only worker processes use."""
        return self._outside

    @property
    def held_back(self) -> int:
        """How many times work had to wait for memory."""
        return self.reasons.total()

    def admit(self, size: int, due: bool) -> Charge | None:
        """Returns a charge of `size` bytes, or None if the work has to wait. Call it with the lock held."""
        self._look()
        tight = size > self._room() and not self._reclaim(size)
        if not due and (tight or self._pressed or self._held_for_one):
            return None
        charge = Charge(self, 0, early=not due)
        self.move(charge, size)
        return charge

    def hold(self, change: int, outside: bool = False) -> None:
        """Notes memory of worker processes, taken (+) or given back (-): memory that they share with this process, or
        their own if `outside`."""
        with self.lock:
            if outside:
                self._outside += change
            else:
                self._shared += change
            if change < 0:
                self._wake()

    @contextmanager
    def run_alone(self) -> Iterator[int]:
        """A context for one holder at a time, in which no early work begins. It frees unused memory and yields the
        number of free bytes."""
        with self._one:
            with self.lock:
                self._held_for_one = True
                self._senses.reclaim()
            try:
                yield max(0, self.limit - self.base - self._charged - self.held - self._overhead())
            finally:
                with self.lock:
                    self._held_for_one = False
                    self._wake()

    def wait_on(self, condition: threading.Condition, again: bool) -> None:
        """Waits until memory is released, `condition` is notified, or a short time has passed, because memory may
        become free outside the account. `again`: the wait is for the same work as before."""
        if not again:
            self.reasons["pressure" if self._pressed else "limit"] += 1
        self._waiting.append(condition)
        try:
            condition.wait(_PATIENCE_S)
        finally:
            self._waiting.remove(condition)

    def move(self, charge: Charge, size: int) -> None:
        with self.lock:
            change = size - charge.bytes
            charge.bytes = size
            self._charged += change
            if charge.early:
                self._early += change
            else:  # due work may exceed the plan, because a transform may enlarge its rows
                self._due_most = max(self._due_most, self._charged - self._early)
            if change < 0:
                self._wake()

    def _wake(self) -> None:
        for condition in self._waiting:
            condition.notify_all()

    def _room(self) -> int:
        """The bytes that early work may still take."""
        taken = (
            self.base + max(self.minimum, self._due_most) + self._early + self.held + self.overhead
        )
        return self.limit - self.limit // _MARGIN - taken - self._senses.idle()

    def _look(self) -> None:
        """Updates the overhead and the pressure if the last update is long enough ago."""
        now = self._senses.clock()
        if now >= self._looked + _LOOK_S:
            self._looked = now
            self.overhead = max(self._overhead(), int(self.overhead * _FADES))
        if now >= self._felt + _PRESSURE_S:
            self._felt = now
            self._pressed = self._senses.pressure() > _PRESSED

    def _overhead(self) -> int:
        return max(
            0, self._senses.used() - self.base - self._charged - self._shared - self._senses.idle()
        )

    def _reclaim(self, size: int) -> bool:
        """Frees unused memory, unless this thread did so a moment ago. Returns whether `size` bytes fit then.

        Each thread does this for itself, because some allocators only free the memory of the calling thread."""
        now = self._senses.clock()
        if now < getattr(self._own, "reclaimed", float("-inf")) + _LOOK_S:
            return False
        self._own.reclaimed = now
        before = self._overhead()
        self._senses.reclaim()
        after = self._overhead()
        self.overhead = max(after, self.overhead - max(0, before - after))
        return size <= self._room()
