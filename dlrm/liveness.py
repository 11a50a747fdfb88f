"""Checks that all ranks make progress.

Each rank records what it does (`Activity`), and sends it to the others every second (`Heartbeat`). `verdict` finds the
ranks that have stopped, which then end."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from sluice.common.lines import say
from sluice.dlrm.rank_exit import RankExit
from sluice.ingest.process.stacks import own_stacks

MOST_S = 120.0
_LEAST_S = 10.0
_TIMES_SLOWEST = 20.0
_STEPS_NEEDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One report of a rank: what it is doing."""

    count: int
    """How many phases the rank has started. All ranks go through the same phases, so all wait for the rank with the
    fewest."""
    phase: str
    waits: bool
    """Whether the rank does nothing in this phase but wait for the other ranks."""
    age_s: float
    """The seconds since it last made progress in this phase."""
    limit_s: float | None
    """The age at which the rank counts as stopped. None: this phase may take any time."""
    silence_s: float
    """How long the rank may report nothing before it counts as stopped."""
    process: int
    parent: int
    host: str
    over: bool = False
    """Whether the rank has finished."""
    number: int = 0
    """The number of this report, so that no two are equal."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks that have stopped, and a text for the user."""

    ranks: tuple[int, ...]
    silent: bool
    """Whether these ranks have sent no report at all."""
    text: str


def verdict(beats: Mapping[int, tuple[Beat, float]]) -> Verdict | None:
    """Checks the ranks' last reports, each with its age in seconds. None: no rank has stopped for too long.

    If one rank makes progress, no rank has stopped, because all ranks communicate before every batch."""
    unfinished = {rank: (beat, silent) for rank, (beat, silent) in beats.items() if not beat.over}
    silent = {
        rank: beat for rank, (beat, seconds) in unfinished.items() if seconds > beat.silence_s
    }
    if silent:
        others = [
            (beat, seconds) for rank, (beat, seconds) in unfinished.items() if rank not in silent
        ]
        if any(
            beat.limit_s is not None and beat.age_s + seconds <= beat.silence_s
            for beat, seconds in others
        ):
            return None
        return Verdict(
            tuple(silent),
            True,
            "; ".join(
                f"rank {rank} on {beat.host} sent no heartbeat for {unfinished[rank][1]:.0f} s "
                f"(at most {beat.silence_s:.0f} s); when last seen, it {beat.phase}"
                for rank, beat in silent.items()
            ),
        )
    slow = {
        rank: beat
        for rank, (beat, _) in unfinished.items()
        if beat.limit_s is not None and beat.age_s > beat.limit_s
    }
    if not unfinished or len(slow) < len(unfinished):
        return None
    # The ranks that have come least far are to blame. Ranks that only wait for others are not, unless all do.
    fewest = min(beat.count for beat in slow.values())
    behind = {rank: beat for rank, beat in slow.items() if beat.count == fewest}
    blamed = {rank: beat for rank, beat in behind.items() if not beat.waits} or behind
    return Verdict(
        tuple(blamed),
        False,
        "; ".join(
            f"rank {rank} on {beat.host} made no progress for {beat.age_s:.0f} s "
            f"(at most {beat.limit_s:.0f} s): it {beat.phase}"
            for rank, beat in blamed.items()
        ),
    )


@dataclass(frozen=True, slots=True)
class Phase:
    """What a rank is doing."""

    text: str
    limit: Callable[[], float] | None = None
    """Returns the seconds without progress at which the rank counts as stopped. None: this may take any time."""
    waits: bool = False
    """Whether the rank does nothing but wait for the other ranks."""
    work: Callable[[], Any] | None = None
    """As long as what it returns changes, the rank makes progress."""


class Activity:
    """What this rank is doing. The main thread says what it begins; another thread may ask for the `Beat` at any
    time."""

    def __init__(
        self, *, most_s: float = MOST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_s, self._clock = most_s, clock
        self._lock = threading.Lock()
        self._count = 0
        self._phase = Phase("began")
        self._last_work: Any = None
        self._progressed_at = clock()
        self._steps: deque[float] = deque(maxlen=100)
        self._fetch_began: float | None = None
        self._apart_s = 0.0

    @property
    def step_limit_s(self) -> float:
        """The limit for what belongs to a step: it follows the slowest of the last hundred steps, once there are a
        few."""
        if not self._measured:
            return self._unmeasured_s
        return min(self._most_s, max(_LEAST_S, _TIMES_SLOWEST * max(self._steps)))

    @property
    def _measured(self) -> bool:
        return len(self._steps) >= _STEPS_NEEDED

    @property
    def _unmeasured_s(self) -> float:
        """The limit while no usual length is known: pipelines fill and kernels are compiled before the first
        batches."""
        return max(self._most_s, MOST_S)

    def fetches(self, number: int, work: Callable[[], Any]) -> None:
        """Notes that the rank waits for its next batch. As long as `work()` changes, its loader makes progress."""
        now = self._clock()
        with self._lock:
            if self._fetch_began is not None:
                self._steps.append(max(0.0, now - self._fetch_began - self._apart_s))
            self._fetch_began, self._apart_s = now, 0.0
        self._begin(
            Phase(
                f"waited for batch {number}",
                lambda: self._most_s if self._measured else self._unmeasured_s,
                work=work,
            )
        )

    def meets(self, number: int) -> None:
        """Notes that the rank has its batch, or none, and waits for the other ranks."""
        text = f"waited for the other ranks before batch {number}"
        self._begin(Phase(text, lambda: self.step_limit_s, waits=True))

    def steps(self, number: int) -> None:
        """Notes that the rank makes a training step."""
        self._begin(Phase(f"was at batch {number}", lambda: self.step_limit_s))

    def rests(self) -> None:
        """Notes that a pass over the batches is over. What follows has no usual length."""
        with self._lock:
            self._steps.clear()
            self._fetch_began = None
        self._begin(Phase("was between two passes over the data"))

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """While this context lasts, the rank does something that has no usual length and does not count as part of a
        step."""
        before, began = self._phase, self._clock()
        self._begin(Phase(what))
        try:
            yield
        finally:
            self._apart_s += self._clock() - began
            self._begin(before)

    def beat(self, process: int, parent: int, host: str = "") -> Beat:
        """Returns a report of what this rank is doing now."""
        with self._lock:
            count, phase = self._count, self._phase
        # This runs without the lock, which the main thread takes.
        work_done = phase.work() if phase.work is not None else None
        with self._lock:
            now, phase = self._clock(), self._phase
            if phase.work is not None and count == self._count and work_done != self._last_work:
                self._last_work, self._progressed_at = work_done, now
            limit = None if phase.limit is None else phase.limit()
            return Beat(
                count=self._count,
                phase=phase.text,
                waits=phase.waits,
                age_s=now - self._progressed_at,
                limit_s=limit,
                silence_s=self._unmeasured_s if limit is None else self.step_limit_s,
                process=process,
                parent=parent,
                host=host,
            )

    def _begin(self, phase: Phase) -> None:
        with self._lock:
            self._count += 1
            self._phase = phase
            self._progressed_at = self._clock()


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
        beat = self._activity.beat(os.getpid(), os.getppid(), _HOST)
        beat = replace(beat, over=over, number=self._number)
        self._store.set(_beat_key(self._rank), json.dumps(asdict(beat)))

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
            say(f"what rank {self._rank} does now:\n{own_stacks()}\n{self._workers()}")
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
    return Beat(**json.loads(text))


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
