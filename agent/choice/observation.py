"""What is known when the agent chooses: `Observation`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sluice.agent.choice.effect import Effects
from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.policies.planner.changes import lasting
from sluice.agent.policies.planner.planner import forecast_of, idle_stages
from sluice.agent.policies.planner.state import Decision, PlannerState
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreknowledge:
    """What is known of a pipeline before its first row. None: unknown."""

    operators: Mapping[str, str] | None = None
    """Stage of transforms → `vectorised` or `python`. Vectorised or compiled code rarely holds the interpreter's lock;
    Python code holds it."""
    store: str | None = None
    """`local`, a disk of this machine, or `remote`, behind a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A look, and what the planner makes of it."""

    snapshot: Snapshot
    state: PlannerState
    """All that was learned with this look, before any decision on it."""
    recent: PipelineRates
    """The rates since the last change, with no more rows than the bottleneck makes."""
    latest: PipelineRates
    """The rates since the last look."""
    forecast: Forecast
    effects: Effects
    known: Foreknowledge
    planned: Decision
    """The planner's decision on the look."""
    early: bool = False
    """Whether the planner would still measure the last change before it proposes another one."""

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""
        return self.state.knobs

    @property
    def proposal(self) -> Knobs | None:
        """The planner's proposal. None: no change."""
        return None if self.planned[0] == self.knobs else self.planned[0]

    @property
    def unmeasured(self) -> set[str]:
        """The stages whose costs are unknown, and that may still report work."""
        known = self.forecast.costs.keys() | idle_stages(self.state, self.recent)
        return set(self.state.services) - known


def observe(
    before: PlannerState,
    state: PlannerState,
    planned: Decision,
    effects: Effects,
    known: Foreknowledge,
) -> Observation | None:
    """Returns what is known at this look. `before` is the state before the look was taken in, `state` the one with it,
    and `planned` is the planner's decision on it.

    Returns None if nothing was measured since the last change."""
    if before.last is None or state.last is None or not before.window:
        return None
    latest = rates(before.last, state.last)
    recent = rates(state.window[0].snapshot, state.last)
    if latest is None or recent is None or recent.rows_per_s <= 0:
        return None
    forecast = forecast_of(state, latest)
    if not forecast.costs:
        return None
    return Observation(
        snapshot=state.last,
        state=state,
        recent=lasting(recent, forecast),
        latest=latest,
        forecast=forecast,
        effects=effects,
        known=replace(known, operators=observed_operators(forecast, recent)),
        planned=planned,
    )


def observed_operators(forecast: Forecast, recent: PipelineRates) -> dict[str, str]:
    """Returns which transforms hold the interpreter's lock as Python code does, as the probe has shown."""
    held, stages = recent.lock, recent.stages
    if held is None:
        return {}
    share = forecast.settings.mostly_share * held
    return {
        name: "python"
        if held >= forecast.settings.mostly_share and stages[name].cpu >= share
        else "vectorised"
        for name in forecast.costs
        if forecast.limits.movable(name, forecast.knobs.backend.get(name))
    }
