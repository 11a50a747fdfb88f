"""What a rank's consumer did so far, and the pipeline that serves it, as an agent sees them: `Progress`.

It knows nothing of the loader, so that a loader that is forgotten can go while an agent still looks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.machine import Machine
from sluice.ingest.stats import Snapshot

if TYPE_CHECKING:
    from sluice.ingest.pipeline import Pipeline
    from sluice.ingest.read.petastorm.row_groups import RowGroupStage


class _Consumer(NamedTuple):
    phase: str
    began: float
    wait_s: float
    compute_s: float

    def totals(self, now: float) -> tuple[float, float]:
        """Returns the seconds of waiting and of computing so far."""
        spent = max(0.0, now - self.began)  # a snapshot may have read the clock just before
        return (self.wait_s + spent * (self.phase == "wait"), self.compute_s + spent * (self.phase == "compute"))


class Progress:
    """The counters of one rank's loading, and its knobs: what a tuning loop looks at and turns."""

    def __init__(self, pipeline: Pipeline | RowGroupStage, machine: Machine, memory_limit: int | None,
                 elsewhere: Callable[[], Mapping[str, float]] = dict):
        """`memory_limit` is the user's; the machine's counts if it is lower. `elsewhere` counts what workers on other
        hosts did."""
        self._elsewhere = elsewhere
        self._pipeline, self._machine, self._limit = pipeline, machine, memory_limit
        self._batches = self._rows = 0
        self._sequence = itertools.count()
        # What the consumer does, since when, and what it did before: one tuple, so that a snapshot sees one moment.
        self._consumer = _Consumer("away", 0.0, 0.0, 0.0)
        self._first: tuple[int, float, float] | None = None  # rows and totals when the first batch had come

    def enter(self, phase: str) -> None:
        """Notes that the consumer begins to `wait` or to `compute`, or is `away` between two epochs."""
        now = time.monotonic()
        self._consumer = _Consumer(phase, now, *self._consumer.totals(now))

    def count(self, rows: int) -> None:
        """Counts a batch, which is the consumer's from now on."""
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
        """The limit that is in force now."""
        return self._machine.memory_limit(self._limit)

    def snapshot(self) -> Snapshot:
        now = time.monotonic()
        wait_s, compute_s = self._consumer.totals(now)
        machine, held_back = self._machine, self._pipeline.held_back
        return Snapshot(
            at=now, sequence=next(self._sequence), stages=self._pipeline.stats(), batches=self._batches,
            rows=self._rows, consumer_wait_s=wait_s, consumer_compute_s=compute_s,
            memory_used=machine.memory_used(), memory_limit=self.memory_limit(),
            cpu_quota=machine.cores(), cpu_used_s=machine.cpu_used_s(), cores_idle_s=machine.cores_idle_s(),
            held_back=held_back.total(), held_back_pressure=held_back["pressure"],
            elsewhere=dict(self._elsewhere()))

    def outcome(self) -> dict[str, Any]:
        """The rows that came, their rate and the share of the time spent waiting: from the first batch on, or, of what
        took no longer than that took to come, from when it was asked for."""
        wait_s, compute_s = self._consumer.totals(time.monotonic())
        rows, waited, computed = self._first or (self._rows, wait_s, compute_s)
        if wait_s + compute_s < 2 * (waited + computed):
            rows = waited = computed = 0
        seconds = wait_s + compute_s - waited - computed
        return {"rows": self._rows, "rows_per_s": round((self._rows - rows) / seconds) if seconds > 0 else None,
                "stall_fraction": round((wait_s - waited) / seconds, 4) if seconds > 0 else None}
