"""Finds the best setting of a pipeline whose true costs are known. The oracles use it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from sluice.agent.lab.simulator.flow import Flow, steady
from sluice.agent.lab.simulator.physics import TrueCosts, memory_need
from sluice.ingest.knobs import Knobs, Limits

_MIN_GAIN = 1e-3  # A smaller gain, as a share of the rate, counts as none.
# Buffers that hold this much smooth the variation of items.
_AHEAD_ITEMS = 4
_AHEAD_BATCHES = 8


class _Search:
    """The search for the best numbers of workers, with the rates that it has computed."""

    def __init__(
        self, truth: TrueCosts, limits: Limits, also: Sequence[TrueCosts], fill: float
    ) -> None:
        self.truth = truth
        self.fill = fill
        # Most of these are the same object, and each is checked once.
        self.also = list(dict.fromkeys((truth, *also)))
        self.names = [s.name for s in truth.stages]
        self.range = [limits.workers[n] for n in self.names]
        self.limits = limits
        self.shares = [
            s.burst_s / (s.burst_s + s.burst_every_s) if s.burst_every_s else 0.0
            for s in truth.stages
        ]
        self.rated: dict[tuple[tuple[int, ...], tuple[str, ...]], float] = {}

    def steady(
        self, workers: Sequence[int], backends: Sequence[str], bursts: Sequence[float] = ()
    ) -> Flow:
        return _steady(self.truth, tuple(workers), tuple(backends), tuple(bursts))

    def buffers(self, truth: TrueCosts, workers: Sequence[int]) -> tuple[int, int]:
        """Returns the bytes of read-ahead and prefetch that smooth variation: at most an eighth of the memory each."""
        first = truth.stages[truth.decoding]
        last = truth.stages[-1]
        most = truth.machine.memory_limit / 8
        low_a, high_a = self.limits.read_ahead_bytes
        low_p, high_p = self.limits.prefetch_bytes
        ahead = min(
            most,
            (_AHEAD_ITEMS + workers[truth.decoding]) * first.rows_per_item * first.bytes_per_row,
        )
        fetch = min(
            most,
            _AHEAD_BATCHES
            * max(truth.consumer.batch_rows, last.rows_per_item)
            * last.bytes_per_row,
        )
        return (min(max(int(ahead), low_a), high_a), min(max(int(fetch), low_p), high_p))

    def fits(self, workers: Sequence[int], backends: Sequence[str], flow: Flow) -> bool:
        """Returns whether the memory is enough.

        Each busy worker holds an item, and the queues before the slowest stage are full."""
        slowest = max((i for i, busy in enumerate(flow.busy) if busy > 0.98), default=0)
        for truth in self.also:
            sizes = [s.buffer_items * s.rows_per_item * s.bytes_per_row for s in truth.stages]
            sizes[truth.decoding], sizes[-1] = self.buffers(truth, workers)
            queues = sum(
                size if i < slowest else 0.5 * s.held_bytes
                for i, (size, s) in enumerate(zip(sizes, truth.stages, strict=True))
            )
            at_work = [n * busy for n, busy in zip(workers, flow.busy, strict=False)]
            idle = sum(
                (n - a) * s.process_bytes * (b == "process")
                for n, a, s, b in zip(workers, at_work, truth.stages, backends, strict=True)
            )
            if (
                memory_need(truth, at_work, backends, queues) + idle
                > self.fill * truth.machine.memory_limit
            ):
                return False
        return True

    def rate(self, workers: Sequence[int], backends: Sequence[str]) -> float:
        """Returns the rows a second, averaged over bursts. Negative if the memory is too small."""
        key = (tuple(workers), tuple(backends))
        if key not in self.rated:
            flow = self.steady(workers, backends)
            if not self.fits(workers, backends, flow):
                self.rated[key] = -float(sum(workers))
            else:
                value = flow.rates[-1]
                for i, share in enumerate(self.shares):
                    if share:
                        bursts = [
                            s.burst_factor if j == i else 1.0
                            for j, s in enumerate(self.truth.stages)
                        ]
                        value -= share * (
                            flow.rates[-1] - self.steady(workers, backends, bursts).rates[-1]
                        )
                self.rated[key] = value
        return self.rated[key]

    def grow(self, workers: list[int], backends: list[str]) -> float:
        """Adds workers to the slowest stage while that helps."""
        best = self.rate(workers, backends)
        exhausted: set[int] = set()
        while len(exhausted) < len(workers):
            busy = self.steady(workers, backends).busy
            i = max((i for i in range(len(workers)) if i not in exhausted), key=lambda i: busy[i])
            if busy[i] < 0.98:
                break
            more = min(self.range[i][1], workers[i] + max(1, workers[i] // 4))
            tried = _with(workers, i, more)
            value = self.rate(tried, backends)
            if _better(value, best):
                workers[:] = tried
                best = value
                exhausted.clear()
            elif (
                more < self.range[i][1]
                and value > best - _MIN_GAIN * abs(best)
                and sum(b > 0.98 for b in busy[:-1]) > 1
            ):
                # This is one of several equally slow stages, so the rate rises once all of them have grown.
                workers[:] = tried
                best = max(best, value)
                exhausted.add(i)
            else:
                exhausted.add(i)
        return best

    def polish(self, workers: list[int], backends: list[str], best: float) -> float:
        """Improves `workers` in place by single steps and by moves between stages, and returns the best rate.

        It ends when no step helps, and then removes workers that are not needed."""
        improved = True
        while improved:
            improved = False
            for i, (low, high) in enumerate(self.range):
                present, step = workers[i], workers[i] // 5
                for count in {
                    present - 1,
                    present + 1,
                    present // 2,
                    present * 2,
                    present - step,
                    present + step,
                }:
                    tried = _with(workers, i, min(max(count, low), high))
                    value = self.rate(tried, backends)
                    if _better(value, best):
                        workers[:] = tried
                        best = value
                        improved = True
            for i, j in itertools.permutations(range(len(workers)), 2) if not improved else ():
                for up, down in ((1, 1), (1 + workers[i] // 5, workers[j] // 2)):
                    tried = list(workers)
                    tried[i] = min(workers[i] + up, self.range[i][1])
                    tried[j] = max(workers[j] - down, self.range[j][0])
                    value = self.rate(tried, backends)
                    if _better(value, best):
                        workers[:] = tried
                        best = value
                        improved = True
        for i, (low, _) in enumerate(self.range):
            while workers[i] > low:
                step = max(1, workers[i] // 8)
                tried = _with(workers, i, max(low, workers[i] - step))
                if self.rate(tried, backends) < best * (1 - _MIN_GAIN):
                    step = 1
                    tried = _with(workers, i, workers[i] - 1)
                    if self.rate(tried, backends) < best * (1 - _MIN_GAIN):
                        break
                workers[:] = tried
        return best

    def headroom(self, workers: list[int], backends: list[str], best: float) -> None:
        """Adds a tenth more workers where that costs nothing, because the cost of items varies."""
        for i, (_, high) in enumerate(self.range):
            tried = _with(workers, i, min(high, math.ceil(workers[i] * 1.1)))
            busy_with_more = self.steady(tried, backends).busy[i]
            busy = self.steady(workers, backends).busy[i]
            if busy_with_more < busy and self.rate(tried, backends) >= best * (1 - _MIN_GAIN):
                workers[:] = tried


def best_knobs(
    truth: TrueCosts,
    limits: Limits,
    *,
    also: Sequence[TrueCosts] = (),
    start_from: Knobs | None = None,
    fill: float = 0.95,
) -> Knobs:
    """Returns the knobs with the highest steady rate, in `truth` and in each of `also`.

    They fill at most the share `fill` of the memory. Among equal rates they have the fewest workers, and a little
    headroom. The search also starts from `start_from`."""
    search = _Search(truth, limits, also, fill)
    names = search.names
    starts = [[low for low, _ in search.range]]
    if start_from is not None:
        starts.append([start_from.workers[n] for n in names])
    best, chosen = -math.inf, (starts[0], [s.backends[0] for s in truth.stages])
    for backends in _back_ends(truth):
        for start in starts:
            workers, kinds = list(start), list(backends)
            value = search.polish(workers, kinds, search.grow(workers, kinds))
            if _better(value, best):
                best, chosen = value, (workers, kinds)
    workers, kinds = chosen
    search.headroom(workers, kinds, best)
    ahead, fetch = search.buffers(min(search.also, key=lambda t: t.machine.memory_limit), workers)
    return limits.clamp(
        Knobs(
            workers=dict(zip(names, workers, strict=True)),
            backend=dict(zip(names, kinds, strict=True)),
            read_ahead_bytes=ahead,
            prefetch_bytes=fetch,
        )
    )


@functools.lru_cache(maxsize=2**14)
def _steady(
    truth: TrueCosts, workers: tuple[int, ...], backends: tuple[str, ...], bursts: tuple[float, ...]
) -> Flow:
    """Returns the settled rates. It keeps results, because the oracles need the same ones many times."""
    return steady(truth, workers, backends, bursts)


def _with(workers: Sequence[int], i: int, count: int) -> list[int]:
    """Returns the workers with another number in one stage."""
    return [*workers[:i], count, *workers[i + 1 :]]


def _better(value: float, best: float) -> bool:
    return value > best + _MIN_GAIN * abs(best) if math.isfinite(best) else True


def _back_ends(truth: TrueCosts) -> list[list[str]]:
    """Returns the choices to try: first back ends, then one stage on its other back end, then all of them."""
    plain = [s.backends[0] for s in truth.stages]
    free = [i for i, s in enumerate(truth.stages) if len(s.backends) > 1]
    choices = [plain]
    for group in [[i] for i in free] + ([free] if len(free) > 1 else []):
        choices.append(
            [s.backends[1] if i in group else s.backends[0] for i, s in enumerate(truth.stages)]
        )
    return choices
