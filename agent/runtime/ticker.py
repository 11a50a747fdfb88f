"""Calls a function at intervals in a thread: `Ticker`."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ticker:
    """Calls `step()` in a thread until `step` returns False or `stop()` is called.

    The first call is immediate. Each next call comes `wait_s()` seconds after the one before it."""

    def __init__(self, name: str, wait_s: Callable[[], float], step: Callable[[], bool]) -> None:
        self._name = name
        self._wait_s = wait_s
        self._step = step
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if it runs already."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name} runs already")
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the calls, and returns when the thread has ended. It may be called twice, and without `start()`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while self._step() and not self._stop.wait(self._wait_s()):
            pass
