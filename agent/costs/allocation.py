"""Max–min: the fewest workers that lift the slowest stage as far as cores, memory and demand allow. Pure and exact."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """One stage: how many workers it may have, how fast they are, and how many bytes they hold."""

    name: str
    least: int
    most: int
    capacity: Callable[[int], float]
    """Number of workers → rows a second. The curve need not rise all the way."""
    worker_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    workers: Mapping[str, int]
    rows_per_s: float
    """The rate of the slowest stage, at most `enough`."""


def allocate(requests: Sequence[StageRequest], *, enough: float = math.inf, memory: float = math.inf) -> Allocation:
    """Finds the highest rate up to `enough` whose workers fit in `memory`, with the fewest workers for it.

    A rate needs of each stage the smallest number of workers that reaches it, so what fits at a rate fits at each
    lower one: a search over the rates that occur finds the best. If not even the lowest fits, each gets its least."""
    curves = {r.name: [r.capacity(n) for n in range(r.least, r.most + 1)] for r in requests}
    peaks = [max(curve) for curve in curves.values()]
    top = min([enough, *peaks])
    rates = sorted({rate for curve in curves.values() for rate in curve if rate < top} | {top})

    def workers_for(rate: float) -> dict[str, int]:
        return {r.name: r.least + next(i for i, c in enumerate(curves[r.name]) if c >= rate) for r in requests}

    def too_large(rate: float) -> bool:
        needed = workers_for(rate)
        return sum(needed[r.name] * r.worker_bytes for r in requests) > memory

    fitting = bisect.bisect_left(rates, True, key=too_large)
    workers = workers_for(rates[fitting - 1]) if fitting else {r.name: r.least for r in requests}
    slowest = min(curves[r.name][workers[r.name] - r.least] for r in requests)
    return Allocation(workers=workers, rows_per_s=min(slowest, enough))
