"""`shadow`: makes the tuner's decisions and reports them, but changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice.agent.tunable import Policy, Reason
from sluice.agent.tuner.state import TunerState, take_in
from sluice.agent.tuner.tuner import Tuner
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


class Shadow(Policy):
    """Returns the tuner's decision as a `proposal`, which the controller logs."""

    name = "shadow"

    def __init__(self) -> None:
        self._tuner = Tuner()

    def made_of(self) -> Mapping[str, Any]:
        return self._tuner.made_of()

    def initial(self, limits: Limits, knobs: Knobs) -> TunerState:
        return self._tuner.initial(limits, knobs)

    def next_look_s(self, state: TunerState) -> float | None:
        return self._tuner.next_look_s(state)

    def decide(self, snapshot: Snapshot, state: TunerState) -> tuple[Knobs, TunerState, Reason]:
        taken = take_in(state, snapshot, self._tuner.settings)
        wanted, after, reason = self._tuner.plan(taken)
        if wanted == state.knobs:
            return wanted, after, reason
        return state.knobs, taken, replace(reason, proposal=wanted)

    def explain(self, state: TunerState) -> dict[str, Any] | None:
        return self._tuner.explain(state)
