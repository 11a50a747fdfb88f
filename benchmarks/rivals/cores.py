"""`cores`: as many workers as there are cores, in every stage. It is Plumber's HEURISTIC, and a common first choice."""

from __future__ import annotations

from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

State = tuple[Limits, Knobs, bool]


class Cores(Policy):
    name = "cores"

    def initial(self, limits: Limits, knobs: Knobs) -> State:
        return limits, limits.clamp(knobs), False

    def decide(self, snapshot: Snapshot, state: State) -> tuple[Knobs, State, Reason]:
        limits, knobs, done = state
        if done:
            return knobs, state, Reason(text="one worker a core everywhere, once and for all")
        count = max(1, int(snapshot.cpu_quota))
        knobs = limits.clamp(knobs.with_workers(**dict.fromkeys(limits.workers, count)))
        return (
            knobs,
            (limits, knobs, True),
            Reason(text=f"{count} workers in every stage, one a core"),
        )
