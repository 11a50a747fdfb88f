"""Causes the faults of `--inject` in a running loader, in a thread of its own: `Injection`.

It records each fault, because a test in which no fault happened shows nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from sluice.ingest.faults.faults import Fault, due
from sluice.ingest.machine import Machine
from sluice.ingest.read.files import FileOpener

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader

_LOOK_S = 0.05
ON_STORES = frozenset({"stall-store", "slow-store", "corrupt"})
"""The faults that need `FileOpener(disturbed=…)`."""


class Injection:
    """A context in which faults are caused when they are due. `record` gets an event for each fault."""

    def __init__(
        self,
        faults: Sequence[Fault],
        loader: BatchLoader,
        files: FileOpener,
        record: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._faults = tuple(faults)
        self._loader, self._files, self._record, self._clock = loader, files, record, clock
        self._began = clock()
        self._done: set[int] = set()
        self._cores = os.sched_getaffinity(0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-inject", daemon=True)

    def __enter__(self) -> Injection:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if any(self._faults[number].kind == "cores" for number in self._done):
            pin(Machine().tree(), self._cores)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.step()

    def step(self) -> None:
        """Causes the faults that are due."""
        elapsed, percent = self._clock() - self._began, 100 * self._loader.epochs_loaded
        for number in due(self._faults, elapsed, percent, self._done):
            fault = self._faults[number]
            did = self._cause(fault)
            if did is not None:
                self._done.add(number)
                self._record({"kind": "fault", "fault": str(fault), "did": did})

    @property
    def outcome(self) -> dict[str, list[str]]:
        """The faults that happened, and those that were missed, because the run was too short or had nothing to
        harm."""
        faults: dict[str, list[str]] = {"happened": [], "missed": []}
        for number, fault in enumerate(self._faults):
            faults["happened" if number in self._done else "missed"].append(str(fault))
        return faults

    def _cause(self, fault: Fault) -> str | None:
        """Causes a fault and returns what was done. None: not possible now, try again at the next step."""
        strength, loader, store = fault.strength, self._loader, self._files.faults
        match fault.kind:
            case "kill-worker":
                return kill_workers(loader.pipeline.worker_pids, strength)
            case "kill-remote":
                return kill_workers(loader.remote_pids, strength)
            case "stall-store":
                store.stall(strength)
                return f"reads wait for {strength:g} s"
            case "slow-store":
                store.slowed_s = strength
                return f"each read takes {strength:g} s longer" if strength else "as it was"
            case "corrupt":
                store.corrupt = fault.part
                return f"the next read of a file like {fault.part} has a flipped bit"
            case "slow-transform":
                loader.pipeline.burden(int(strength))
                return (
                    f"transforms do their work {strength:g} times" if strength > 1 else "as it was"
                )
        before, kept = Machine().cores(), sorted(self._cores)[: int(strength)]
        pin(Machine().tree(), set(kept))
        return f"{len(kept)} {'core' if len(kept) == 1 else 'cores'} instead of {before:g}"


def kill_workers(pids: Sequence[int], count: float) -> str | None:
    """Kills the first `count` of these processes that live. None: none does."""
    hit: list[int] = []
    for pid in pids:
        if len(hit) >= count:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hit.append(pid)
    return f"sent SIGKILL to {', '.join(map(str, hit))}" if hit else None


def pin(pids: Sequence[int], cores: set[int]) -> None:
    """Pins all threads of these processes to cores. Ignores what has ended."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in psutil.Process(pid).threads():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread.id, cores)
