"""`--inject` for a running loader: `Injection` causes faults when they are due, in its own thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sluice.ingest.faults.core_limit import CoreShare
from sluice.ingest.faults.faults import (
    Fault,
    Injector,
    corrupt_read,
    share_cores,
    signal_workers,
    slow_store,
    slow_transforms,
    spike_memory,
    stall_store,
)
from sluice.ingest.read.files import FileOpener

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader

_LOOK_S, _SPIKE_S = 0.05, 5.0
ON_STORES = frozenset({"stall-store", "slow-store", "corrupt"})
"""The faults that need `FileOpener(disturbed=…)`."""


class Injection:
    """A context in which faults are injected. `record` gets an event for each fault."""

    def __init__(
        self,
        faults: Sequence[Fault],
        loader: BatchLoader,
        files: FileOpener,
        record: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        launcher: int | None = None,
    ):
        """All processes of one `launcher` share the cores."""
        self._timers: list[threading.Timer] = []
        self._share = CoreShare(launcher=launcher)
        self.injector = Injector(
            faults,
            {
                "kill-worker": signal_workers(lambda: loader.worker_pids, signal.SIGKILL),
                "stop-worker": signal_workers(lambda: loader.worker_pids, signal.SIGSTOP),
                "kill-remote": signal_workers(lambda: loader.remote_pids, signal.SIGKILL),
                "stall-store": stall_store(files.faults.stall),
                "slow-store": slow_store(files.faults.slow),
                "corrupt": corrupt_read(files.faults.corrupt),
                "slow-transform": slow_transforms(loader.burden),
                "cores": share_cores(self._share.set),
                "memory-spike": spike_memory(self._later),
            },
            clock=clock,
            record=record,
            epochs=lambda: loader.epochs_loaded,
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-inject", daemon=True)

    def __enter__(self) -> Injection:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.give_back()
        for timer in self._timers:
            timer.cancel()
            timer.function()
            timer.join()

    def give_back(self) -> None:
        """Removes the limit on cores, which would outlast this process."""
        self._share.restore()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.injector.step()

    def _later(self, end: Callable[[], None]) -> None:
        timer = threading.Timer(_SPIKE_S, end)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()
