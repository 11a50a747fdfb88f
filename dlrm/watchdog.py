"""Watches over a rank, from one thread that waits for signals, for torchrun's end, and for what is due: `Watchdog`.

Python runs a signal's handler only after the main thread has returned from C code, for example from a collective. This
thread sees each signal at once."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sluice.dlrm.liveness import EVERY_S, Heartbeat
from sluice.dlrm.rank_exit import RankExit
from sluice.ingest.process.stacks import tell

_GRACE_S = 1.0  # torchrun itself takes some of the two seconds


class Watchdog:
    """A context around a program. If torchrun started this process, the process ends soon after torchrun: a torchrun
    that is killed cannot tell its ranks. A person's shell may end before this process."""

    def __init__(self, ending: RankExit) -> None:
        self.ending = ending
        self.stop = threading.Event()
        """Set by SIGTERM and by the run itself: the run saves a checkpoint and ends."""
        self.preempted = threading.Event()
        """Set by SIGTERM."""
        self.saved = threading.Event()
        """Set by the run while all that it has trained is saved."""
        self.workers: Callable[[], str] = str
        """Returns the stacks of worker processes, for SIGUSR1."""
        self.end_wait: Callable[[], None] = lambda: None
        """Called a second after SIGTERM. It ends a wait of the main thread."""
        self._heartbeat: Heartbeat | None = None
        self._preempt_s = 0.0
        self._wakeup_before = -1
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def worker_stacks(self) -> str:
        """Returns the current stacks of the worker processes."""
        return self.workers()

    @contextmanager
    def training(self, heartbeat: Heartbeat, *, preempt_s: float) -> Iterator[None]:
        """Returns a context around training, in which signals are answered and heartbeats sent. A run that is not
        `saved` `preempt_s` seconds after SIGTERM is ended."""
        self._heartbeat, self._preempt_s = heartbeat, preempt_s
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # The thread answers both signals, because the main thread may hang.
        handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGUSR1)
        }
        # This works even in a rank whose interpreter is held by a library: it does not need the interpreter's lock.
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__ or 2, all_threads=True)
        over = threading.Event()
        # No call of a store that is lost returns, so this takes a thread of its own.
        sender = threading.Thread(
            target=heartbeat.send, args=(over,), name="sluice-heartbeat", daemon=True
        )
        sender.start()
        try:
            yield
        finally:
            self._heartbeat = None
            over.set()
            sender.join(2 * EVERY_S)
            faulthandler.unregister(signal.SIGUSR2)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)

    def _run(self) -> None:
        due: list[tuple[float, Callable[[], None]]] = []
        while not self._ended.is_set():
            wait_s = min([EVERY_S, *(at - time.monotonic() for at, _ in due)])
            if select.select([self._read], [], [], max(0.0, wait_s))[0]:
                signals = os.read(self._read, 64)
                if signal.SIGUSR1 in signals:
                    tell(self.workers)
                if signal.SIGTERM in signals and not self.preempted.is_set():
                    self.preempted.set()
                    self.stop.set()
                    now = time.monotonic()
                    due = [
                        (now + _GRACE_S, self.end_wait),
                        (now + self._preempt_s, self._give_up),
                    ]
                if signal.SIGINT in signals and self._wakeup_before >= 0:
                    os.write(self._wakeup_before, signals)  # the program ends the process
            for at, call in [*due]:
                if at <= time.monotonic():
                    due.remove((at, call))
                    call()
            if (heartbeat := self._heartbeat) is not None:
                heartbeat.look()
            if self._launcher not in (None, os.getppid()):
                self.ending.leave(
                    f"process {self._launcher}, which started this one, is gone, so this one ends, too; a checkpoint "
                    "that was complete stays, and --resume goes on from there"
                )

    def _give_up(self) -> None:
        if not self.saved.is_set():
            self.ending.leave(
                f"the run was not saved within {self._preempt_s:g} s of SIGTERM (--preempt-seconds); --resume goes on "
                "from the newest checkpoint that is complete"
            )
