"""What reaches a rank from outside: signals, and the reason why another rank ended.

Python runs a signal's handler only when the main thread is back from C, and that may sit in a collective. A small
thread sees the signal at once, so that an interrupt is answered in time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from sluice.ingest.process.stacks import tell

_GRACE_S = 1.0  # torchrun itself takes some of the two seconds
_INTERRUPTED = 130
_FAULT = "sluice/fault"


class StopSignals:
    """A context around training. `stop` is set once SIGTERM has asked the run to save and end."""

    def __init__(self, store: Any, rank: int, *, leave: Callable[[int], None] = os._exit) -> None:
        self.stop = threading.Event()
        self.workers: Callable[[], str] = str
        """Returns the stacks of worker processes, for SIGUSR1."""
        self.end_wait: Callable[[], None] = lambda: None
        """Called a while after SIGTERM, to end the wait that the main thread may still be in."""
        self._store = store.clone()
        self._rank = rank
        self._leave = leave
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-watch", daemon=True)

    def __enter__(self) -> StopSignals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._sigterm_before = signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        # The thread does what SIGUSR1 asks for, as the main one may hang.
        self._sigusr1_before = signal.signal(signal.SIGUSR1, lambda *_: None)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._sigterm_before)
        signal.signal(signal.SIGUSR1, self._sigusr1_before)
        signal.set_wakeup_fd(self._wakeup_before)
        self._ended.set()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def worker_stacks(self) -> str:
        """The stacks of the worker processes: what they do now."""
        return self.workers()

    def report_error(self, text: str) -> None:
        """Tells the other ranks why this one ends, before its connections close. Only the first rank's reason
        counts."""
        if not self._store.check([_FAULT]):
            self._store.set(_FAULT, f"rank {self._rank}: {text}")

    def other_ranks_error(self) -> str | None:
        """The reason why another rank ended, if one has given it."""
        return self._store.get(_FAULT).decode() if self._store.check([_FAULT]) else None

    def _run(self) -> None:
        while not self._ended.is_set():
            signals = os.read(self._read, 64)
            if signal.SIGUSR1 in signals:
                tell(self.workers)
            if signal.SIGTERM in signals:
                self.stop.set()
                if not self._ended.wait(_GRACE_S):
                    self.end_wait()
            if signal.SIGINT in signals and not self._ended.wait(_GRACE_S):
                self._leave(_INTERRUPTED)
