"""An agent's view of a rank's consumer and its pipeline: `Progress`.

An agent does not see the consumer's `Rests`, such as validations. This module does not refer to the loader, so a
forgotten loader can be freed while an agent still uses its `Progress`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.lock_probe import PROBE
from sluice.ingest.stats import (
    READY,
    STAGE_COUNTERS,
    Durations,
    LoaderStats,
    Snapshot,
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
Counters = Mapping[tuple[str, str], float]
"""The counters of a snapshot, by owner and name. The owner is a stage or one of the two below."""
_PIPELINE, _REMOTE = "", "remote workers"
_MOST_TIMES_READ = 4
"""A rest ends at the latest when the consumer has taken so many times the rows that were read in it."""
_MOST_HIDDEN_S = 30.0
"""The most seconds of work that rests may hide from an agent before it sees as many seconds again."""
_DRAINED_SHARE = 0.1
"""The waiting rows are not used up if they fall by at most this share of the rows that the consumer takes."""
_ITEMS_BETWEEN_CHECKS = 4
"""The consumer takes at least so many items before one looks whether the waiting rows have fallen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rests:
    """The rests of a consumer so far, such as validations and checkpoints. Each method returns a new state, so that
    other threads may read a state at any moment.

    In a rest the consumer takes no rows, and the pipeline fills its buffers. The next rows then come faster than the
    pipeline makes them. So a rest lasts until no more rows wait in the pipeline than before it, or until the pipeline
    makes rows as fast as the consumer takes them. In the second case, full buffers are their usual state."""

    left_out: Counters = field(default_factory=dict)
    """How much each counter rose in all finished rests."""
    started: Snapshot | None = None
    """The snapshot at which the current rest began. None: there is none."""
    pause: Snapshot | None = None
    """The snapshot since which the consumer asks for no rows. None: it asks for rows."""
    paused: Counters = field(default_factory=dict)
    """How much each counter rose in the finished pauses of the current rest."""
    read: int = 0
    """The number of rows that were read during the current rest."""
    checked: Snapshot | None = None
    """The snapshot at the end of the last pause, or at the last check whether the rest is over."""
    until_rows: int = 0
    """The number of rows at which the rest may be over."""
    hidden_s: float = 0.0
    """The seconds of work that rests have hidden, minus the seconds of work that were seen after them."""
    started_at: float = 0.0
    """When the last rest began, on the agent's clock."""

    def start(self, now: Snapshot) -> Rests:
        """Begins a rest, or continues the current one."""
        if self.started is not None and (
            self.pause is not None or self._hidden_s(now) <= _MOST_HIDDEN_S
        ):
            return replace(self, pause=self.pause or now)
        rests = self if self.started is None else self._end(now)
        seen_s = now.at - rests.left_out.get((_PIPELINE, "at"), 0) - rests.started_at
        return replace(rests, started=now, pause=now, hidden_s=max(0.0, rests.hidden_s - seen_s))

    def resume(self, now: Snapshot) -> Rests:
        """Notes that the consumer asks for rows again."""
        if self.started is None or self.pause is None:
            return self
        read = now.stages[0].rows - self.started.stages[0].rows
        return replace(
            self,
            pause=None,
            paused=_sum(_rises(self.pause, now), self.paused),
            read=read,
            checked=now,
            until_rows=now.rows + _rows_until_check(now, self.started.rows + read - now.rows),
        )

    def may_end(self, rows: int) -> bool:
        """Whether to call `end_or_extend`, now that the consumer has taken `rows` rows."""
        return self.started is not None and self.pause is None and rows >= self.until_rows

    def end_or_extend(self, now: Snapshot) -> Rests:
        """Ends the current rest, or extends it until the surplus rows have been taken. New knobs may keep more rows
        under way for good, so `_MOST_TIMES_READ` and `_MOST_HIDDEN_S` limit a rest."""
        assert self.started is not None, "a rest has started"
        assert self.checked is not None, "its pause has ended"
        too_many = _rows_ahead(now) - _rows_ahead(self.started)
        fell = _rows_ahead(self.checked) - _rows_ahead(now)
        if (
            too_many > _item_rows(now)
            and fell > _DRAINED_SHARE * (now.rows - self.checked.rows)
            and now.rows - self.started.rows < _MOST_TIMES_READ * self.read
            and self._hidden_s(now) <= _MOST_HIDDEN_S
        ):
            until_rows = now.rows + _rows_until_check(now, too_many)
            return replace(self, checked=now, until_rows=until_rows)
        return self._end(now)

    def _hidden_s(self, now: Snapshot) -> float:
        """Returns the seconds of work that would be hidden from an agent if the current rest ended now."""
        assert self.started is not None, "a rest has started"
        return self.hidden_s + now.at - self.started.at - self.paused[_PIPELINE, "at"]

    def _end(self, now: Snapshot) -> Rests:
        """Ends the current rest. The whole rest is hidden, or only its pauses if too much work would be hidden.

        With short epochs and a validation after each, a consumer may take most of its rows in rests. Then its rows come
        in bursts, and the bursts are its true rate."""
        assert self.started is not None, "a rest has started"
        hidden_s = self._hidden_s(now)
        rose = _rises(self.started, now)
        if hidden_s > _MOST_HIDDEN_S:
            hidden_s = self.hidden_s
            rose = self.paused
        left_out = _sum(rose, self.left_out)
        started_at = self.started.at - self.left_out.get((_PIPELINE, "at"), 0)
        return Rests(left_out=left_out, hidden_s=hidden_s, started_at=started_at)

    def hide_rests(self, now: Snapshot) -> Snapshot:
        """Returns the snapshot without the times and rows of rests. Its clock stops during a rest."""
        counters = _counters_of(self.started or now)
        return _with_counters(
            now, {key: value - self.left_out.get(key, 0) for key, value in counters.items()}
        )


def _item_rows(snapshot: Snapshot) -> float:
    return snapshot.stages[0].rows / max(1, snapshot.stages[0].items)


def _rows_until_check(now: Snapshot, too_many: int) -> int:
    """Returns the rows that the consumer takes before the next check: a quarter of the surplus, but some items."""
    return min(too_many, max(too_many // 4, round(_ITEMS_BETWEEN_CHECKS * _item_rows(now))))


def _rows_ahead(snapshot: Snapshot) -> int:
    """Returns how many rows were read but not taken yet."""
    return snapshot.stages[0].rows - snapshot.rows


def _rises(before: Snapshot, after: Snapshot) -> Counters:
    """Returns how much each counter of `after` rose since `before`."""
    old = _counters_of(before)
    return {key: value - old.get(key, 0) for key, value in _counters_of(after).items()}


def _sum(one: Counters, other: Counters) -> Counters:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


def _counters_of(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    counters = {(_PIPELINE, name): getattr(snapshot, name) for name in _PIPELINE_COUNTERS}
    counters |= {
        (stage.name, name): getattr(stage, name)
        for stage in snapshot.stages
        for name in STAGE_COUNTERS
    }
    counters |= {(_REMOTE, name): snapshot.elsewhere.get(name) for name in _REMOTE_COUNTERS}
    return {key: value for key, value in counters.items() if value is not None}


def _with_counters(snapshot: Snapshot, counters: Counters) -> Snapshot:
    def of(owner: str, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: counters[owner, name] for name in names if (owner, name) in counters}

    return replace(
        snapshot,
        stages=tuple(replace(stage, **of(stage.name, STAGE_COUNTERS)) for stage in snapshot.stages),
        elsewhere={**snapshot.elsewhere, **of(_REMOTE, _REMOTE_COUNTERS)},
        **of(_PIPELINE, _PIPELINE_COUNTERS),
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
        self._rests = Rests()  # only the consumer's thread changes it

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
        self._rests = self._rests.start(self._read_counters())
        try:
            yield
        finally:
            self._rests = self._rests.resume(self._read_counters())
            self.enter(phase)

    def count(self, rows: int) -> None:
        """Counts a batch that the consumer has taken."""
        self._batches += 1
        self._rows += rows
        if self._rests.may_end(self._rows):
            self._rests = self._rests.end_or_extend(self._read_counters())
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
        return self._rests.hide_rests(self.counters())

    def counters(self) -> Snapshot:
        """Returns the snapshot of everything since the start, including rests."""
        return self._read_counters(next(self._sequence))

    def _read_counters(self, sequence: int = 0) -> Snapshot:
        now = time.monotonic()
        wait_s, compute_s = self._consumer.totals(now)
        machine, held_back = self._pipeline.machine, self._pipeline.held_back
        return Snapshot(
            at=now,
            sequence=sequence,
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
        }

    def _since(self, before: tuple[int, float, float]) -> tuple[int, float, float]:
        """Returns the rows and the seconds of waiting and of computing since these were the totals."""
        rows, waited_s, computed_s = before
        wait_s, compute_s = self._consumer.totals(time.monotonic())
        return self._rows - rows, wait_s - waited_s, compute_s - computed_s
