"""`ds2`: every stage gets the workers that its useful time says, all at once (OSDI'18: "Three steps is all you need").

    true rate of a worker = rows / useful seconds,    workers = ⌈ target rate / true rate of a worker ⌉

Useful time leaves out waiting for input and for room, so one look at a pipeline that is far from balance is enough to
know what it needs, as long as costs do not depend on the number of workers; where they do, it looks again, three times
at most per target. The target is the rate that the trainer would take if it never waited; a trainer that takes anything
has none, and then it is what all cores can do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice.agent.costs.rates import PipelineRates
from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_SETTLE, _WINDOW = 1, 2
_TOLERANCE = 0.1  # of the target: a smaller difference is no reason to scale
_STEPS = 3


def parallelism(rows_per_useful_s: Mapping[str, float], target: float) -> dict[str, int]:
    """The workers that each stage needs for `target` rows a second."""
    return {
        name: max(1, math.ceil(target / rate - 1e-9)) for name, rate in rows_per_useful_s.items()
    }


def target_rate(seen: PipelineRates) -> float:
    """The rate that the trainer would take, but at most what the cores can do at the processor time that a row
    costs."""
    cpu = sum(s.cpu / s.rows_per_s for s in seen.stages.values() if s.rows_per_s > 0)
    bound = seen.cpu_quota / cpu if cpu > 0 else math.inf
    return min(bound, seen.demand_rows_per_s or math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ds2State:
    limits: Limits
    knobs: Knobs
    watch: Stopwatch = field(default_factory=Stopwatch)
    target: float = 0.0
    steps: int = 0


class DS2(Policy):
    name = "ds2"

    def initial(self, limits: Limits, knobs: Knobs) -> Ds2State:
        return Ds2State(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: Ds2State) -> tuple[Knobs, Ds2State, Reason]:
        watch, seen = state.watch.look(snapshot, settle=_SETTLE, window=_WINDOW)
        if seen is None:
            return state.knobs, replace(state, watch=watch), Reason(text="measuring useful time")
        state = replace(state, watch=Stopwatch(0, snapshot))
        true_rates = {
            n: s.rows_per_s / s.busy
            for n, s in seen.stages.items()
            if s.busy > 0 and s.rows_per_s > 0
        }
        target = target_rate(seen)
        if len(true_rates) < len(state.limits.workers) or not math.isfinite(target):
            return state.knobs, state, Reason(text="not every stage has reported yet")
        if abs(target - state.target) > _TOLERANCE * target:
            state = replace(state, target=target, steps=0)
        if state.steps >= _STEPS:
            return state.knobs, state, Reason(text=f"{_STEPS} steps were taken towards this target")
        knobs = state.limits.resized(state.knobs, parallelism(true_rates, target))
        if knobs == state.knobs:
            return (
                knobs,
                state,
                Reason(text="useful time says that all is well", predicted_rows_per_s=target),
            )
        slowest = min(true_rates, key=lambda n: true_rates[n] * state.knobs.workers[n])
        return (
            knobs,
            replace(state, knobs=knobs, steps=state.steps + 1, watch=Stopwatch()),
            Reason(
                text=f"{target:.0f} rows/s need {knobs}",
                bottleneck=slowest,
                predicted_rows_per_s=target,
            ),
        )
