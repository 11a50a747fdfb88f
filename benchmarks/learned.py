"""Does what was learned beat the planner? `auto` and its rivals, paired with the planner, pipeline by pipeline.

    python -m benchmarks.learned [--work build/policy]

All choose among the same candidates (`sluice.agent.policies.learned.candidates`), but for `intune`:

  auto       the shipped weights and their lower bound
  distilled  the same networks' mean, whatever they take for the best, however unsure; nothing is learned of what came
  bounded    their mean less one spread; nothing is learned of what came
  …+prior    with the caution of a kind that was never tried (`sluice.agent.policies.learned.residual`), whatever came
  …+residual what came corrects what is foretold from then on
  …+kept     the same, and the next seed in the same pipeline begins with that, as a run with a registry does
  linear     a linear contextual bandit on the same tries (LinUCB's bound, turned round: the lower one)
  detector   the planner, and the optimum at the latest costs as soon as rows fall short of what was expected by a fifth
  roll-outs  each candidate tried out in a simulator made of the stage models, at every decision
  intune     the reconstruction

Rows, and rows in the 60 s after the start and after each change, are held against the planner's in the same pipeline
with the same seed; the interval is the middle 95 % of 2,000 draws of pipelines. Those with a residual are held against
their twins without as well. Held-out pipelines, and simulated.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sluice.agent.costs.rates import rates
from sluice.agent.learn.advantage_training import Samples
from sluice.agent.policies import make
from sluice.agent.policies.auto import Auto, AutoState, GainEstimator
from sluice.agent.policies.learned.advantage import Advantage, load
from sluice.agent.policies.learned.candidates import Candidate
from sluice.agent.policies.learned.residual import Residual
from sluice.agent.policies.planner.state import PlannerState as Planned
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage, TrueCosts
from sluice.agent.simulator.random_pipelines import held_out
from sluice.agent.simulator.rollout import run
from sluice.agent.tunable import Policy, Reason
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run as program
from sluice.etl.common.program import say
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

TWINS = ("distilled", "bounded")
RIVALS = ("auto", *(twin + how for twin in TWINS for how in ("", "+prior", "+residual", "+kept")), "linear", "detector",
          "roll-outs", "intune")
_AFTER_S = 60
_AHEAD_S = 15.0
_FELL = 0.22  # logarithm of what was expected ÷ what came: a fifth less


class Detector:
    """A judge that takes the optimum at the latest costs where rows fell short, and nothing else."""

    def mean(self, candidate: Candidate) -> float:
        return 0.0  # it foretells nothing

    def lower_bound(self, candidate: Candidate) -> float:
        short, on_trial = candidate.whole[4], candidate.whole[12]
        return float(candidate.kind == "latest" and short > _FELL and not on_trial) - 0.5


class Linear:
    """Ridge regression of the gain; the lower bound is a multiple of its standard error below."""

    def __init__(self, samples: Samples, times: float = 2.0) -> None:
        there = np.arange(samples.stages.shape[1])[None, :, None] < samples.count[:, None, None]
        mean = (samples.stages * there).sum(1) / samples.count[:, None]
        x = np.concatenate([samples.whole, mean, np.ones((len(mean), 1))], axis=1).astype(float)
        y = samples.gain.clip(-0.5, 0.5)
        self._inverse = np.linalg.inv(x.T @ x + np.eye(x.shape[1]))
        self._weights = self._inverse @ x.T @ y
        self._times = times * float(np.std(y - x @ self._weights))

    def mean(self, candidate: Candidate) -> float:
        return float(self._inputs(candidate) @ self._weights)

    def lower_bound(self, candidate: Candidate) -> float:
        x = self._inputs(candidate)
        return float(x @ self._weights - self._times * np.sqrt(x @ self._inverse @ x))

    def _inputs(self, candidate: Candidate) -> np.ndarray:
        return np.concatenate([candidate.whole, candidate.stages.mean(0), [1.0]])


class Deaf(Auto):
    """What came of leaving the planner's choice teaches it nothing."""

    def __init__(self, judge: GainEstimator, caution: float = 0.0) -> None:
        super().__init__(judge=judge)
        self._caution = caution

    def _bound(self, candidate: Candidate, state: AutoState) -> float:
        assert self._judge is not None
        return self._judge.lower_bound(candidate) - self._caution


class Kept(Auto):
    """Its next run begins with what came of leaving the planner's choice, but with nothing else that was learned."""

    _last: AutoState | None = None

    def initial(self, limits: Limits, knobs: Knobs) -> AutoState:
        known = {} if self._last is None else {kind: r.aged() for kind, r in self._last.residuals.items()}
        return replace(super().initial(limits, knobs), residuals=known)

    def decide(self, snapshot: Snapshot, state: AutoState) -> tuple[Knobs, AutoState, Reason]:
        knobs, self._last, reason = super().decide(snapshot, state)
        return knobs, self._last, reason


class RollOuts(Auto):
    """Tries each candidate in a simulator of what is known now; leaves the planner's choice for 3 % more rows."""

    name = "roll-outs"

    def __init__(self) -> None:
        super().__init__(judge=Detector())  # a judge there must be; it decides nothing

    def _choose(self, found: Sequence[Candidate], snapshot: Snapshot, state: AutoState) -> tuple[Candidate, float]:
        last = state.planner.last
        if len(found) == 1 or last is None:
            return found[0], 0.0
        truth = calibrated(last, snapshot, found[0].state)
        rows = []
        for one in found:
            simulator = Simulator(lambda _: truth, state.planner.limits, state.planner.limits.clamp(one.knobs))
            simulator.advance(_AHEAD_S)
            rows.append(simulator.consumed / 1.03 ** (one is not found[0]))
        best = int(np.argmax(rows))
        return found[best], rows[best] / max(1.0, rows[0]) - 1


def calibrated(last: Snapshot, now: Snapshot, state: Planned) -> TrueCosts:
    """The pipeline as the stage models have it."""
    seen = rates(last, now)
    assert seen is not None
    stages = []
    for stage in now.stages:
        service = state.services[stage.name]
        rows = stage.rows / max(1, stage.items) or 1.0
        few, many = min(service.points), max(service.points)
        one, cpu = service.busy_s(few), service.cpu_s(few)
        bent = (service.busy_s(many) / one - 1) / max(1, many - few)
        stages.append(SimStage(
            name=stage.name, cost_s=max(1e-9, one * rows), rows_per_item=max(1.0, rows), sigma=min(1.0, max(0.0, bent)),
            cpu=min(1.0, cpu / one), bytes_per_row=stage.bytes / max(1, stage.rows),
            backends=state.limits.backends_of(stage.name)))
    demand = seen.demand_rows_per_s
    batch = max(1, round(now.rows / max(1, now.batches)))
    return TrueCosts(SimMachine(cores=max(0.05, now.cpu_quota), memory_limit=1e15), tuple(stages),
                     Consumer(batch_rows=batch, step_s=batch / demand if demand and seen.stall < 0.9 else 0.0))


@dataclass(frozen=True, slots=True)
class Run:
    """One policy through one pipeline with one seed."""

    policy: str
    family: str
    pipeline: int
    seed: int
    rows: float
    early: float
    """Rows in the 60 s after the start and after each change."""
    left: int
    decisions: int
    killed: bool


def _policy(name: str, work: Path) -> Policy:
    twin, _, how = name.partition("+")
    if twin in TWINS:
        judge = Advantage({**load().weights, "caution": np.array([float(twin == "bounded"), 0.0])})
        if how in ("", "prior"):
            return Deaf(judge, -Residual().correction if how else 0.0)
        return Kept(judge=judge) if how == "kept" else Auto(judge=judge)
    if name == "linear":
        return Deaf(Linear(Samples.join([Samples.load(p) for p in sorted(work.glob("seed0-*.npz"))])))
    if name == "detector":
        return Deaf(Detector())
    return RollOuts() if name == "roll-outs" else make(name)


def one(task: tuple[tuple[str, ...], bool, int, int, Path]) -> list[Run]:
    """All policies through one pipeline, seed after seed."""
    names, changing, number, seeds, work = task
    scenario = held_out(number, changing=changing)
    policies = {name: _policy(name, work) for name in ("planner", *names)}
    found = []
    for seed, (name, policy) in itertools.product(range(seeds), policies.items()):
        left = 0

        def count(_: Snapshot, __: Any, reason: Any) -> None:
            nonlocal left
            left += "left" in reason.details

        outcome = run(scenario, policy, seed=seed, observe=count)
        early = set()
        for at in [0.0, *(c.at for c in scenario.changes)]:
            early |= set(range(round(at), min(round(at) + _AFTER_S, len(outcome.rates))))
        found.append(Run(name, scenario.family, number, seed, outcome.rows, sum(outcome.rates[i] for i in early), left,
                         len(outcome.rates), outcome.killed))
    return found


def gain(runs: Sequence[Run], policy: str, family: str, what: str,
         beside: str = "planner") -> tuple[float, float, float]:
    """Mean of rows ÷ the other's, less 1, over pipelines; and the interval's two ends."""
    own = {(r.pipeline, r.seed): getattr(r, what) for r in runs if (r.policy, r.family) == (policy, family)}
    base = {(r.pipeline, r.seed): getattr(r, what) for r in runs if (r.policy, r.family) == (beside, family)}
    pipelines = sorted({p for p, _ in own})
    each = np.array([np.mean([own[k] / max(1.0, base[k]) - 1 for k in own if k[0] == p]) for p in pipelines])
    draws = np.random.default_rng(0).choice(each, (2000, len(each))).mean(1)
    return float(each.mean()), float(np.percentile(draws, 2.5)), float(np.percentile(draws, 97.5))


def main(argv: Iterable[str]) -> Mapping[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learned", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--policy", action="append", choices=RIVALS, help="of these alone (default: all)")
    add("--pipelines", type=int, default=20, help="of each family (default: %(default)s)")
    add("--seeds", type=int, default=5, help="(default: %(default)s)")
    add("--work", type=Path, default=Path("build/policy"), help="the tries of `make policy`, for linear")
    add("--processes", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    options = parser.parse_args(list(argv))
    policies = tuple(options.policy or RIVALS)
    if "linear" in policies and not list(options.work.glob("seed0-*.npz")):
        raise UsageError(f"--work {options.work}: no tries are there; `make policy` makes them")
    todo = [(policies, changing, number, options.seeds, options.work) for number in range(options.pipelines)
            for changing in (False, True)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        runs = [r for found in pool.imap_unordered(one, todo) for r in found]
        pool.close()
        pool.join()
    told: dict[str, Any] = {}
    say("| rows more than the planner's, 95 % | stationary, all | changing, all | stationary, 60 s after the start "
        "| changing, 60 s after start and changes | left, of decisions | kills |\n" + "|---" * 7 + "|")
    for policy in policies:
        cells = {f"{family} {what}": gain(runs, policy, family, what) for what in ("rows", "early")
                 for family in ("stationary", "changing")}
        own = [r for r in runs if r.policy == policy]
        left = sum(r.left for r in own) / sum(r.decisions for r in own)
        say(f"| {policy} | " + " | ".join(f"{m:+.2%} ({a:+.2%} to {b:+.2%})" for m, a, b in cells.values())
            + f" | {left:.2%} | {sum(r.killed for r in own)} |")
        if (twin := policy.partition("+")[0]) != policy and twin in policies:
            beside = [gain(runs, policy, family, what, twin) for what in ("rows", "early")
                      for family in ("stationary", "changing")]
            say(f"| {policy} beside {twin} | " + " | ".join(f"{m:+.2%} ({a:+.2%} to {b:+.2%})" for m, a, b in beside)
                + " | | |")
        told[policy] = {**{k: [round(x, 4) for x in v] for k, v in cells.items()}, "left": round(left, 5)}
    return {"simulated": True, "pipelines": options.pipelines, "seeds": options.seeds, "policies": told}


if __name__ == "__main__":
    program(main)
