"""Compares a learned number of remote workers with the planner's, in the cases of `benchmarks.fleet_size`. Simulated.

    python -m benchmarks.learned_fleet --seeds 100

What is learned is when to call workers and when to let them go, by six weights: the headroom over what useful time says
is needed, how that and the patience before shrinking follow the seconds that workers take to start, and how quickly a
new look counts. The cross-entropy method finds them, each generation on cases of its own.

Fixed beforehand: it wins if its worth, paired by seed on cases that it was not taught in, is above the planner's by
more than 3 % of that with 97.5 % confidence, and at most 5 % of the cases are worse by more than 1 %."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.agent.costs.rates import PipelineRates
from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.fleet_size import drawn, held, interval, made
from sluice.benchmarks.rivals.fleets import Ds2FleetState, remote_stage, weighed, with_workers
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.common.settings import parse, setting
from sluice.ingest.knobs import REQUESTS_A_CORE, Knobs, Limits
from sluice.ingest.stats import Snapshot

PRICE, TAUGHT_FROM, TESTED_FROM = 0.01, 20_000, 3_000
_BEGIN = np.array([0.1, 0.0, 0.15, math.log(30.0), 0.0, 0.0])
_SPREAD = np.array([0.1, 0.1, 0.1, 0.7, 0.5, 1.0])
_USUAL_START_S = 50.0


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """How long it learns, and in how many cases it is tested."""

    title = "learning"
    generations: int = setting(4, "generations", least=1)
    candidates: int = setting(
        8, "candidates of a generation, of which the best three go on", least=3
    )
    cases: int = setting(6, "cases of a generation", least=1)
    seeds: int = setting(100, "cases of the test", least=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedState(Ds2FleetState):
    needed: float = 0.0
    """Workers, as the looks until now say, the newest ones most."""
    above_since: float | None = None


class LearnedFleet(Policy):
    name = "learned"

    def __init__(self, weights: npt.NDArray[np.float64]):
        self.headroom, self.by_start, self.band, self.patience, self.patience_by_start, newest = (
            map(float, weights)
        )
        self.newest = 1 / (1 + math.exp(-newest))

    def initial(self, limits: Limits, knobs: Knobs) -> LearnedState:
        return LearnedState(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: LearnedState) -> tuple[Knobs, LearnedState, Reason]:
        told = snapshot
        snapshot, state = weighed(told, state)
        watch, seen = state.watch.look(snapshot, settle=1, window=2)
        if seen is None:
            return state.knobs, replace(state, watch=watch), Reason(text="measuring")
        state = replace(state, watch=Stopwatch(0, snapshot))
        needed = self._needed(seen, state.knobs)
        if not needed:
            return state.knobs, state, Reason(text="not every stage has reported yet")
        needed = state.needed + self.newest * (needed - state.needed) if state.needed else needed
        start = math.log((told.elsewhere["start_s"] or _USUAL_START_S) / _USUAL_START_S)
        wanted = needed * math.exp(self.headroom + self.by_start * start)
        there = state.knobs.workers[remote_stage(state.knobs)] / REQUESTS_A_CORE
        above = wanted * math.exp(max(0.0, self.band)) < there - 0.5
        since = (told.at if state.above_since is None else state.above_since) if above else None
        state = replace(state, needed=needed, above_since=since)
        patient = since is None or told.at - since < math.exp(
            self.patience + self.patience_by_start * start
        )
        if math.ceil(wanted) == there or (math.ceil(wanted) < there and patient):
            return state.knobs, state, Reason(text=f"{needed:.1f} workers are needed")
        knobs = with_workers(state.limits, state.knobs, math.ceil(wanted))
        return (
            knobs,
            replace(state, knobs=knobs, watch=Stopwatch(), above_since=None),
            Reason(text=f"{needed:.1f} workers are needed"),
        )

    @staticmethod
    def _needed(seen: PipelineRates, knobs: Knobs) -> float:
        """The workers for what the trainer takes, or this host's own stages; 0: it cannot be told yet."""
        useful = {
            name: stage.rows_per_s / stage.busy
            for name, stage in seen.stages.items()
            if stage.busy > 0
        }
        name, target = remote_stage(knobs), seen.demand_rows_per_s
        if not target or not useful.get(name) or len(useful) < len(seen.stages):
            return 0.0
        own = min(rate * knobs.workers[other] for other, rate in useful.items() if other != name)
        return min(target, own) / useful[name] / REQUESTS_A_CORE


def worth(policy: Policy, seed: int) -> float:
    return held(drawn(seed), policy, seed, PRICE)["worth"]


def taught(options: LearningOptions) -> npt.NDArray[np.float64]:
    random, mean, spread = np.random.default_rng(0), _BEGIN, _SPREAD
    for generation in range(options.generations):
        candidates = [
            mean,
            *(mean + spread * random.standard_normal((options.candidates - 1, len(mean)))),
        ]
        seeds = range(
            TAUGHT_FROM + generation * options.cases, TAUGHT_FROM + (generation + 1) * options.cases
        )
        found = np.array(
            [[worth(LearnedFleet(one), seed) for seed in seeds] for one in candidates]
        ).mean(axis=1)
        best = np.array(candidates)[np.argsort(-found)[:3]]
        mean, spread = best.mean(axis=0), 0.5 * (spread + best.std(axis=0))
        say(
            f"generation {generation}: worth {found.max():.3f} at best, {found[0]:.3f} in the middle; {mean.round(2)}"
        )
    return mean


def main(argv: list[str]) -> dict[str, Any]:
    options = parse(
        LearningOptions, argv, "python -m benchmarks.learned_fleet", description=__doc__
    )
    weights = taught(options)
    learning_s = time.process_time()
    seeds = range(TESTED_FROM, TESTED_FROM + options.seeds)
    planner, learned = (
        np.array([worth(policy, seed) for seed in seeds])
        for policy in (made("planner", PRICE), LearnedFleet(weights))
    )
    ahead = learned - planner
    low, high = interval(ahead)
    worse = float((ahead < -0.01 * planner).mean())
    say(
        f"planner {planner.mean():.3f}, learned {learned.mean():.3f}: {ahead.mean():+.3f} ({low:+.3f} to {high:+.3f}), "
        f"ahead in {(ahead > 0).sum()} of {len(seeds)}, worse by more than 1 % in {worse:.0%}"
    )
    return {
        "planner": round(float(planner.mean()), 4),
        "learned": round(float(learned.mean()), 4),
        "ahead": round(float(ahead.mean()), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "worse": round(worse, 3),
        "wins": bool(low > 0.03 * planner.mean() and worse <= 0.05),
        "weights": weights.round(3).tolist(),
        "learning_core_s": round(learning_s),
        "simulated": True,
        "core_s": round(time.process_time()),
    }


if __name__ == "__main__":
    program(main)
