"""`shadow`: makes the planner's decisions and reports them, but changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sluice.agent.policies.planner.planner import Planner
from sluice.agent.policies.planner.state import PlannerState
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


class Shadow(Policy):
    """Returns the planner's decision as a `proposal`, which the controller logs."""

    name = "shadow"

    def __init__(self) -> None:
        self._planner = Planner()

    def made_of(self) -> dict[str, Any]:
        return self._planner.made_of()

    def initial(self, limits: Limits, knobs: Knobs) -> PlannerState:
        return self._planner.initial(limits, knobs)

    def decide(self, snapshot: Snapshot, state: PlannerState) -> tuple[Knobs, PlannerState, Reason]:
        taken = self._planner.take_in(snapshot, state)
        wanted, after, reason = self._planner.plan(state, taken)
        if wanted == state.knobs:
            return wanted, after, reason
        return state.knobs, taken, replace(reason, proposal=wanted)

    def explain(self, state: PlannerState) -> dict[str, Any]:
        return self._planner.explain(state)
