"""Observes how long Python's interpreter lock is held: `LockProbe`, one thread a process.

The thread sleeps for a moment and then needs the lock. If another thread holds it, the probe is late: by the switch
interval of Python if that thread runs Python code, and hardly if it runs numpy or reads a file. `PROBE` is the
process's own.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable

from sluice.ingest.machine import core_wait_s

QUICK_S, SLOW_S = 0.004, 0.1
"""Seconds between two samples at the start, and later. A sample takes some 80 µs of a core, mostly in the kernel."""
_LATE_S = 0.001
"""A sample that is less late shows the kernel's own delay, and no lock."""
# In the first samples, imports and compilers hold the lock. They do not count.
_START_SAMPLES, _QUICK_SAMPLES = 32, 250


def has_lock() -> bool:
    """Whether this interpreter has the lock. A free-threaded build has none."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class LockProbe:
    """Counts the seconds for which other threads held the lock when the probe needed it.

    The thread runs while somebody that called `enter` lives and has not called `leave`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        core_wait_s: Callable[[], float] = core_wait_s,
    ) -> None:
        self._clock, self._sleep, self._core_wait_s = clock, sleep, core_wait_s
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._lock = (
            threading.RLock()
        )  # the collector may end an epoch, which calls `leave`, at any moment
        self._runs = False
        self._samples = 0
        self.held_s = 0.0

    def enter(self, user: object) -> None:
        with self._lock:
            self._users.add(user)
            self._samples = 0
            starts = not self._runs
            self._runs = True
        if (
            starts
        ):  # without the lock, because the collector may call `leave` in the thread that starts
            threading.Thread(target=self._run, name="sluice-lock-probe", daemon=True).start()

    def leave(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)

    def _run(self) -> None:
        while True:
            self.take_sample()
            with self._lock:
                self._runs = bool(self._users)
                if not self._runs:
                    return

    def take_sample(self) -> None:
        """Sleeps and adds what that shows. If the sample is late by one switch interval, the lock was held."""
        sleep_s = QUICK_S if self._samples < _QUICK_SAMPLES else SLOW_S
        self._samples += 1
        began, waited_s = self._clock(), self._core_wait_s()
        self._sleep(sleep_s)
        passed_s = self._clock() - began
        late_s = passed_s - sleep_s
        if late_s > _LATE_S and self._samples > _START_SAMPLES and has_lock():
            late_s -= self._core_wait_s() - waited_s
            self.held_s += passed_s * min(1.0, max(0.0, late_s) / sys.getswitchinterval())


PROBE = LockProbe()
