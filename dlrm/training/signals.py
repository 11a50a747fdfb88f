"""Receives signals: `StopSignals`.

Python runs a signal's handler only after the main thread has returned from C code, for example from a collective. A
small thread sees each signal at once.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from operator import itemgetter

from sluice.ingest.process.stacks import tell

_GRACE_S = 1.0  # torchrun itself takes some of the two seconds


class StopSignals:
    """A context around training. SIGTERM sets `stop`: the run saves a checkpoint and ends."""

    def __init__(
        self,
        *,
        preempt_s: float = 20.0,
        too_late: Callable[[], None] = lambda: None,
    ) -> None:
        """`too_late` is called `preempt_s` seconds after SIGTERM, unless `saved` is set by then."""
        self.stop = threading.Event()
        self.preempted = threading.Event()
        """Set by SIGTERM, while `stop` is also set by the run itself."""
        self.saved = threading.Event()
        """Set by the run while all that it has trained is saved."""
        self.workers: Callable[[], str] = str
        """Returns the stacks of worker processes, for SIGUSR1."""
        self.end_wait: Callable[[], None] = lambda: None
        """Called a second after SIGTERM. It ends a wait of the main thread."""
        self._preempt_s = preempt_s
        self._too_late = too_late
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-watch", daemon=True)

    def __enter__(self) -> StopSignals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # The thread answers both signals, because the main thread may hang.
        self._sigterm_before = signal.signal(signal.SIGTERM, lambda *_: None)
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
        """Returns the current stacks of the worker processes."""
        return self.workers()

    def _run(self) -> None:
        due: list[tuple[float, Callable[[], None]]] = []
        while not self._ended.is_set():
            wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
            if not select.select([self._read], [], [], wait_s)[0]:
                due.pop(0)[1]()
                continue
            signals = os.read(self._read, 64)
            if signal.SIGUSR1 in signals:
                tell(self.workers)
            if signal.SIGTERM in signals and not self.preempted.is_set():
                self.preempted.set()
                self.stop.set()
                now = time.monotonic()
                both = (now + _GRACE_S, self.end_wait), (now + self._preempt_s, self._give_up)
                due = sorted(both, key=itemgetter(0))
            if signal.SIGINT in signals and self._wakeup_before >= 0:
                os.write(self._wakeup_before, signals)  # `sluice.common.program` ends the process

    def _give_up(self) -> None:
        if not self.saved.is_set():
            self._too_late()
