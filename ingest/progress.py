"""An agent's view of a rank's consumer and its pipeline: `Progress`.

An agent does not see the consumer's `Rests`, such as validations. This module does not refer to the loader, so a
forgotten loader can be freed while an agent still uses its `Progress`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.lock_probe import PROBE
from sluice.ingest.stats import (
    READY,
    STAGE_COUNTERS,
    Durations,
    LoaderStats,
    Snapshot,
    core_s_per_million,
)

if TYPE_CHECKING:
    from sluice.ingest.stages.stage_pools import StagePools


_PIPELINE_COUNTERS = (
    "at",
    "batches",
    "rows",
    "consumer_wait_s",
    "consumer_compute_s",
    "cpu_used_s",
    "cores_idle_s",
    "lock_held_s",
    "held_back",
    "held_back_pressure",
    "throttled",
)
_REMOTE_COUNTERS = ("units", "calls", "bytes", "retries", "hedges", "late", "core_s")

_START = 0, 0.0, 0.0
_MOST_HIDDEN_S = 30.0
"""If a rest lasts longer, without its pauses, it ends, and an agent sees what happened between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rests:
    """The rests of a consumer, such as validations and checkpoints. Each method but the last returns a new state.

    In a pause the consumer takes no rows, and the pipeline fills its buffers. The next rows then come faster than the
    pipeline makes them. So a rest lasts until no more rows wait in the pipeline than before it. `_MOST_HIDDEN_S` limits
    it, because new knobs may keep more rows under way for good. With short epochs and a validation after each, a
    consumer may also take most of its rows in rests. Then the rate of its bursts is its true rate."""

    is_on: bool = False
    pause: Snapshot | None = None
    """The snapshot since which the consumer asks for no rows. None: it asks for rows."""
    started: Snapshot | None = None
    """The snapshot from which an agent counts. Of the last rest, it is the start, plus the pauses, or the end."""
    shown: Snapshot | None = None
    """What an agent saw when the last rest began."""
    ahead: int = 0
    """The rows that were read but not taken when the rest began."""

    def start(self, now: Snapshot) -> Rests:
        """Begins a rest, or continues the current one."""
        rests = self
        if not self.is_on:
            ahead, shown = _rows_ahead(now), self.hide_rests(now)
            rests = Rests(is_on=True, started=now, shown=shown, ahead=ahead)
        return replace(rests, pause=rests.pause or now)

    def resume(self, now: Snapshot) -> Rests:
        """Notes that the consumer asks for rows again."""
        if self.pause is None or self.started is None:
            return self
        return replace(self, pause=None, started=_with_counters(now, self.pause, self.started))

    def end_if_over(self, now: Snapshot) -> Rests:
        """Ends the current rest if the surplus rows have been taken."""
        if self.pause is not None or self.started is None or not self.is_on:
            return self
        if now.at - self.started.at > _MOST_HIDDEN_S:
            return replace(self, is_on=False)
        read = now.stages[0]
        if _rows_ahead(now) - self.ahead > read.rows / max(1, read.items):
            return self
        return replace(self, is_on=False, started=now)

    def hide_rests(self, now: Snapshot) -> Snapshot:
        """Returns the snapshot without the times and rows of rests. Its clock stops during a rest."""
        if self.started is None or self.shown is None:
            return now
        return _with_counters(now, now if self.is_on else self.started, self.shown)


def _rows_ahead(snapshot: Snapshot) -> int:
    """Returns how many rows were read but not taken yet."""
    return snapshot.stages[0].rows - snapshot.rows


def _with_counters(now: Snapshot, start: Snapshot, shown: Snapshot) -> Snapshot:
    """Returns `now` as if at `start` its counters had been those of `shown`."""

    def of(names: tuple[str, ...], now: Any, start: Any, shown: Any) -> dict[str, Any]:
        return {
            name: value - getattr(start, name) + getattr(shown, name)
            for name in names
            if (value := getattr(now, name)) is not None
        }

    stages = zip(now.stages, start.stages, shown.stages, strict=True)
    remote = {
        name: now.elsewhere[name] - start.elsewhere.get(name, 0) + shown.elsewhere.get(name, 0)
        for name in _REMOTE_COUNTERS
        if name in now.elsewhere
    }
    return replace(
        now,
        stages=tuple(replace(stage[0], **of(STAGE_COUNTERS, *stage)) for stage in stages),
        elsewhere={**now.elsewhere, **remote},
        **of(_PIPELINE_COUNTERS, now, start, shown),
    )


class _Consumer(NamedTuple):
    phase: str
    began: float
    wait_s: float
    compute_s: float

    def totals(self, now: float) -> tuple[float, float]:
        """Returns the seconds of waiting and of computing until `now`."""
        spent = max(0.0, now - self.began)  # a snapshot may have read the clock just before
        return (
            self.wait_s + spent * (self.phase == "wait"),
            self.compute_s + spent * (self.phase == "compute"),
        )


class Progress:
    """The counters of one rank's loading, and its knobs, for a tuning loop."""

    def __init__(
        self,
        pipeline: StagePools,
        memory_limit: int | None,
        remote_stats: Callable[[], Mapping[str, float]] = dict,
    ):
        """`memory_limit` is the user's. A lower limit of the machine takes precedence. `remote_stats` returns the
        counters of remote workers."""
        self._remote_stats = remote_stats
        self._pipeline = pipeline
        self._limit = memory_limit
        self._batches = self._rows = 0
        self._sequence = itertools.count()
        # One tuple, so that a snapshot in another thread sees a consistent state.
        self._consumer = _Consumer("away", 0.0, 0.0, 0.0)
        self._first: tuple[int, float, float] | None = None  # rows and totals after the first batch
        self._waits = Durations()
        self._rests, self._lock = Rests(), threading.Lock()

    def enter(self, phase: str) -> None:
        """Notes that the consumer begins to `wait` or to `compute`, or that it is `away` between two epochs."""
        now = time.monotonic()
        before = self._consumer
        if before.phase == "wait" and phase == "compute" and self._batches > 1:
            self._waits.add(now - before.began)
        self._consumer = _Consumer(phase, now, *self._consumer.totals(now))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Returns a context in which the consumer rests: it neither waits for rows nor computes on them."""
        phase = self._consumer.phase
        self.enter("away")
        with self._lock:
            self._rests = self._rests.start(self.counters())
        try:
            yield
        finally:
            with self._lock:
                self._rests = self._rests.resume(self.counters())
            self.enter(phase)

    def count(self, rows: int) -> None:
        """Counts a batch that the consumer has taken."""
        self._batches += 1
        self._rows += rows
        if self._first is None:
            self._first = (self._rows, *self._consumer.totals(time.monotonic()))

    @property
    def knobs(self) -> Knobs:
        return self._pipeline.knobs

    @property
    def limits(self) -> Limits:
        return self._pipeline.limits

    def apply(self, knobs: Knobs) -> None:
        self._pipeline.apply(knobs)

    def memory_limit(self) -> int:
        """Returns the current memory limit: the user's or the machine's, whichever is lower."""
        return self._pipeline.machine.memory_limit(self._limit)

    def snapshot(self) -> Snapshot:
        """Returns the snapshot for an agent. Its clock and counters stop while the consumer rests, and until the
        consumer has taken the rows that were read meanwhile."""
        with self._lock:
            now = self.counters()
            self._rests = self._rests.end_if_over(now)
            return self._rests.hide_rests(now)

    def counters(self) -> Snapshot:
        """Returns the snapshot of everything since the start, including rests."""
        now = time.monotonic()
        wait_s, compute_s = self._consumer.totals(now)
        machine, held_back = self._pipeline.machine, self._pipeline.held_back
        return Snapshot(
            at=now,
            sequence=next(self._sequence),
            stages=self._pipeline.stats(),
            batches=self._batches,
            rows=self._rows,
            consumer_wait_s=wait_s,
            consumer_compute_s=compute_s,
            memory_used=machine.memory_used(),
            memory_limit=self.memory_limit(),
            memory_free=self._pipeline.memory_free,
            cpu_quota=machine.cores(),
            cpu_used_s=machine.cpu_used_s(),
            cores_idle_s=machine.cores_idle_s(),
            lock_held_s=PROBE.held_s,
            held_back=held_back.total(),
            held_back_pressure=held_back["pressure"],
            throttled=self._pipeline.throttled,
            restarts=self._pipeline.restarts,
            elsewhere=dict(self._remote_stats()),
        )

    def stats(self, rank: int) -> LoaderStats:
        """Returns the figures after the first batch, whose rows and wait do not count."""
        rows, wait_s, compute_s = self._since(self._first) if self._first else _START
        return LoaderStats(
            rank=rank,
            rows=rows,
            wait_s=wait_s,
            compute_s=compute_s,
            durations={READY: tuple(self._waits.counts), **self._pipeline.durations()},
        )

    def outcome(self) -> dict[str, Any]:
        """Returns the rows, their rate and the share of time spent waiting. They are measured from the first batch on.
        If the rest of the run was no longer than the wait for the first batch, they are measured from the start."""
        first = self._first or self._since(_START)
        rows, wait_s, compute_s = self._since(first)
        if wait_s + compute_s < first[1] + first[2]:
            rows, wait_s, compute_s = self._since(_START)
        seconds = wait_s + compute_s
        return {
            "rows": self._rows,
            "rows_per_s": round(rows / seconds) if seconds > 0 else None,
            "stall_fraction": round(wait_s / seconds, 4) if seconds > 0 else None,
            "first_batch_s": round(first[1], 3),
            **({"cache": cache.outcome()} if (cache := self._pipeline.cache) else {}),
            "core_s_per_million": round(core_s_per_million(self._pipeline.stats(), self._rows), 3),
        }

    def _since(self, before: tuple[int, float, float]) -> tuple[int, float, float]:
        """Returns the rows and the seconds of waiting and of computing since these were the totals."""
        rows, waited_s, computed_s = before
        wait_s, compute_s = self._consumer.totals(time.monotonic())
        return self._rows - rows, wait_s - waited_s, compute_s - computed_s
