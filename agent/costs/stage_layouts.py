"""Proposes stages whose other back end may bring more rows. Pure.

A stage that holds the interpreter's lock makes the threads of all stages wait. So the stage to move is often not the
slowest one. The probe shows whether the lock is held, and the processor time shows by which stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_cost import StageCost


@dataclass(frozen=True, slots=True, kw_only=True)
class BackEndSwitch:
    """A stage that may change its back end."""

    stage: str
    forecast: Forecast
    """The forecast with the change."""
    cause: str
    """Why the change may help, in words."""

    @property
    def key(self) -> tuple[str, str]:
        """The key under which the planner remembers that it has tried the change."""
        return self.stage, self.forecast.knobs.backend[self.stage]


def locked(
    forecast: Forecast, recent: PipelineRates, freed: Callable[[StageCost], StageCost]
) -> Iterator[BackEndSwitch]:
    """Yields a switch for each stage whose workers wait for each other in processes, or hold the lock in threads.

    `freed` maps the cost of a stage that stays on threads to its cost when the lock is free."""
    held = recent.lock or 0.0
    settings = forecast.settings
    for name in _movable_stages(forecast):
        cost = forecast.costs[name]
        cores = recent.rows_per_s * cost.cpu_s(forecast.knobs.workers[name])
        holds = held >= settings.mostly_share and cores >= settings.mostly_share * held
        if holds and recent.saturated(settings.full_share):
            continue  # Without a free core, a process brings little.
        if holds if cost.backend == "thread" else cost.locked:
            yield BackEndSwitch(
                stage=name,
                forecast=forecast.switched(name, freed),
                cause=f"{name} holds the interpreter's lock for {100 * held:.0f} % of the time"
                if holds
                else f"workers of {name} wait for each other",
            )


def _movable_stages(forecast: Forecast) -> list[str]:
    """Returns the stages that have another back end, the slowest first."""

    def capacity(name: str) -> float:
        return forecast.capacity(name, forecast.knobs.workers[name])

    return sorted(
        (n for n, cost in forecast.costs.items() if forecast.limits.movable(n, cost.backend)),
        key=capacity,
    )
