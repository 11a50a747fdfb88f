"""Calls a function at intervals in a thread: `Ticker`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


class Ticker:
    """Calls `step()` in a thread until `step` returns False or the end is requested, and then `end()` once.

    The first call is immediate. Each next call comes `wait_s()` seconds after the one before it."""

    def __init__(
        self,
        name: str,
        wait_s: Callable[[], float],
        step: Callable[[], bool],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._wait_s = wait_s
        self._step = step
        self._end = end
        # To end, another thread releases this lock. An Event has a lock inside, which could block the garbage
        # collector.
        self._wake = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether the thread was started, and not stopped since."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if it runs already."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name} runs already")
        self._wake.acquire(blocking=False)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Asks for the end without waiting for it, or for any lock."""
        with suppress(RuntimeError):  # An earlier call has released the lock.
            self._wake.release()

    def stop(self) -> None:
        """Stops the calls, and returns when the thread has ended. It may be called twice, and without `start()`."""
        self.abandon()
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None

    def _run(self) -> None:
        while self._step() and not self._wake.acquire(timeout=self._wait_s()):
            pass
        self._end()
