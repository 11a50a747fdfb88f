"""The settings among which the tuner chooses: `candidates`. Pure.

To go back to an earlier setting is a candidate like any other. No candidate needs more memory than is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from sluice.agent.costs.forecast import Forecast
from sluice.agent.tuner.outlook import Outlook
from sluice.ingest.knobs import Knobs
from sluice.ingest.machine import WORKER_PROCESS_BYTES

_HELD = 0.03  # of the time: a stage that holds the lock less gains nothing in processes


def candidates(seen: Outlook) -> Iterator[tuple[str, Knobs]]:
    """Yields settings with their names. Some may be equal."""
    bounded = seen.moved()
    hopeful = seen.moved(favour=seen.settings.favour)
    yield "rate", bounded.best(seen.ranges, fewest=False)[0]
    yield "hope", hopeful.best(seen.ranges, fewest=False)[0]
    bottleneck = seen.bottleneck
    if bottleneck in ("lock", "cores"):
        yield "few", bounded.best(seen.ranges, fewest=True)[0]
    for earlier in seen.state.before:
        if earlier.workers.keys() == seen.knobs.workers.keys() and _fits(seen, earlier):
            yield "back", earlier
    yield from _steps(seen, _limiting(seen, bottleneck))
    yield from _layouts(seen)


def _limiting(seen: Outlook, bottleneck: str) -> str:
    """Returns the stage that limits the rate, or the one that takes most of the cores or of the lock."""
    if bottleneck in seen.knobs.workers:
        return bottleneck
    if bottleneck == "lock" and (holder := seen.holder()) is not None:
        return holder
    stages = seen.recent.stages
    return max(seen.ranges, key=lambda n: stages[n].cpu if n in stages else 0.0)


def _steps(seen: Outlook, name: str) -> Iterator[tuple[str, Knobs]]:
    """Yields a few more and a few less workers of one stage."""
    now = seen.knobs.workers[name]
    least, most = seen.ranges.get(name, seen.limits.workers[name])
    for kind, count in (
        *(("more", n) for n in (now + 1, math.ceil(1.5 * now), 2 * now)),
        *(("fewer", n) for n in (now - 1, math.floor(now / 1.5), now // 2)),
    ):
        wanted = seen.knobs.with_workers(**{name: min(max(count, least), most)})
        knobs = seen.forecast.with_buffers(wanted.workers)
        if knobs.workers[name] < now or (knobs.workers[name] > now and _fits(seen, knobs)):
            yield kind, knobs


def _fits(seen: Outlook, knobs: Knobs) -> bool:
    """Whether knobs need no more memory than is admitted, or than is in use already."""
    forecast = seen.forecast
    most = max(forecast.most_bytes, forecast.memory(seen.knobs))
    return replace(forecast, knobs=knobs).memory(knobs) <= most


def _layouts(seen: Outlook) -> Iterator[tuple[str, Knobs]]:
    """Yields each stage on its other back end, and growing sets of the lock's holders in processes."""
    forecast, limits, stages = seen.forecast, seen.limits, seen.recent.stages
    movable = [n for n, stage in seen.known.items() if limits.movable(n, stage.backend)]
    for name in movable:
        if seen.known[name].backend == "process":
            yield from _best_of("threads", seen, [name])
    if seen.recent.cpu_quota <= 1:
        return
    held = {
        n: seen.state.lock.share(n) * stages[n].cpu
        for n in movable
        if seen.known[n].backend == "thread"
    }
    holders = sorted((n for n in held if held[n] >= _HELD), key=lambda n: -held[n])
    tried: list[list[str]] = [[name] for name in holders]
    tried += [holders[:count] for count in range(2, len(holders) + 1)]
    for group in tried:
        needed = sum(2 * (seen.process_bytes(n) or WORKER_PROCESS_BYTES) for n in group)
        if needed <= forecast.free_bytes:
            yield from _best_of("processes", seen, group)


def _best_of(kind: str, seen: Outlook, group: list[str]) -> Iterator[tuple[str, Knobs]]:
    """Yields the best numbers of workers with these stages on their other back ends."""
    shape: Forecast = seen.moved(group)
    ranges = dict(seen.ranges)
    for name in group:
        least, most = seen.limits.workers[name]
        ranges[name] = (least, max(least, min(most, max(2, math.ceil(shape.cores)))))
    for fewest in (False, True):
        knobs, _ = shape.best(ranges, fewest=fewest)
        if replace(shape, knobs=knobs).fits(knobs):
            yield kind, knobs
