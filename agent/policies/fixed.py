"""`fixed`: the knobs never change. Every tuned run is compared with this."""

from __future__ import annotations

from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


class Fixed(Policy):
    name = "fixed"

    def initial(self, limits: Limits, knobs: Knobs) -> Knobs:
        return limits.clamp(knobs)

    def decide(self, snapshot: Snapshot, state: Knobs) -> tuple[Knobs, Knobs, Reason]:
        return state, state, Reason(text="the knobs are fixed")
