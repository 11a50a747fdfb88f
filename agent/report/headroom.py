"""Measures what faster loading could bring: the consumer alone, loading alone, and both together.

This is stall analysis: each part is timed without the other, and the rest is waiting. It works with any iterable of
batches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sluice.common.errors import UsageError

CACHED = 8  # batches that are used over and over to time the consumer alone
NOISE = 0.02  # share of a step; less waiting is noise
_KEEPS_UP = 0.9  # of the consumer's rate, below which loading alone is too slow
NO_STEP = 100.0  # a gain from which on the consumer alone takes next to no time

Step = Callable[[Any], object]
Clock = Callable[[], float]


class HeadroomError(UsageError):
    """Nothing could be measured. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Batches a second of each part alone and of both together. `stall` is the share of a step that waits."""

    consumer: float
    loading: float
    together: float
    stall: float

    @property
    def gain(self) -> float:
        """Returns what the consumer would gain at most if loading cost it nothing, neither waiting nor cores: 0.22 is
        22 %."""
        return max(0.0, self.consumer / self.together - 1.0)

    @property
    def verdict(self) -> str:
        nearly = "nearly " if self.loading < self.consumer else ""
        what = f"balanced: loading alone {nearly}keeps up, but together "
        if self.stall < NOISE:
            what = "consumer-bound: "
        elif self.loading < _KEEPS_UP * self.consumer:
            what = "input-bound: "
        best = (
            f"a faster loader brings at best +{self.gain:.0%}"
            if self.gain < NO_STEP
            else "the consumer alone takes next to no time"
        )
        return f"{what}{self.stall:.0%} of each step waits; {best}"

    def __str__(self) -> str:
        """Formats a table whose first line is the verdict."""
        return (
            f"{self.verdict}\n"
            f"  consumer alone, on cached batches    {self.consumer:14,.4g} batches/s\n"
            f"  loading alone                        {self.loading:14,.4g} batches/s\n"
            f"  both together                        {self.together:14,.4g} batches/s"
        )


def timed(batches: Iterator[Any], step: Step, seconds: float, clock: Clock) -> tuple[float, float]:
    """Returns the batches a second and the share of the time spent waiting, from the first batch on."""
    next(batches, None)  # the time of starting is not counted
    taken, waited = 0, 0.0
    began = asked = clock()
    for batch in batches:
        got = clock()
        waited += got - asked
        step(batch)
        taken += 1
        asked = clock()
        if asked - began >= seconds:
            break
    if not taken:
        raise HeadroomError("there are fewer than two batches to time")
    spent = max(asked - began, 1e-9)
    return taken / spent, waited / spent


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
