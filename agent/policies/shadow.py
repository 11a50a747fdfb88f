"""`shadow`: makes the tuner's decisions and reports them, but changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice.agent.tunable import Reason
from sluice.agent.tuner.state import TunerState, take_in
from sluice.agent.tuner.tuner import Tuner
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot


class Shadow(Tuner):
    """Returns the tuner's decision as a `proposal`, which the controller logs. It keeps nothing for the next run."""

    name = "shadow"

    def decide(self, snapshot: Snapshot, state: TunerState) -> tuple[Knobs, TunerState, Reason]:
        taken = take_in(state, snapshot, self.settings)
        wanted, after, reason = self.plan(taken)
        if wanted == state.knobs:
            return wanted, after, reason
        return state.knobs, taken, replace(reason, proposal=wanted)

    def learned(self, state: TunerState) -> None:
        return None

    def recall(self, state: TunerState, learned: Mapping[str, Any]) -> None:
        return None
