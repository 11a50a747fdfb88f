"""Judges whether all ranks make progress.

Each rank records what it does (`Activity`), and sends it to the others every second (`Heartbeat`). `verdict` finds the
ranks that have stopped, which then end."""

from __future__ import annotations

import json
import os
import platform
import signal
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
EVERY_S = 1.0
_LEAST_S = 10.0
_TIMES_SLOWEST = 20.0
_STEPS_NEEDED = 3
_JUDGES = 2  # so many ranks check the reports; the second notices if the first has stopped
_VERDICT_KEY = "sluice/verdict"
_HOST = platform.node()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One report of a rank: what it is doing."""

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

    @property
    def is_late(self) -> bool:
        return self.limit_s is not None and self.age_s > self.limit_s


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
    unfinished = {
        rank: (beat, silent_s) for rank, (beat, silent_s) in beats.items() if not beat.over
    }
    blamed = [rank for rank, (beat, silent_s) in unfinished.items() if silent_s > beat.silence_s]
    silent = bool(blamed)
    if silent:
        if any(
            beat.limit_s is not None and beat.age_s + silent_s <= beat.silence_s
            for rank, (beat, silent_s) in unfinished.items()
            if rank not in blamed
        ):
            return None
    elif unfinished and all(beat.is_late for beat, _ in unfinished.values()):
        # Ranks that only wait for others are not to blame, unless all do.
        blamed = [r for r, (beat, _) in unfinished.items() if not beat.waits] or [*unfinished]
    else:
        return None
    texts = []
    for rank in blamed:
        beat, silent_s = unfinished[rank]
        stopped = (
            f"sent no heartbeat for {silent_s:.0f} s (at most {beat.silence_s:.0f} s); when last seen,"
            if silent
            else f"made no progress for {beat.age_s:.0f} s (at most {beat.limit_s:.0f} s):"
        )
        texts.append(f"rank {rank} on {beat.host} {stopped} it {beat.phase}")
    return Verdict(tuple(blamed), silent, "; ".join(texts))


@dataclass(slots=True)
class Phase:
    """What a rank is doing."""

    text: str
    limit_s: float | None
    """The seconds without progress at which the rank counts as stopped. None: this may take any time."""
    waits: bool
    work: Callable[[], Any]
    """As long as what it returns changes, the rank makes progress."""
    progressed_at: float
    done: Any = None
    """What `work` returned last."""


class Activity:
    """What this rank is doing. The main thread says what it begins; other threads may ask for the `Beat` at any
    time."""

    def __init__(
        self, *, most_s: float = MOST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_s, self._clock = most_s, clock
        self._steps: deque[float] = deque(maxlen=100)
        self._fetch_began: float | None = None
        self._unmeasured_s = max(most_s, MOST_S)
        """The limit while no usual length is known: pipelines fill and kernels are compiled before the first
        batches."""
        self.step_limit_s = self._unmeasured_s
        """The limit for what belongs to a step: it follows the slowest of the last hundred steps, once there are a
        few."""
        self._begin("began")

    def fetches(self, number: int, work: Callable[[], Any]) -> None:
        """Notes that the rank waits for its next batch. As long as `work()` changes, its loader makes progress."""
        now = self._clock()
        if self._fetch_began is not None:
            self._steps.append(max(0.0, now - self._fetch_began))
        self._fetch_began = now
        if len(self._steps) >= _STEPS_NEEDED:
            slowest_s = max(_LEAST_S, _TIMES_SLOWEST * max(self._steps))
            self.step_limit_s = min(self._most_s, slowest_s)
        limit_s = max(self._most_s, self.step_limit_s)
        self._begin(f"waited for batch {number}", limit_s, work=work)

    def meets(self, number: int) -> None:
        """Notes that the rank has its batch, or none, and waits for the other ranks."""
        text = f"waited for the other ranks before batch {number}"
        self._begin(text, self.step_limit_s, waits=True)

    def steps(self, number: int) -> None:
        """Notes that the rank makes a training step."""
        self._begin(f"was at batch {number}", self.step_limit_s)

    def rests(self) -> None:
        """Notes that a pass over the batches is over. What follows has no usual length."""
        self._steps.clear()
        self._fetch_began, self.step_limit_s = None, self._unmeasured_s
        self._begin("was between two passes over the data")

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """While this context lasts, the rank does something that has no usual length and does not count as part of a
        step."""
        before, began = self._phase, self._clock()
        self._begin(what)
        try:
            yield
        finally:
            if self._fetch_began is not None:
                self._fetch_began += self._clock() - began
            self._begin(before.text, before.limit_s and self.step_limit_s)

    def beat(self) -> Beat:
        """Returns a report of what this rank is doing now."""
        phase = self._phase
        if (done := phase.work()) != phase.done:
            phase.done, phase.progressed_at = done, self._clock()
        return Beat(
            phase=phase.text,
            waits=phase.waits,
            age_s=self._clock() - phase.progressed_at,
            limit_s=phase.limit_s,
            silence_s=self._unmeasured_s if phase.limit_s is None else self.step_limit_s,
            process=os.getpid(),
            parent=os.getppid(),
            host=_HOST,
        )

    def _begin(
        self,
        text: str,
        limit_s: float | None = None,
        *,
        waits: bool = False,
        work: Callable[[], Any] = lambda: None,
    ) -> None:
        self._phase = Phase(text, limit_s, waits, work, self._clock())


def awake_time(clock: Callable[[], float]) -> Callable[[], float]:
    """Returns a function that returns the seconds since its last call. Time in which this rank itself was stopped, with
    all others or alone, does not count."""
    before = clock()

    def elapsed() -> float:
        nonlocal before
        now = clock()
        elapsed_s, before = min(now - before, 2 * EVERY_S), now
        return elapsed_s

    return elapsed


def _end_silent(beats: list[Beat]) -> None:
    """Ends ranks of this machine's own torchrun that report nothing, after asking for their stacks. A stopped process
    gives no answer, and obeys no other signal."""
    for number, wait_s in ((signal.SIGUSR2, 1.0), (signal.SIGKILL, 0.0)) if beats else ():
        for beat in beats:
            with suppress(psutil.Error):
                process = psutil.Process(beat.process)
                if process.ppid() == beat.parent:
                    process.send_signal(number)
        time.sleep(wait_s)


@dataclass(eq=False)
class Heartbeat:
    """Exchanges reports through a clone of the process group's store: `check` comes before `get`, so nothing waits
    while the store answers.

    The store is on the first rank's host. If the network or that host is lost, no call returns. Another thread calls
    `look` for that case, because no other rank can tell this one to end."""

    store: Any
    rank: int
    ranks: int
    activity: Activity
    ending: RankExit
    workers: Callable[[], str] = str
    """Returns the stacks of worker processes."""
    clock: Callable[[], float] = time.monotonic
    kill: Callable[[list[Beat]], None] = _end_silent
    """Ends other ranks on this machine that report nothing."""

    def __post_init__(self) -> None:
        self.store = self.store.clone()
        self._number = 0
        self._reports: dict[int, tuple[Beat, float]] = {}
        """Rank → its last report, and for how long it has sent no other."""
        self._silent_s = 0.0
        """For how long the store has not answered."""
        self._since_listened, self._since_looked = awake_time(self.clock), awake_time(self.clock)

    def send(self, over: threading.Event) -> None:
        """Sends a report every second, until `over` is set."""
        # If the store is gone, its owner has ended. The ranks learn that in another way.
        with suppress(Exception):
            while not over.wait(EVERY_S):
                self.step()
            self.report(over=True)

    def look(self) -> None:
        """Ends this rank if the store has not answered for too long and training does not go on either."""
        beat = self.activity.beat()
        self._silent_s += self._since_looked()
        if self._silent_s > beat.silence_s and (beat.limit_s is None or beat.is_late):
            self.ending.leave(
                f"rank {self.rank} on {_HOST} has lost the first rank's host: its store did not answer for "
                f"{self._silent_s:.0f} s (at most {beat.silence_s:.0f} s) while this rank {beat.phase}. "
                "Look at that host and the network between them"
            )

    def step(self) -> None:
        """Reports what this rank is doing; then judges, if it is one of the judges, and acts on the verdict."""
        self.report()
        if self.rank < _JUDGES:
            judgement = verdict(self._listen())
            if judgement is not None and not self.store.check([_VERDICT_KEY]):
                self.store.set(_VERDICT_KEY, json.dumps(asdict(judgement)))
        if self.store.check([_VERDICT_KEY]):
            self._end(Verdict(**json.loads(self.store.get(_VERDICT_KEY))))
        self._silent_s = 0.0

    def report(self, *, over: bool = False) -> None:
        self._number += 1
        beat = replace(self.activity.beat(), over=over, number=self._number)
        self.store.set(_beat_key(self.rank), json.dumps(asdict(beat)))

    def _last_beat(self, rank: int) -> Beat:
        return Beat(**json.loads(self.store.get(_beat_key(rank))))

    def _listen(self) -> Mapping[int, tuple[Beat, float]]:
        elapsed_s = self._since_listened()
        for rank in range(self.ranks):
            if self.store.check([_beat_key(rank)]):
                beat = self._last_beat(rank)
                before, silent_s = self._reports.get(rank, (None, 0.0))
                self._reports[rank] = (beat, silent_s + elapsed_s if beat == before else 0.0)
        return self._reports

    def _end(self, judgement: Verdict) -> None:
        silent = judgement.ranks if judgement.silent else ()
        if self.rank in judgement.ranks:
            say(f"what rank {self.rank} does now:\n{own_stacks()}\n{self.workers()}")
        else:
            beats = map(self._last_beat, silent)
            # In containers, torchrun has the same process id on every host.
            self.kill([b for b in beats if (b.host, b.parent) == (_HOST, os.getppid())])
        speaks = self.rank == min(set(range(self.ranks)).difference(silent))
        self.ending.leave(judgement.text, speak=speaks)


def _beat_key(rank: int) -> str:
    return f"sluice/beat/{rank}"
