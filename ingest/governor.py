"""Admits work against a memory limit: `Governor`, with a `Charge` for what each piece of work holds.

Deadlock is impossible by construction. Work that is *due* (everything before it in its stage has left) is always
admitted: done one after the other, due work never needs more than `minimum`. All other work is early, and early work
is admitted only into what the limit leaves above that minimum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ingest.knobs import format_bytes


class MemoryLimitError(ValueError):
    """A memory limit below what the plan needs: its message holds the number that would do."""


class Charge:
    """Bytes that one piece of work holds until `release`."""

    __slots__ = ("_governor", "bytes", "early")

    def __init__(self, governor: Governor, size: int, early: bool):
        self._governor, self.bytes, self.early = governor, size, early

    def correct(self, size: int) -> None:
        """What was reserved turns out to be `size`."""
        self._governor.move(self, size)

    def release(self) -> None:
        self._governor.move(self, 0)


class Governor:
    """One account for a whole pipeline. Its lock is the pipeline's: pools wait on conditions of it."""

    def __init__(self, limit: int, minimum: int, base: int = 0, idle: Callable[[], int] = lambda: 0,
                 reclaim: Callable[[], None] = lambda: None):
        """`base` is what the process held before; `idle` tells what lies about unused, `reclaim` gives it back."""
        if base + minimum > limit:
            raise MemoryLimitError(
                f"memory limit {format_bytes(limit)} is too small: {format_bytes(base)} are in use before loading, and "
                f"the windows and one batch need {format_bytes(minimum)}; take at least {base + minimum} bytes "
                f"({format_bytes(base + minimum)}), smaller windows (window_rows) or fewer streams")
        self.lock = threading.RLock()
        self.limit, self.minimum, self.base = limit, minimum, base
        self.held_back = 0
        self._idle, self._reclaim = idle, reclaim
        self._charged = self._early = self._held = 0
        self._waiting: list[threading.Condition] = []

    @property
    def charged(self) -> int:
        """Bytes that work in the pipeline holds now."""
        return self._charged

    @property
    def held(self) -> int:
        """Bytes of worker processes, and of what they share with us."""
        return self._held

    def admit(self, size: int, due: bool) -> Charge | None:
        """A charge of `size` bytes, or None if the work has to wait. Call it with the lock held."""
        if not due:
            room = self.limit - self.base - self.minimum - self._early - self._held
            if size > room - self._idle():
                self._reclaim()
            if size > room - self._idle():
                return None
        charge = Charge(self, 0, early=not due)
        self.move(charge, size)
        return charge

    def hold(self, change: int) -> None:
        """Memory besides the work's own, taken (+) or given back (-): worker processes and what they share with us."""
        with self.lock:
            self._held += change
            if change < 0:
                self._wake()

    def wait_on(self, condition: threading.Condition, again: bool) -> None:
        """Waits until something is released, or `condition` is notified for another reason. `again`: for the same
        work as before."""
        self.held_back += not again
        self._waiting.append(condition)
        try:
            condition.wait()
        finally:
            self._waiting.remove(condition)

    def move(self, charge: Charge, size: int) -> None:
        with self.lock:
            change = size - charge.bytes
            charge.bytes = size
            self._charged += change
            if charge.early:
                self._early += change
            if change < 0:
                self._wake()

    def _wake(self) -> None:
        for condition in self._waiting:
            condition.notify_all()
