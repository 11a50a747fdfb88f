"""Other shapes of a pipeline that may bring more: a stage on its other back end, stages fused or split. Pure.

A stage that holds the interpreter's lock makes the threads of all stages wait for it, so the stage to move is often
not the narrowest. If its own workers wait for each other, its cost curve shows that. If only other stages wait, a
lock looks like a store; but the stage then computes on about one core, which is all that a lock allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates, StageRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Restructuring:
    """The forecast for one change at one stage."""

    kind: str
    """switch, fuse or split."""
    stage: str
    forecast: Forecast
    cause: str

    @property
    def key(self) -> tuple[str, str]:
        """The key under which the change is remembered as tried."""
        return self.stage, self.forecast.knobs.backend[
            self.stage
        ] if self.kind == "switch" else self.kind


def locked(forecast: Forecast, recent: PipelineRates) -> Iterator[Restructuring]:
    """The stages whose workers wait for each other, the narrowest first."""
    names = _movable(forecast)
    # Stages that only wait, as for a service, wait longer too where cores are short: a process would be a longer way.
    hold = forecast.settings.lock_cores <= sum(
        forecast.computing(name, recent.rows_per_s)
        for name in names
        if forecast.each[name].backend == "thread"
    )
    for name in names:
        if forecast.each[name].locked and (hold or forecast.each[name].backend != "thread"):
            yield Restructuring(
                kind="switch",
                stage=name,
                forecast=forecast.switched(name, lambda s: s.relieved()),
                cause=f"workers of {name} wait for each other",
            )


def suspected(forecast: Forecast, recent: PipelineRates) -> Iterator[Restructuring]:
    """The stages on threads that may hold the lock for which the others wait, while cores are free."""
    settings = forecast.settings
    for name in _movable(forecast):
        on_threads = forecast.each[name].backend == "thread"
        if (
            recent.saturated(settings.saturated_share)
            or not on_threads
            or name not in recent.stages
        ):
            continue
        others = sum(
            _waiting(recent.stages[n])
            for n, s in forecast.services.items()
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
    """The stages whose work the workers of the stage before could do as well, where that may save cores."""
    for name, before in forecast.limits.fusable.items():
        if (
            name in forecast.services
            and before in forecast.each
            and forecast.limits.fits(forecast.knobs.backend, name)
        ):
            yield Restructuring(
                kind="fuse",
                stage=name,
                forecast=forecast.fused(name),
                cause=f"handing batches over from {before} to {name} takes cores",
            )


def split(forecast: Forecast) -> Iterator[Restructuring]:
    """The fused stages that could have workers of their own again."""
    for name in forecast.knobs.fused & forecast.each.keys():
        head = forecast.limits.head(forecast.knobs, name)
        if head == forecast.bottleneck():
            yield Restructuring(
                kind="split",
                stage=name,
                forecast=forecast.split(name),
                cause=f"{head} is the bottleneck, whose workers do the work of {name} as well",
            )


def _movable(forecast: Forecast) -> list[str]:
    """The stages that have another back end, the narrowest first."""

    def capacity(name: str) -> float:
        head = forecast.limits.head(forecast.knobs, name)
        return forecast.capacity(head, forecast.knobs.workers[head])

    return sorted(
        (n for n, cost in forecast.each.items() if forecast.limits.movable(n, cost.backend)),
        key=capacity,
    )


def _waiting(stage: StageRates) -> float:
    """How many workers are at work but neither compute nor wait for a core."""
    return max(0.0, stage.busy - stage.cpu - stage.core_wait)
