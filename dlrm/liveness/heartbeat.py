"""Sends heartbeats: every second each rank reports what it does. Two ranks check the reports. All end if one has
stopped, and a rank ends whose store does not answer."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import psutil

from sluice.dlrm.liveness.activity import Activity, Beat, verdict
from sluice.dlrm.liveness.rank_exit import RankExit
from sluice.ingest.process.stacks import own_stacks

_JUDGES = 2  # so many ranks check the reports; the second notices if the first has stopped
_VERDICT_KEY = "sluice/verdict"
_EVERY_S = 1.0
_HOST = platform.node()


def _beat_key(rank: int) -> str:
    return f"sluice/beat/{rank}"


class Heartbeat:
    """A context around training, with a thread that reports through a clone of the process group's store: `check` comes
    before `get`, so nothing waits while the store answers.

    The store is on the first rank's host. If the network or that host is lost, no call returns. A second thread watches
    for that, because no other rank can tell this one to end."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        activity: Activity,
        ending: RankExit,
        *,
        workers: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[list[Beat]], None] | None = None,
    ) -> None:
        """`workers()` gives the stacks of worker processes. `kill` ends other ranks on this machine that report
        nothing."""
        self._store = store.clone()
        self._rank = rank
        self._ranks = ranks
        self._activity = activity
        self._ending = ending
        self._clock = clock
        self._workers, self._kill = workers, kill or _end_silent
        self._number = 0
        self._reports: dict[int, tuple[bytes, float]] = {}
        self._listened_at: float | None = None
        self._looked_at = clock()
        self._silent_s = 0.0
        """For how long the store has not answered."""
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="sluice-pulse", daemon=True)
            for target in (self._run, self._watch)
        ]

    def __enter__(self) -> Heartbeat:
        # This works even in a rank whose interpreter is held by a library: it does not need the interpreter's lock.
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__ or 2, all_threads=True)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(2 * _EVERY_S)  # a store that does not answer is not waited for
        faulthandler.unregister(signal.SIGUSR2)

    def _run(self) -> None:
        # If the store is gone, its owner has ended. The ranks learn that in another way.
        with suppress(Exception):
            while not self._ended.wait(_EVERY_S):
                self.step()
            self._report(over=True)

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()

    def look(self) -> None:
        """Ends this rank if the store has not answered for too long and training does not go on either."""
        beat = self._activity.beat(os.getpid(), os.getppid())
        now = self._clock()
        # Time in which this rank was stopped itself does not count.
        self._silent_s += min(now - self._looked_at, 2 * _EVERY_S)
        self._looked_at = now
        is_late = beat.limit_s is None or beat.age_s > beat.limit_s
        if self._silent_s > beat.silence_s and is_late:
            self._ending.leave(
                f"rank {self._rank} on {_HOST} has lost the first rank's host: its store did not answer for "
                f"{self._silent_s:.0f} s (at most {beat.silence_s:.0f} s) while this rank {beat.phase}. "
                "Look at that host and the network between them"
            )

    def step(self) -> None:
        """Reports what this rank is doing; then judges, if it is one of the judges, and acts on the verdict."""
        self._report()
        if self._rank < _JUDGES:
            heard = {rank: (_beat(text), silent) for rank, (text, silent) in self._listen().items()}
            judgement = verdict(heard)
            if judgement is not None and not self._store.check([_VERDICT_KEY]):
                self._store.set(_VERDICT_KEY, json.dumps(asdict(judgement)))
        if self._store.check([_VERDICT_KEY]):
            self._end(json.loads(self._store.get(_VERDICT_KEY)))
        self._silent_s = 0.0

    def _report(self, *, over: bool = False) -> None:
        self._number += 1
        beat = asdict(self._activity.beat(os.getpid(), os.getppid(), _HOST))
        self._store.set(
            _beat_key(self._rank), json.dumps({**beat, "over": over, "number": self._number})
        )

    def _listen(self) -> Mapping[int, tuple[bytes, float]]:
        """Rank → its last report, and for how long it has sent no other. Time in which this rank itself did not listen
        does not count: it may have stood still with all others."""
        now = self._clock()
        elapsed_s = 0.0 if self._listened_at is None else min(now - self._listened_at, 2 * _EVERY_S)
        self._listened_at = now
        for rank in range(self._ranks):
            if not self._store.check([_beat_key(rank)]):
                continue
            text = self._store.get(_beat_key(rank))
            before = self._reports.get(rank)
            self._reports[rank] = (
                text,
                before[1] + elapsed_s if before is not None and before[0] == text else 0.0,
            )
        return self._reports

    def _end(self, judgement: Mapping[str, Any]) -> None:
        if self._rank in judgement["ranks"]:
            print(
                f"what rank {self._rank} does now:",
                own_stacks(),
                self._workers(),
                sep="\n",
                file=sys.__stderr__,
                flush=True,
            )
        elif judgement["silent"]:
            beats = [_beat(self._store.get(_beat_key(rank))) for rank in judgement["ranks"]]
            # In containers, torchrun has the same process id on every host.
            self._kill(
                [beat for beat in beats if (beat.host, beat.parent) == (_HOST, os.getppid())]
            )
        speaks = self._rank == min(
            set(range(self._ranks)) - set(judgement["ranks"] if judgement["silent"] else ())
        )
        self._ending.leave(judgement["text"], speak=speaks)


def _beat(text: bytes) -> Beat:
    values = json.loads(text)
    values.pop("number")
    return Beat(**values)


def _end_silent(beats: list[Beat]) -> None:
    """Ends ranks of this machine's own torchrun that report nothing, after asking for their stacks. A stopped process
    gives no answer, and obeys no other signal."""
    for number, wait_s in ((signal.SIGUSR2, 1.0), (signal.SIGKILL, 0.0)):
        for beat in beats:
            with suppress(psutil.Error):
                process = psutil.Process(beat.process)
                if process.ppid() == beat.parent:
                    process.send_signal(number)
        time.sleep(wait_s)
