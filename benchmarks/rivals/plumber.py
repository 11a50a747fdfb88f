"""`plumber`: traces the rate of every stage per core, and solves a linear programme for the allocation (MLSys'22).

    maximise X   so that   X · cpu seconds a row of i ≤ cores of i,   Σ cores of i ≤ cores,   cores of i ≤ its most

A stage that waits for a store keeps no core busy with one worker: it gets as many as its cores need. Caching and the
rewriting of the pipeline are left out, as no policy here can do either. A trace, a solution, three times in all; then
it rests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_ROUNDS, _SETTLE, _TRACE = 3, 1, 3
_ROUNDING = 0.05  # of a worker: so much may a trace be off


def solve(
    cpu_per_row: Sequence[float], most: Sequence[float], cores: float
) -> tuple[float, list[float]]:
    """The rows a second, and the cores of each stage, at the optimum of the linear programme."""
    from scipy.optimize import linprog

    count = len(cpu_per_row)
    unit = max(
        cpu_per_row
    )  # rates in units of the slowest stage's, or the solver meets numbers too far apart
    rows = [
        [cost / unit] + [-1.0 if j == i else 0.0 for j in range(count)]
        for i, cost in enumerate(cpu_per_row)
    ]
    solution = linprog(
        [-1.0] + [0.0] * count,
        A_ub=[*rows, [0.0] + [1.0] * count],
        b_ub=[0.0] * count + [cores],
        bounds=[(0, None)] + [(0, m) for m in most],
        method="highs",
    )
    if not solution.success:
        raise RuntimeError(f"the linear programme has no solution: {solution.message}")
    return float(solution.x[0]) / unit, [float(x) for x in solution.x[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlumberState:
    limits: Limits
    knobs: Knobs
    watch: Stopwatch = field(default_factory=Stopwatch)
    rounds: int = 0
    cores: float = 0.0


class Plumber(Policy):
    name = "plumber"

    def initial(self, limits: Limits, knobs: Knobs) -> PlumberState:
        return PlumberState(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: PlumberState) -> tuple[Knobs, PlumberState, Reason]:
        if not state.cores:
            return (
                state.knobs,
                replace(state, cores=snapshot.cpu_quota, watch=Stopwatch(0, snapshot)),
                Reason(text="tracing"),
            )
        if state.rounds >= _ROUNDS:
            return (
                state.knobs,
                state,
                Reason(text="the programme was solved; nothing changes from now on"),
            )
        watch, seen = state.watch.look(snapshot, settle=_SETTLE, window=_TRACE)
        if seen is None:
            return state.knobs, replace(state, watch=watch), Reason(text="tracing")
        stages = {n: s for n, s in seen.stages.items() if s.rows_per_s > 0 and s.busy > 0}
        if len(stages) < len(state.limits.workers):
            return (
                state.knobs,
                replace(state, watch=Stopwatch()),
                Reason(text="not every stage has reported yet"),
            )
        cost = {n: max(s.cpu, 1e-6 * s.busy) / s.rows_per_s for n, s in stages.items()}
        most = [float(state.limits.workers[n][1]) for n in stages]
        rate, cores = solve(list(cost.values()), most, state.cores)
        workers = {}
        for (name, stage), share, limit in zip(stages.items(), cores, most, strict=True):
            threads_a_core = max(
                1.0, (stage.busy - stage.core_wait) / max(stage.cpu, 1e-6 * stage.busy)
            )
            workers[name] = max(1, math.ceil(min(limit, share * threads_a_core - _ROUNDING)))
        knobs = state.limits.clamp(state.knobs.with_workers(**workers))
        return (
            knobs,
            replace(state, knobs=knobs, watch=Stopwatch(), rounds=state.rounds + 1),
            Reason(
                text=f"the linear programme gives {rate:.0f} rows/s at {knobs}",
                predicted_rows_per_s=rate,
                bottleneck=max(cost, key=lambda n: cost[n]),
            ),
        )
