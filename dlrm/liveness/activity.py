"""Finds ranks that have stopped: each rank reports what it does (`Activity`, `Beat`), and `verdict` checks the
reports."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
                f"rank {rank} on {beat.host} stands still: nothing was heard of it for "
                f"{unfinished[rank][1]:.0f} s; the last was: it {beat.phase} (at most {beat.silence_s:.0f} s)"
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
    # Those that have come least far; who only waits for the others is not to blame, unless all do.
    fewest = min(beat.count for beat in slow.values())
    behind = {rank: beat for rank, beat in slow.items() if beat.count == fewest}
    blamed = {rank: beat for rank, beat in behind.items() if not beat.waits} or behind
    return Verdict(
        tuple(blamed),
        False,
        "; ".join(
            f"rank {rank} on {beat.host} stands still: for {beat.age_s:.0f} s it {beat.phase} (at most "
            f"{beat.limit_s:.0f} s)"
            for rank, beat in blamed.items()
        ),
    )


class Activity:
    """What this rank is doing. The main thread says what it begins; another thread may ask for the `Beat` at any
    time."""

    def __init__(
        self, *, most_s: float = MOST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_s, self._clock = most_s, clock
        self._lock = threading.Lock()
        self._count = 0
        self._phase = "began"
        self._waits = False
        self._limit: Callable[[], float] | None = None
        self._work: Callable[[], Any] | None = None
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
            f"waited for batch {number}",
            work=work,
            limit=lambda: self._most_s if self._measured else self._unmeasured_s,
        )

    def meets(self, number: int) -> None:
        """Notes that the rank has its batch, or none, and waits for the other ranks."""
        self._begin(
            f"waited for the other ranks before batch {number}",
            limit=lambda: self.step_limit_s,
            waits=True,
        )

    def steps(self, number: int) -> None:
        """Notes that the rank makes a training step."""
        self._begin(f"was at batch {number}", limit=lambda: self.step_limit_s)

    def rests(self) -> None:
        """Notes that a pass over the batches is over. What follows has no usual length."""
        with self._lock:
            self._steps.clear()
            self._fetch_began = None
        self._begin("was between two passes over the data", limit=None)

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """While this context lasts, the rank does something that has no usual length and does not count as part of a
        step."""
        before, began = (self._phase, self._waits, self._limit, self._work), self._clock()
        self._begin(what, limit=None)
        try:
            yield
        finally:
            self._apart_s += self._clock() - began
            phase, waits, limit, work = before
            self._begin(phase, limit=limit, waits=waits, work=work)

    def beat(self, process: int, parent: int, host: str = "") -> Beat:
        """Returns a report of what this rank is doing now."""
        with self._lock:
            count, work = self._count, self._work
        # This runs without the lock, which the main thread takes.
        work_done = work() if work is not None else None
        with self._lock:
            now = self._clock()
            if work is not None and count == self._count and work_done != self._last_work:
                self._last_work, self._progressed_at = work_done, now
            limit = None if self._limit is None else self._limit()
            return Beat(
                count=self._count,
                phase=self._phase,
                waits=self._waits,
                age_s=now - self._progressed_at,
                limit_s=limit,
                silence_s=self._unmeasured_s if limit is None else self.step_limit_s,
                process=process,
                parent=parent,
                host=host,
            )

    def _begin(
        self,
        phase: str,
        *,
        limit: Callable[[], float] | None,
        waits: bool = False,
        work: Callable[[], Any] | None = None,
    ) -> None:
        with self._lock:
            self._count += 1
            self._phase = phase
            self._waits = waits
            self._limit = limit
            self._work = work
            self._progressed_at = self._clock()
