"""`fixed`: the knobs never change. Every tuned run is compared with this."""

from __future__ import annotations

from sluice.agent.tunable import Policy, Reason
from sluice.agent.tuner.settings import TunerSettings
from sluice.agent.tuner.state import TunerState, take_in
from sluice.agent.tuner.tuner import noticed
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


class Fixed(Policy):
    """Changes nothing. It notices when rows become dearer, for the report."""

    name = "fixed"

    def initial(self, limits: Limits, knobs: Knobs) -> TunerState:
        return TunerState.of(limits, knobs)

    def decide(self, snapshot: Snapshot, state: TunerState) -> tuple[Knobs, TunerState, Reason]:
        state = take_in(state, snapshot, TunerSettings())
        return state.knobs, state, Reason(text="the knobs are fixed", incident=noticed(state))
