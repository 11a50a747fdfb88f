"""Fits a simulated pipeline to measurements of a live one: `fit`.

The cost of a stage's item comes from its useful time and processor time. How that cost grows with the stage's
workers comes from the settings at which they worked side by side: each further worker adds a share of waiting,
or there is a cliff beyond some number of workers. Work that the governor held back for memory becomes a cliff,
or a cap on reading. Three things are fitted last: how much dearer a row is when all cores work, from processor
time; what switching wastes; and what the fluid's ideal hand-over leaves out, both from the rates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage, TrueCosts, steady
from sluice.common.errors import UsageError
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot

_SMT = tuple(
    1 - 0.05 * i for i in range(17)
)  # what a core's second thread is worth; if unknown, all of it
_SIGMA = tuple(0.02 * i for i in range(51))
_SWITCH = (0.0, 0.02, 0.05, 0.1, 0.2)
_SLACK = (0.85, 1.3)  # the limits of the factor by which rates may correct the costs
_SIMPLER = 2.0  # times better than a slope alone a cliff has to fit
_CROWDED = (
    0.5  # share of a stage's workers that must be at work to show how they disturb each other
)
_LEAST_S = 1e-6
_IN_HAND = 1.5  # times an item's bytes that a worker holds: its output, and part of its input


class CalibrationError(UsageError):
    """Sightings that say nothing: the message says of what."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A measurement of a live pipeline with one setting, from one moment to another."""

    knobs: Knobs
    before: Snapshot
    after: Snapshot

    @property
    def seen(self) -> PipelineRates:
        measured = rates(self.before, self.after)
        if measured is None or measured.rows_per_s <= 0:
            raise CalibrationError(f"no rows came with {self.knobs}; measure longer")
        return measured

    @property
    def held(self) -> bool:
        """Whether work waited for memory during the measurement."""
        return self.after.held_back > self.before.held_back


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of a stage's item at one setting."""

    workers: float
    """How many workers were at work at the same time, on average."""
    cpu_s: float
    wait_s: float
    crowd: float
    """The share of the cores that were at work."""

    @property
    def busy_s(self) -> float:
        return self.cpu_s + self.wait_s


def fit(sightings: Sequence[Sighting]) -> TrueCosts:
    """Returns the true costs that come nearest to these sightings. All must have the same back ends."""
    free = [
        s for s in sightings if not s.held
    ] or sightings  # held-back settings say something of memory alone
    costs = {
        s.name: [_cost(sighting, s.name) for sighting in free] for s in sightings[0].after.stages
    }
    smt = min(
        _SMT,
        key=lambda value: sum(_cpu_error(stage_costs, value) for stage_costs in costs.values()),
    )
    stages = tuple(
        _stage(name, [_alone(c, smt) for c in stage_costs], free)
        for name, stage_costs in costs.items()
    )
    machine = SimMachine(
        cores=sightings[-1].after.cpu_quota,
        smt=smt,
        timer_noise=0.0,
        switch_cost=0.0,
        memory_limit=float(sightings[-1].after.memory_limit),
        base_bytes=_base(sightings),
    )
    return _fitted(TrueCosts(machine, _governed(stages, sightings), _consumer(sightings)), free)


def _cost(sighting: Sighting, name: str) -> _Cost:
    before, after = sighting.before.stage(name), sighting.after.stage(name)
    seen = sighting.seen
    items = max(1, after.items - before.items)
    cpu = max(0.0, after.cpu_s - before.cpu_s)
    busy = max(
        after.busy_s - before.busy_s - (after.core_wait_s - before.core_wait_s), cpu, _LEAST_S
    )
    workers = min(float(sighting.knobs.workers[name]), max(1.0, busy / seen.seconds))
    if workers < _CROWDED * sighting.knobs.workers[name]:
        workers = 1.0
    return _Cost(workers, cpu / items, (busy - cpu) / items, min(1.0, seen.cpu / seen.cpu_quota))


def _dearer(crowd: float, smt: float) -> float:
    """The factor on processor time when such a share of the cores works, as the simulator computes it."""
    return 1 + max(0.0, 2 * crowd - 1) * (2 / (1 + smt) - 1)


def _cpu_error(costs: Sequence[_Cost], smt: float) -> float:
    """How much a stage's processor time differs between settings, once corrected; a stage counts by its share of the
    time."""
    alone = [c.cpu_s / _dearer(c.crowd, smt) for c in costs if c.cpu_s > 0]
    if len(alone) < 2:
        return 0.0
    centre = _mean(alone)
    return sum(math.log(a / centre) ** 2 for a in alone) * centre


def _alone(cost: _Cost, smt: float) -> _Cost:
    return replace(cost, cpu_s=cost.cpu_s / _dearer(cost.crowd, smt))


def _stage(name: str, costs: Sequence[_Cost], sightings: Sequence[Sighting]) -> SimStage:
    curve = _curve(costs)
    cost_s = max(curve.cost_s, _LEAST_S)
    counters = [(s.before.stage(name), s.after.stage(name)) for s in sightings]
    items = sum(b.items - a.items for a, b in counters) or 1
    rows = sum(b.rows - a.rows for a, b in counters) or 1
    size = sum(b.bytes - a.bytes for a, b in counters)
    return SimStage(
        name=name,
        cost_s=cost_s,
        cpu=min(1.0, _mean([max(c.cpu_s, _LEAST_S) for c in costs]) / cost_s),
        sigma=curve.sigma,
        cliff_workers=curve.cliff,
        cliff_factor=curve.factor,
        rows_per_item=max(1.0, rows / items),
        bytes_per_row=size / rows,
        item_bytes=_IN_HAND * size / items,
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    cost_s: float
    sigma: float = 0.0
    cliff: int = 0
    factor: float = 1.0
    error: float = 0.0


def _curve(costs: Sequence[_Cost]) -> _Curve:
    """The cost of an item as the number of workers at work grows: a slope, or a slope with a cliff where that fits far
    better."""
    slope = _sloping(costs, 0)
    at_work = sorted(round(c.workers) for c in costs)
    cliffs = [
        _sloping(costs, n) for n in sorted(set(at_work)) if n < at_work[-min(2, len(at_work))]
    ]
    steep = min(cliffs, key=lambda c: c.error, default=slope)
    return steep if _SIMPLER * steep.error + 1e-3 < slope.error else slope


def _sloping(costs: Sequence[_Cost], cliff: int) -> _Curve:
    """The best slope, if settings with more than `cliff` workers at work (0: none) pay a factor."""
    best = None
    for sigma in _SIGMA:
        flat = [
            (round(c.workers) > cliff > 0, c.busy_s / (1 + sigma * (c.workers - 1))) for c in costs
        ]
        low, high = [b for beyond, b in flat if not beyond], [b for beyond, b in flat if beyond]
        if not low:
            continue
        factor = max(1.0, _mean(high) / _mean(low)) if high else 1.0
        error = sum(math.log(b / _mean(low)) ** 2 for b in low) + sum(
            math.log(b / (factor * _mean(low))) ** 2 for b in high
        )
        if best is None or error < best.error - 1e-9:
            best = _Curve(_mean(low), sigma, cliff if factor > 1 else 0, factor, error)
    assert best is not None, "some setting has fewest at work"
    return best


def _consumer(sightings: Sequence[Sighting]) -> Consumer:
    """The consumer: its step, and the processor time that no stage accounts for."""
    batches = sum(s.after.batches - s.before.batches for s in sightings) or 1
    rows = sum(s.after.rows - s.before.rows for s in sightings)
    step = (
        sum(s.after.consumer_compute_s - s.before.consumer_compute_s for s in sightings) / batches
    )
    other = (
        max(
            0.0,
            sum(s.after.cpu_used_s - s.before.cpu_used_s for s in sightings)
            - sum(
                b.cpu_s - a.cpu_s
                for s in sightings
                for a, b in zip(s.before.stages, s.after.stages, strict=True)
            ),
        )
        / batches
    )
    step = max(step, _LEAST_S)
    return Consumer(
        batch_rows=max(1, round(rows / batches)),
        step_s=step,
        cpu=min(1.0, other / step),
        cores=max(1.0, other / step),
    )


def _governed(stages: tuple[SimStage, ...], sightings: Sequence[Sighting]) -> tuple[SimStage, ...]:
    """Adds the governor's effect. With more readers than the most that memory never held back, reading is as slow as it
    was measured there; where memory always held it back, reading is capped."""
    first = stages[0].name
    held, free = [s for s in sightings if s.held], [s for s in sightings if not s.held]
    if not held:
        return stages
    if not free:
        return (
            replace(stages[0], cap_rows_per_s=max(s.seen.rows_per_s for s in held)),
            *stages[1:],
        )
    most = max(s.knobs.workers[first] for s in free)
    each = [
        _mean([s.seen.rows_per_s / s.knobs.workers[first] for s in some])
        for some in ([s for s in free if s.knobs.workers[first] == most], held)
    ]
    return (
        replace(stages[0], cliff_workers=most, cliff_factor=max(1.0, each[0] / each[1])),
        *stages[1:],
    )


def _base(sightings: Sequence[Sighting]) -> float:
    """The memory that neither workers nor queues hold."""
    held = (
        s.after.memory_used - sum(stage.queue_bytes for stage in s.after.stages) for s in sightings
    )
    return max(0.0, float(min(held)))


def _fitted(truth: TrueCosts, sightings: Sequence[Sighting]) -> TrueCosts:
    """The truth corrected by the settings' rates: the cores' loss to switching, and slack in every cost."""
    measured = [s.seen.rows_per_s for s in sightings]
    best, least = truth, math.inf
    for switch in _SWITCH:
        tried = replace(truth, machine=replace(truth.machine, switch_cost=switch))
        off = [r / m for r, m in zip(_rates(tried, sightings), measured, strict=True)]
        slack = min(max(_mean(off), _SLACK[0]), _SLACK[1])
        tried = replace(
            tried, stages=tuple(replace(s, cost_s=s.cost_s * slack) for s in truth.stages)
        )
        error = sum(
            math.log(r / m) ** 2 for r, m in zip(_rates(tried, sightings), measured, strict=True)
        )
        if error < least:
            best, least = tried, error
    return best


def _rates(truth: TrueCosts, sightings: Iterable[Sighting]) -> list[float]:
    return [
        steady(
            truth,
            [s.knobs.workers[stage.name] for stage in truth.stages],
            ["thread"] * len(truth.stages),
            heads=_heads(s.knobs, [stage.name for stage in truth.stages]),
        ).rates[-1]
        for s in sightings
    ]


def _heads(knobs: Knobs, names: Sequence[str]) -> list[int]:
    """Returns for each stage the stage whose workers do its work."""
    own = [i if name not in knobs.fused else -1 for i, name in enumerate(names)]
    return list(itertools.accumulate(own, max))


def _mean(values: Sequence[float]) -> float:
    """The geometric mean: twice and half cancel out."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
