"""`even`: the cores shared out evenly over the stages, as a person does who knows nothing of their costs."""

from __future__ import annotations

from sluice.agent.tunable import Reason
from sluice.benchmarks.rivals.cores import Cores, State
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot


class Even(Cores):
    name = "even"

    def decide(self, snapshot: Snapshot, state: State) -> tuple[Knobs, State, Reason]:
        limits, knobs, done = state
        if done:
            return knobs, state, Reason(text="the cores are shared out evenly, once and for all")
        each, rest = divmod(max(1, int(snapshot.cpu_quota)), len(limits.workers))
        workers = {name: max(1, each + (i < rest)) for i, name in enumerate(limits.workers)}
        knobs = limits.clamp(knobs.with_workers(**workers))
        return (
            knobs,
            (limits, knobs, True),
            Reason(text=f"{snapshot.cpu_quota:g} cores over {len(workers)} stages"),
        )
