"""`shadow`: decides as `auto` would and says so, and touches nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agent.policies.planner import Planner
from agent.tunable import Policy, Reason
from ingest.knobs import Knobs, Limits
from ingest.stats import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    limits: Limits
    knobs: Knobs
    """In force, and they stay."""
    inner: Any
    """The policy's own. It begins again after each proposal, as though it had not made it."""


class Shadow:
    """What a policy would do is in its reasons (`proposal`), which the controller logs."""

    name = "shadow"

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or Planner()

    def initial(self, limits: Limits, knobs: Knobs) -> State:
        return State(limits=limits, knobs=knobs, inner=self._policy.initial(limits, knobs))

    def decide(self, snapshot: Snapshot, state: State) -> tuple[Knobs, State, Reason]:
        wanted, inner, reason = self._policy.decide(snapshot, state.inner)
        if wanted == state.knobs:
            return state.knobs, replace(state, inner=inner), reason
        again = self._policy.initial(state.limits, state.knobs)
        return state.knobs, replace(state, inner=again), replace(reason, proposal=wanted)
