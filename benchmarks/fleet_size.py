"""Compares numbers of remote workers: the planner, which knows their price, Ray Data's thresholds and DS2. Simulated.

    python -m benchmarks.fleet_size --seeds 40

A case is drawn from its seed: hosts that differ by a third, 20 to 90 s until one has started, hosts that are taken away
(a life of 3 to 30 minutes, in two cases of three), other jobs that come and go (they leave few hosts for a while, in a
third), and a trainer that changes its pace, pauses or ends (two changes within the run). The trainer needs 3 to 16
workers, in a quarter of the cases more than its host can take in. A policy begins with one worker, and with as many of
this host's own as are needed: of that, the rivals change nothing.

Fixed beforehand: the worth of a run is its rows less a price for each core-second, by what a trainer that never waits
takes; a core-second costs 1 % of what it takes in a second. Beside it the stall after the first start, and the
core-seconds. Differences are paired by seed, their intervals are bootstrapped."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.agent.controller import Controller
from sluice.agent.planner_settings import PlannerSettings
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.simulator.scenario import Scenario, ScheduledChange
from sluice.agent.tunable import Policy
from sluice.benchmarks.rivals.fleets import Ds2Fleet, RayThresholds
from sluice.benchmarks.simulated_fleet import FleetPipeline, FleetTruth
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.common.settings import parse, setting

BATCH, GROUP = 8192, 65536
POLICIES = ("planner", "ray-thresholds", "ds2", "planner, no price")


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Which cases, and at which price."""

    title = "cases"
    seeds: int = setting(40, "cases", least=1)
    first: int = setting(0, "the first seed")
    price: float = setting(
        0.01, "of what the trainer takes in a second, for each core-second", above=0
    )
    policy: tuple[str, ...] = setting(POLICIES, "these policies", metavar="P", again=True)
    processes: int = setting(1, "processes that simulate", least=1)


@dataclass(frozen=True, slots=True)
class Case:
    scenario: Scenario
    truth: FleetTruth
    full: float
    """Rows that a trainer which never waits takes in all."""
    per_s: float
    """Those that it takes in a second at first."""


def drawn(seed: int) -> Case:
    """The case of a seed."""
    random = np.random.default_rng((10, seed))
    per_s = float(10 ** random.uniform(5, 6.3))
    needed = float(random.uniform(3, 16))
    cost_s = needed * GROUP / per_s
    seconds = 1200.0
    step_s = BATCH / per_s
    changes, paces = [], [(0.0, 1.0)]
    for at in sorted(random.uniform(200, 1000, size=2)):
        pace = float(random.choice([0.3, 0.5, 0.7, 1.4]))
        if random.random() < 0.4:  # an evaluation, after which all is as before
            until = at + float(random.uniform(15, 90))
            changes += [(at, 1e-3), (until, paces[-1][1])]
            paces += [(at, 1e-3), (until, paces[-1][1])]
        else:
            changes.append((at, pace))
            paces.append((at, pace))
    paces.sort()
    life_s = float(random.uniform(180, 1800)) if random.random() < 2 / 3 else math.inf
    hosts: tuple[tuple[float, int], ...] = ((0.0, 64),)
    if random.random() < 1 / 3:
        begin = float(random.uniform(100, 800))
        hosts = (
            (0.0, 64),
            (begin, max(1, int(needed * random.uniform(0.2, 0.8)))),
            (begin + float(random.uniform(60, 300)), 64),
        )
    narrow = float(random.uniform(0.5, 0.9)) if random.random() < 0.25 else 1.5
    host_s = 4 / (narrow * per_s) * BATCH  # what four workers of the host take in
    stages = (
        SimStage(
            name="read",
            cost_s=cost_s,
            rows_per_item=GROUP,
            cpu=0.02,
            workers=64,
            workers_a_core=0,
            backends=("remote", "thread"),
            bytes_per_row=160,
            tail=0.2,
        ),
        SimStage(name="batch", cost_s=BATCH / per_s / 20, rows_per_item=BATCH, workers=4),
        SimStage(
            name="transform",
            cost_s=host_s,
            rows_per_item=BATCH,
            workers=4,
            workers_a_core=0,
            cpu=0.2,
        ),
        SimStage(name="collate", cost_s=BATCH / per_s / 20, rows_per_item=BATCH, workers=1),
    )
    scenario = Scenario(
        name=f"fleet {seed}",
        seconds=seconds,
        machine=SimMachine(cores=16, memory_limit=64 * 2**30),
        stages=stages,
        consumer=Consumer(batch_rows=BATCH, step_s=step_s),
        start={"read": 2, "batch": 2, "transform": 4, "collate": 1},
        changes=tuple(
            ScheduledChange(at=at, key="consumer.step_s", value=step_s / pace)
            for at, pace in changes
        ),
    )
    ends = [at for at, _ in paces[1:]] + [seconds]
    full = sum(pace * per_s * (end - at) for (at, pace), end in zip(paces, ends, strict=True))
    return Case(
        scenario,
        FleetTruth(start_s=float(random.uniform(20, 90)), unlike=0.33, life_s=life_s, hosts=hosts),
        full,
        per_s,
    )


def made(name: str, price: float) -> Policy:
    if name.startswith("planner"):
        return Planner(
            PlannerSettings(remote_core_price=1e-9 if name.endswith("no price") else price)
        )
    return {"ray-thresholds": RayThresholds, "ds2": Ds2Fleet}[name]()


def held(case: Case, policy: Policy, seed: int, price: float) -> dict[str, float]:
    """One run of one policy."""
    pipeline = FleetPipeline(case.scenario, case.truth, seed=seed)
    controller = Controller(pipeline, policy, record=lambda _: None, clock=lambda: pipeline.now)
    begun: tuple[float, float] | None = None
    for second in range(int(case.scenario.seconds)):
        controller.step()
        pipeline.advance(1.0)
        if begun is None and second >= 2 * case.truth.start_s:
            begun = pipeline.sim.wait_s, pipeline.sim.compute_s
    if controller.frozen:
        raise RuntimeError(f"{case.scenario.name}, {policy.name}: {controller.frozen}")
    assert begun is not None
    sim, core_s = pipeline.sim, pipeline.fleet.core_s
    waited, computed = sim.wait_s - begun[0], sim.compute_s - begun[1]
    return {
        "worth": (sim.consumed - price * case.per_s * core_s) / case.full,
        "rows": sim.consumed / case.full,
        "stall": waited / (waited + computed),
        "core_s": core_s,
        "decisions": float(controller.decisions),
    }


def _work(task: tuple[int, float, tuple[str, ...]]) -> dict[str, dict[str, float]]:
    seed, price, names = task
    case = drawn(seed)
    return {name: held(case, made(name, price), seed, price) for name in names}


def interval(values: np.ndarray) -> tuple[float, float]:
    """Of the mean, 95 %, by drawing anew."""
    random = np.random.default_rng(0)
    means = values[random.integers(len(values), size=(4000, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def main(argv: list[str]) -> dict[str, Any]:
    options = parse(FleetOptions, argv, "python -m benchmarks.fleet_size", description=__doc__)
    tasks = [(options.first + n, options.price, options.policy) for n in range(options.seeds)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        runs = list(pool.imap(_work, tasks))
    first = options.policy[0]
    figures = {}
    say(
        f"| policy | worth | {first} less it | stall | core-seconds | changes |\n|---|---|---|---|---|---|"
    )
    for name in options.policy:
        of = {
            key: np.array([one[name][key] for one in runs])
            for key in ("worth", "stall", "core_s", "decisions")
        }
        ahead = np.array([one[first]["worth"] for one in runs]) - of["worth"]
        low, high = interval(ahead)
        figures[name] = {
            "worth": of["worth"].mean(),
            "median": float(np.median(of["worth"])),
            "ahead": ahead.mean(),
            "low": low,
            "high": high,
            "stall": of["stall"].mean(),
            "core_s": of["core_s"].mean(),
        }
        say(
            f"| {name} | {of['worth'].mean():.3f} | {ahead.mean():+.3f} ({low:+.3f} to {high:+.3f}) | "
            f"{of['stall'].mean():.1%} | {of['core_s'].mean():,.0f} | {of['decisions'].mean():.1f} |"
        )
    return {
        "policies": {
            name: {key: round(float(value), 4) for key, value in row.items()}
            for name, row in figures.items()
        },
        "seeds": options.seeds,
        "simulated": True,
    }


if __name__ == "__main__":
    program(main)
