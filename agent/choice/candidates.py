"""The settings among which the agent chooses at a look: `list_candidates`. Pure.

The planner proposes one. Others have the fewest workers for a rate, are one step away from the present setting, or were
the best so far. No candidate needs more memory than is admitted. None asks more of a store than the planner's cap
allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sluice.agent.choice.observation import Observation
from sluice.agent.costs.forecast import Forecast
from sluice.agent.policies.planner.changes import ranges_of_move
from sluice.ingest.knobs import Knobs

NAMES = (
    "stay",
    "planner",
    "lean",
    "double",
    "fourfold",
    "most",
    "processes",
    "best",
    "more",
    "less",
    "backend",
)
_COMPUTES = 0.1  # of the running cores, its own time or the lock's: with less, a stage gains nothing in processes
_TIMES = {"lean": 1.0, "double": 2.0, "fourfold": 4.0, "most": math.inf}
"""Candidate → the times of the present rate for which it has the fewest workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting that may be put in force."""

    name: str
    knobs: Knobs
    rows_per_s: float
    """The rate that the forecast gives it. For other back ends, the forecast leaves locks out."""
    promised: float = 0.0
    """The rate that its proposer promises. 0: it promises none."""
    early: bool = False
    """Whether the planner would not propose it yet."""


def list_candidates(seen: Observation) -> list[Candidate]:
    """Returns the candidates with different knobs. The first is `stay`."""
    knobs, forecast = seen.knobs, seen.forecast
    listed = [Candidate(name="stay", knobs=knobs, rows_per_s=forecast.rate(knobs.workers))]
    most = max(forecast.most_bytes, forecast.memory(knobs))
    asking = seen.state.limits.asking
    most_asking = max(knobs.workers[asking], seen.state.allowed(asking)[1])
    for candidate in (*_proposed(seen), *_balanced(seen), *_near(seen)):
        wanted = candidate.knobs
        if wanted.workers[asking] > most_asking or any(wanted == other.knobs for other in listed):
            continue
        # The planner checks the memory of its own proposals.
        if candidate.name == "planner" or replace(forecast, knobs=wanted).memory(wanted) <= most:
            listed.append(candidate)
    return listed


def _proposed(seen: Observation) -> Iterator[Candidate]:
    """Yields the planner's proposal and the best setting so far."""
    if seen.proposal is not None:
        yield Candidate(
            name="planner",
            knobs=seen.proposal,
            rows_per_s=seen.forecast.rate(seen.proposal.workers),
            promised=seen.planned[2].predicted_rows_per_s or 0.0,
            early=seen.early,
        )
    if best := seen.effects.best:
        yield Candidate(
            name="best",
            knobs=best.knobs,
            rows_per_s=seen.forecast.rate(best.knobs.workers),
            promised=best.rows_per_s,
        )


def _balanced(seen: Observation) -> Iterator[Candidate]:
    """Yields the fewest workers for some rates, and for the highest with all computing transforms in processes."""
    forecast, limits = seen.forecast, seen.state.limits
    moved, free_bytes = forecast, forecast.free_bytes
    for name in _movable(seen, limiting_stage(seen)):
        process_bytes = _expected_process(forecast, name)
        if (
            seen.recent.stages[name].cpu >= _COMPUTES * seen.recent.running
            and forecast.costs[name].backend != "process"
            and 2 * process_bytes <= free_bytes
        ):
            moved = moved.switched(name, lambda cost: cost.relieved())
            free_bytes -= process_bytes
    shapes = [(name, forecast, times) for name, times in _TIMES.items()]
    if moved is not forecast:
        shapes.append(("processes", moved, math.inf))
    for name, shape, times in shapes:
        target = min(shape.demand, times * seen.recent.rows_per_s)
        ranges = {stage: limits.workers[stage] for stage in shape.costs}
        if limits.asking in ranges:
            ranges[limits.asking] = seen.state.allowed(limits.asking)
        knobs, _ = replace(shape, demand=target).best(ranges, fewest=True)
        fitting = shrink_to_memory(forecast, limits.clamp(knobs))
        if fitting is not None:
            yield Candidate(name=name, knobs=fitting, rows_per_s=shape.rate(fitting.workers))


def _near(seen: Observation) -> Iterator[Candidate]:
    """Yields one step more and one step less of the stage that limits, and another back end for it."""
    knobs = seen.knobs
    forecast = seen.forecast
    limits = seen.state.limits
    name = limiting_stage(seen)
    count = knobs.workers[name]
    least, most = limits.workers[name]
    for step, changed in (
        ("more", min(most, count + math.ceil(count / 2))),
        ("less", max(least, count - math.ceil(count / 3))),
    ):
        near = knobs.with_workers(**{name: changed})
        yield Candidate(name=step, knobs=near, rows_per_s=forecast.rate(near.workers))
    moved = next(_movable(seen, name), None)
    if moved is not None and 2 * _expected_process(forecast, moved) <= forecast.free_bytes:
        other = forecast.switched(moved, lambda cost: cost.relieved())
        shaped, rate = other.best(ranges_of_move(seen.state, other, moved), fewest=False)
        yield Candidate(name="backend", knobs=limits.clamp(shaped), rows_per_s=rate)


def _expected_process(forecast: Forecast, name: str) -> float:
    """Returns the bytes of a process that a stage would move to. If none of the stage was measured, it is taken to be
    as large as the largest of the others. 0: the stage is in processes already, or none was measured. Then the first
    one may start, and is ended if it does not fit."""
    costs = forecast.costs
    if costs[name].backend == "process":
        return 0.0
    return costs[name].process_bytes or max(cost.process_bytes for cost in costs.values())


def limiting_stage(seen: Observation) -> str:
    """Returns the stage that limits the rate. If the cores or the trainer do, the stage that uses most cores."""
    bottleneck = seen.forecast.bottleneck()
    if bottleneck in seen.knobs.workers:
        return bottleneck
    return max(seen.forecast.costs, key=lambda n: seen.recent.stages[n].cpu)


def _movable(seen: Observation, limiting: str) -> Iterator[str]:
    """Yields the stages with workers and another back end: the limiting one first, then those that use most cores.

    A stage in threads gains in processes where the interpreter's lock, as the probe shows, would be held most of the
    time if the pipeline used all cores. A stage that hardly computes uses no more cores."""
    costs, recent = seen.forecast.costs, seen.recent
    held = 1.0 if recent.lock is None else recent.lock
    for name in sorted(costs, key=lambda n: (n != limiting, -recent.stages[n].cpu)):
        backend, stage = costs[name].backend, recent.stages[name]
        computes = stage.cpu >= _COMPUTES * max(stage.busy, recent.running)
        usable = recent.cpu_quota if computes else recent.cpu
        needed = max(_COMPUTES * usable, seen.forecast.settings.mostly_share * recent.cpu)
        is_locked = held * usable >= needed
        if (is_locked or backend == "process") and seen.state.limits.movable(name, backend):
            yield name


def shrink_to_memory(forecast: Forecast, knobs: Knobs) -> Knobs | None:
    """Returns the knobs, made smaller until they fit in the share of the free memory that an initial setting may take;
    None if nothing fits."""
    settings = forecast.settings
    allowed = min(
        forecast.memory(forecast.knobs) + settings.mostly_share * forecast.free_bytes,
        forecast.most_bytes,
    )
    share = 1.0
    for _ in range(2 * settings.search_steps):
        fitting = forecast.limits.clamp(
            replace(
                knobs,
                workers={n: math.ceil(share * count) for n, count in knobs.workers.items()},
                read_ahead_bytes=int(share * knobs.read_ahead_bytes),
                prefetch_bytes=int(share * knobs.prefetch_bytes),
            )
        )
        if replace(forecast, knobs=fitting).memory(fitting) <= allowed:
            return fitting
        share *= settings.step_down
    return None
