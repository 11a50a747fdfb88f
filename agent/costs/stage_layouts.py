"""Proposes other layouts that may bring more rows: a stage on its other back end, and stages fused or split. Pure.

A stage that holds the interpreter's lock makes the threads of all stages wait. So the stage to move is often not the
slowest one. If its own workers wait for each other, its cost curve shows that. If only other stages wait, a lock looks
like a store. But the stage then computes on about one core, because a lock allows no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Restructuring:
    """One change of the layout at one stage."""

    kind: str
    """`switch`, `fuse` or `split`."""
    stage: str
    forecast: Forecast
    """The forecast with the change."""
    cause: str
    """Why the change may help, in words."""

    @property
    def key(self) -> tuple[str, str]:
        """The key under which the planner remembers that it has tried the change."""
        return self.stage, self.forecast.knobs.backend[
            self.stage
        ] if self.kind == "switch" else self.kind


def locked(forecast: Forecast, recent: PipelineRates) -> Iterator[Restructuring]:
    """Yields a switch for each stage whose workers wait for each other, the slowest stage first."""
    names = _movable_stages(forecast)
    # Stages that wait for a service also wait longer if cores are short. Processes would not help them, so the threads
    # together must compute as much as a lock allows.
    lock_is_held = forecast.settings.lock_cores <= sum(
        forecast.cores_used_by(name, recent.rows_per_s)
        for name in names
        if forecast.separate_costs[name].backend == "thread"
    )
    for name in names:
        cost = forecast.separate_costs[name]
        if cost.locked and (lock_is_held or cost.backend != "thread"):
            yield Restructuring(
                kind="switch",
                stage=name,
                forecast=forecast.switched(name, lambda s: s.relieved()),
                cause=f"workers of {name} wait for each other",
            )


def suspected(forecast: Forecast, recent: PipelineRates) -> Iterator[Restructuring]:
    """Yields a switch for each stage on threads that may hold the lock for which the others wait.

    Nothing is yielded while no core is free, because a lock then changes little."""
    settings = forecast.settings
    for name in _movable_stages(forecast):
        if (
            recent.saturated(settings.saturated_share)
            or forecast.separate_costs[name].backend != "thread"
            or name not in recent.stages
        ):
            continue
        others = sum(
            max(0.0, recent.stages[n].busy - recent.stages[n].cpu - recent.stages[n].core_wait)
            for n, s in forecast.joined_costs.items()
            if n != name and n in recent.stages and s.backend == "thread"
        )
        if (
            settings.lock_cores <= recent.stages[name].cpu <= settings.lock_most_cores
            and others >= settings.lock_waiting_workers
        ):
            yield Restructuring(
                kind="switch",
                stage=name,
                forecast=forecast.switched(name, lambda s: s.unhindered()),
                cause=f"{name} may hold the lock that {others:.1f} workers of other stages wait for",
            )


def fused(forecast: Forecast) -> Iterator[Restructuring]:
    """Yields a fusion for each stage whose work the workers of the stage before it could do, to save cores."""
    for name, before in forecast.limits.fusable.items():
        if (
            name in forecast.joined_costs
            and before in forecast.separate_costs
            and forecast.limits.fits(forecast.knobs.backend, name)
        ):
            yield Restructuring(
                kind="fuse",
                stage=name,
                forecast=forecast.fused(name),
                cause=f"handing batches over from {before} to {name} takes cores",
            )


def split(forecast: Forecast) -> Iterator[Restructuring]:
    """Yields a split for each fused stage that is part of the bottleneck."""
    for name in forecast.knobs.fused & forecast.separate_costs.keys():
        head = forecast.limits.head(forecast.knobs, name)
        if head == forecast.bottleneck():
            yield Restructuring(
                kind="split",
                stage=name,
                forecast=forecast.split(name),
                cause=f"{head} is the bottleneck, whose workers do the work of {name} as well",
            )


def _movable_stages(forecast: Forecast) -> list[str]:
    """Returns the stages that have another back end, the slowest first."""

    def capacity(name: str) -> float:
        head = forecast.limits.head(forecast.knobs, name)
        return forecast.capacity(head, forecast.knobs.workers[head])

    return sorted(
        (
            n
            for n, cost in forecast.separate_costs.items()
            if forecast.limits.movable(n, cost.backend)
        ),
        key=capacity,
    )
