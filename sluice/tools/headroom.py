"""Measures what faster loading could bring: consumer alone, loading alone, and both together, with files warm and cold.

This is stall analysis: each part is timed without the other, and the rest is waiting. `report` works with any iterable
of batches. `measure` works with our loader, where it also knows the stages.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.common.errors import UsageError
from sluice.ingest.loader import BatchLoader
from sluice.ingest.row_costs import RowCosts
from sluice.ingest.stats import Snapshot

CACHED = 8  # batches that are used over and over to time the consumer alone
_COUNTS = 0.02  # share of a step; less waiting is noise
_KEEPS_UP = 0.9  # of the consumer's rate, below which loading alone is too slow
_NO_STEP = 100.0  # a gain from which on the consumer alone takes next to no time

Step = Callable[[Any], object]
Clock = Callable[[], float]


class HeadroomError(UsageError):
    """Nothing could be measured. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What one more worker in the busiest stage would bring, according to the stages' costs."""

    stage: str
    workers: int
    predicted: float
    """The predicted rows a second of the pipeline alone."""
    measured: float | None = None
    """The measured rows a second, once it was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Rows a second of each part alone and of both together. `stall` is the share of a step that waits."""

    consumer: float
    loading: float
    together: float
    stall: float
    cold: float | None = None
    """The rate of loading alone with files that are not in memory."""
    slowest: str | None = None
    """The stage whose workers are busiest when nothing but loading runs."""
    idle_cores: float | None = None
    """The number of idle cores while both run."""
    what_if: WhatIf | None = None
    foretold: Mapping[str, float] = field(default_factory=dict)
    """What other changes would bring, in rows a second of both together."""

    @property
    def gain(self) -> float:
        """Returns what the consumer would gain at most if loading cost it nothing, neither waiting nor cores: 0.22 is
        22 %."""
        return max(0.0, self.consumer / self.together - 1.0)

    @property
    def verdict(self) -> str:
        slowest = f"; slowest stage {self.slowest}" if self.slowest else ""
        if self.stall < _COUNTS:
            what, slowest = "consumer-bound: ", ""
        elif self._prepare > self._both or self.loading < _KEEPS_UP * self.consumer:
            what = "input-bound: "
        else:
            nearly = "nearly " if self.loading < self.consumer else ""
            what = f"balanced: loading alone {nearly}keeps up, but together "
        best = (
            f"a faster loader brings at best +{self.gain:.0%}"
            if self.gain < _NO_STEP
            else "the consumer alone takes next to no time"
        )
        line = f"{what}{self.stall:.0%} of each step waits{slowest}; {best}"
        if self.idle_cores is None:
            return line
        idle = f"{self.idle_cores:.1f}".removesuffix(".0")
        return f"{line}; {idle} {'core' if idle == '1' else 'cores'} idle"

    @property
    def _prepare(self) -> float:
        """Returns the stall of preparing: the seconds a row that loading takes beyond the consumer."""
        return max(0.0, 1 / self.loading - 1 / self.consumer)

    @property
    def _both(self) -> float:
        """Returns the seconds a row that both together take beyond the slower one. They share cores, or take turns."""
        return max(0.0, 1 / self.together - max(1 / self.loading, 1 / self.consumer))

    @property
    def shares(self) -> str:
        """Returns how the time of a step is spent while both run. The parts add up, and the waiting is that of the
        verdict."""
        waits, alone = round(100 * self.stall), round(100 * self.together / self.consumer)
        slower = min(waits, round(100 * self.together * self._prepare))
        slowed = max(0, 100 - waits - alone)
        computing = f"computing {100 - waits}%" + (
            f" ({slowed}% as loading slows it)" if slowed else ""
        )
        return (
            computing
            if not waits
            else (
                f"{computing}, waiting {waits}% ({slower}% as loading is slower, {waits - slower}% in each other's way)"
            )
        )

    def __str__(self) -> str:
        """Formats a table whose first line is the verdict."""
        rows: list[tuple[str, float | None]] = [
            ("consumer alone, on cached batches", self.consumer),
            ("loading alone", self.loading),
            ("loading alone, files not in memory", self.cold),
            ("both together", self.together),
        ]
        said = (
            {"consumer alone, on cached batches": f"{'next to no time':>21}"}
            if self.gain >= _NO_STEP
            else {}
        )
        lines = [
            self.verdict,
            *(
                f"  {name:36} {said.get(name) or f'{rate:14,.0f} rows/s'}"
                for name, rate in rows
                if rate is not None
            ),
        ]
        lines.append(f"  of a step's time: {self.shares}")
        if self.what_if is not None:
            tried = (
                "" if self.what_if.measured is None else f" (tried: {self.what_if.measured:,.0f})"
            )
            lines.append(
                f"  with {self.what_if.workers} workers in {self.what_if.stage}: loading alone "
                f"{self.what_if.predicted:,.0f} rows/s{tried}"
            )
        lines += [
            f"  predicted for both together, with {what}: {rate:,.0f} rows/s"
            for what, rate in self.foretold.items()
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        what_if = self.what_if and {name: getattr(self.what_if, name) for name in WhatIf.__slots__}
        return {
            "verdict": self.verdict,
            "gain": round(self.gain, 4),
            "stall_fraction": round(self.stall, 4),
            "consumer_rows_per_s": round(self.consumer),
            "loading_rows_per_s": round(self.loading),
            "together_rows_per_s": round(self.together),
            "cold_rows_per_s": self.cold and round(self.cold),
            "slowest": self.slowest,
            "idle_cores": self.idle_cores,
            "what_if": what_if,
            "foretold_rows_per_s": {what: round(rate) for what, rate in self.foretold.items()},
        }


def rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch of any loader: its `rows`, or the length of its first part that has one."""
    if isinstance(getattr(batch, "rows", None), int):
        return int(batch.rows)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise HeadroomError("an empty batch")
        return (
            rows_of(batch[0]) if not isinstance(batch[0], (int, float, str, bytes)) else len(batch)
        )
    try:
        return len(batch)
    except TypeError:
        raise HeadroomError(f"a batch of type {type(batch).__name__} has no length") from None


def timed(batches: Iterator[Any], step: Step, seconds: float, clock: Clock) -> tuple[float, float]:
    """Returns the rows a second and the share of the time spent waiting, from the first batch on."""
    next(batches, None)  # the time of starting is not counted
    rows, waited = 0, 0.0
    began = asked = clock()
    for batch in batches:
        got = clock()
        waited += got - asked
        step(batch)
        rows += rows_of(batch)
        asked = clock()
        if asked - began >= seconds:
            break
    if not rows:
        raise HeadroomError("there are fewer than two batches to time")
    spent = max(asked - began, 1e-9)
    return rows / spent, waited / spent


def report(
    loader: Iterable[Any],
    step: Step | None = None,
    *,
    seconds: float = 5.0,
    clock: Clock = time.perf_counter,
) -> Headroom:
    """Measures the headroom of any iterable of batches, which is iterated three times. Without a `step`, all time is
    loading."""
    work: Step = step or (lambda batch: None)
    cached = list(itertools.islice(_endless(loader), CACHED))
    if not cached:
        raise HeadroomError("the loader gave no batch")
    consumer, _ = timed(itertools.cycle(cached), work, seconds, clock)
    del cached
    loading, _ = timed(_endless(loader), lambda batch: None, seconds, clock)
    together, stall = timed(_endless(loader), work, seconds, clock)
    return Headroom(consumer=consumer, loading=loading, together=together, stall=stall)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return


def measure(
    loader: BatchLoader,
    step: Step,
    *,
    seconds: float = 5.0,
    files: Iterable[str] = (),
    clock: Clock = time.perf_counter,
) -> Headroom:
    """Measures the headroom of our loader, with the stages' names, the effect of another worker, and `files` warm and
    cold.

    Afterwards the loader's knobs are as before.
    """
    cold = None
    if files := list(files):
        forget(files)
        cold, _ = timed(_endless(loader), lambda batch: None, seconds, clock)
    found = report(loader, step, seconds=seconds, clock=clock)

    def paced(step: Step) -> tuple[float, float, Snapshot, Snapshot]:
        before = loader.snapshot()
        rate, stall = timed(_endless(loader), step, seconds, clock)
        return rate, stall, before, loader.snapshot()

    def head(name: str) -> str:
        return loader.limits.head(knobs, name)

    knobs = loader.knobs
    _, _, before, after = paced(lambda batch: None)
    alone = RowCosts.between(before, after, head=head)
    name, measured = alone.narrowest, None
    workers = knobs.workers[name] + 1
    predicted = found.loading * alone.rate(alone.with_workers(name, workers)) / alone.measured
    if workers <= loader.limits.workers[name][1]:
        loader.apply(knobs.with_workers(**{name: workers}))
        measured, *_ = paced(lambda batch: None)
        loader.apply(knobs)
    together, stall, before, after = paced(step)
    step_s = 1 / found.consumer
    more_s = RowCosts.between(before, after, head=head).other_cpu_s - alone.other_cpu_s
    pace = RowCosts.between(
        before, after, head=head, step_s=step_s, step_cpu_s=min(max(0.0, more_s), step_s)
    )
    used = (after.cpu_used_s - before.cpu_used_s) / max(after.at - before.at, 1e-9)
    return Headroom(
        consumer=found.consumer,
        loading=found.loading,
        together=together,
        stall=stall,
        cold=cold,
        slowest=name,
        idle_cores=round(max(0.0, after.cpu_quota - used), 2),
        foretold=pace.cases(),
        what_if=WhatIf(stage=name, workers=workers, predicted=predicted, measured=measured),
    )


def forget(files: Iterable[str]) -> None:
    """Asks the kernel to drop local files from its cache. Pages that others use stay."""
    for path in files:
        if "://" in path:
            continue
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)
