"""Tuning in the simulator: the published settings and sweeps, how fast it simulates one pipeline and many at once, and
what a decision costs.

    python benchmarks/tuning.py                 every table, about three minutes on 2 cores
    python benchmarks/tuning.py --only speed

The scenario tables come from `sluice policies`. All figures are simulated, and each says how many seeds it is
the median of. The two settings are those of the publications (32 cores): `custom`, dozens of sparse columns and 5
dense, batches of 10 000; `criteo`, 26 sparse and 13 dense, batches of 24 000. Costs a row and column are assumptions,
as the publications give none; the sweeps show what the ratios owe to them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sluice.agent.evaluate.yardsticks import made
from sluice.agent.learn.intune_teacher import hardware_of
from sluice.agent.learn.pipeline_batch import PipelineBatch
from sluice.agent.policies.intune import STAGES, InTune
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.simulator.random_pipelines import pipeline
from sluice.agent.simulator.rollout import reference, run, score
from sluice.agent.simulator.scenario import Scenario, ScheduledChange
from sluice.common.errors import UsageError
from sluice.common.program import run as program
from sluice.common.program import say

_COLUMN_S = {"load": 120e-9, "shuffle": 25e-9, "batch": 30e-9, "udf": 400e-9, "prefetch": 20e-9}
_ITEM_S = 2e-3  # of each stage for a batch, whatever its size
_BATCH = {"custom": 10_000, "criteo": 24_000}
_COLUMNS = {"custom": (40, 5), "criteo": (26, 13)}
_POLICIES = (
    "fixed",
    "even",
    "cores",
    "autotune",
    "autotune-adaptive",
    "plumber-adaptive",
    "ds2",
    "intune",
    "planner",
)
_PUBLISHED = (
    "published: InTune 2.05–2.29 × autotune, 1.10–1.20 × an even split, 1.20 × after a rescale"
)


def published(setting: str, *, udf: float = 1.0, batch: int = 0, rescale: bool = False) -> Scenario:
    """Load, batch, shuffle, user function, prefetch on 32 cores, from one worker each, five minutes."""
    sparse, dense = _COLUMNS[setting]
    rows = batch or _BATCH[setting]
    width = 4.0 * (sparse + dense)
    stages = tuple(
        SimStage(
            name=name,
            rows_per_item=rows,
            bytes_per_row=width,
            item_bytes=2 * rows * width,
            cost_s=_ITEM_S + rows * (sparse + dense) * cost * (udf if name == "udf" else 1.0),
            cpu=0.5 if name == "load" else 1.0,
            memory_bound=0.5 if name == "shuffle" else 0.0,
            kappa=2e-4 if name == "udf" else 0.0,
        )
        for name, cost in _COLUMN_S.items()
    )
    changes = (
        ScheduledChange(at=100, key="machine.cores", value=8),
        ScheduledChange(at=200, key="machine.cores", value=32),
    )
    return Scenario(
        name=f"{setting} udf×{udf:g} batch {rows}",
        seconds=300,
        stages=stages,
        machine=SimMachine(cores=32, switch_cost=0.1, memory_limit=32 * 2**30),
        consumer=Consumer(batch_rows=rows),
        changes=changes if rescale else (),
    )


def compare(scenario: Scenario, seeds: int) -> dict[str, float]:
    """Median score of each policy."""
    best = [reference(scenario, seed=s) for s in range(seeds)]
    return {
        name: statistics.median(
            score(run(scenario, made(name, scenario), seed=s), best[s]) for s in range(seeds)
        )
        for name in _POLICIES
    }


def settings_table(seeds: int) -> dict[str, Any]:
    found = {}
    ratios_of = "planner ÷ autotune | ÷ even | ÷ autotune-adaptive | intune ÷ autotune"
    head = f"| setting | {' | '.join(_POLICIES)} | {ratios_of} |"
    say(f"\n{_PUBLISHED}\n{head}\n|" + "---|" * (len(_POLICIES) + 5))
    for setting in _BATCH:
        for rescale in (False, True):
            scores = compare(published(setting, rescale=rescale), seeds)
            name = setting + (", 32 → 8 → 32 cores" if rescale else "")
            ratios = [
                scores["planner"] / scores[p] for p in ("autotune", "even", "autotune-adaptive")
            ]
            say(
                f"| {name} | "
                + " | ".join(f"{scores[p]:.3f}" for p in _POLICIES)
                + " | "
                + " | ".join(f"{r:.2f}" for r in [*ratios, scores["intune"] / scores["autotune"]])
                + " |"
            )
            found[name] = scores
    return found


def sweep_table(seeds: int) -> dict[str, Any]:
    found = {}
    shown = ("even", "autotune", "plumber-adaptive", "ds2", "intune", "planner")
    say(
        "\n| criteo | "
        + " | ".join(shown)
        + " | planner ÷ autotune | planner ÷ even |\n|"
        + "---|" * (len(shown) + 3)
    )
    points = [{"udf": u} for u in (0.25, 0.5, 1.0, 2.0, 4.0)] + [
        {"batch": b} for b in (1024, 4096, 8192, 32_768)
    ]
    for point in points:
        scores = compare(published("criteo", **point), seeds)  # type: ignore[arg-type]
        name = ", ".join(f"{k} {v:g}" for k, v in point.items())
        say(
            f"| {name} | "
            + " | ".join(f"{scores[p]:.3f}" for p in shown)
            + f" | {scores['planner'] / scores['autotune']:.2f} | {scores['planner'] / scores['even']:.2f} |"
        )
        found[name] = scores
    return found


def ablation_table(seeds: int, blind: Path | None = None) -> dict[str, Any]:
    """The reconstruction with its model-latency input, with that held at 0, taught without it (weights in `blind`), and
    frozen once it is taught, on held-out pipelines."""
    arms: dict[str, dict[str, Any]] = {
        "intune": {},
        "intune, model latency held at 0": {"model_latency": False},
        "intune, not learning in the live pipeline": {"rate": 0.0},
    }
    if blind is not None:
        arms["intune, taught without model latency"] = {"weights": blind, "model_latency": False}
    scores: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(5 * seeds):
        scenario = pipeline("held out", i, most_stages=STAGES)
        best = reference(scenario, seed=i)
        for name, given in arms.items():
            policy = InTune(machine=hardware_of(scenario), **given)
            scores[name].append(score(run(scenario, policy, seed=i), best))
    found = {name: statistics.median(values) for name, values in scores.items()}
    say("\n| held out, at rest | median score |\n|---|---|")
    for name, value in found.items():
        say(f"| {name} | {value:.3f} |")
    return found


def speed_table(_: int) -> dict[str, Any]:
    """Decisions a second of the fluid mode on one core: an interval simulated, and its snapshot taken."""
    found = {}
    say("\n| stages | decisions/s (processor time) |\n|---|---|")
    for count in (2, 4, 6, 9):
        scenario = Scenario(
            name="speed",
            stages=tuple(SimStage(name=f"s{i}", cost_s=0.01 + 0.003 * i) for i in range(count)),
        )
        simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs)
        began = time.process_time()
        for i in range(1000):
            if i % 10 == 0:
                simulator.apply(simulator.knobs.with_workers(s0=1 + i // 10 % 8))
            simulator.advance(1.0)
            simulator.snapshot()
        found[str(count)] = round(1000 / (time.process_time() - began))
        say(f"| {count} | {found[str(count)]} |")
    return found


def lives_table(_: int) -> dict[str, Any]:
    """Episodes a minute of one core: pipelines to learn an opening from, 24 s each, with other knobs every second."""
    found: dict[str, Any] = {}
    say("\n| pipelines at once | lives a minute (processor time) |\n|---|---|")
    scenarios = [pipeline("training", number) for number in range(1024)]
    for count in (64, 256, 1024):
        draw = np.random.default_rng(0)
        began = time.process_time()
        batch = PipelineBatch(scenarios[:count])
        for _ in range(24):
            workers = batch.knobs.workers * np.exp(draw.normal(0, 0.5, batch.real.shape))
            batch.apply(
                replace(batch.knobs, workers=workers, process=draw.random(batch.real.shape) < 0.5)
            )
            batch.advance(1.0)
        found[str(count)] = round(60 * count / (time.process_time() - began))
        say(f"| {count} | {found[str(count)]:,} |")
    draw = np.random.default_rng(0)
    began = time.process_time()
    for scenario in scenarios[:64]:
        simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs)
        for _ in range(24):
            simulator.apply(
                scenario.limits.resized(
                    simulator.knobs,
                    {
                        name: max(1, round(n * np.exp(draw.normal(0, 0.5))))
                        for name, n in simulator.knobs.workers.items()
                    },
                )
            )
            simulator.advance(1.0)
    found["one by one"] = round(60 * 64 / (time.process_time() - began))
    say(f"| one by one | {found['one by one']:,} |")
    return found


def cost_table(seeds: int) -> dict[str, Any]:
    """Processor time of a decision; one a second is a tenth of a per cent of a core for each millisecond."""
    found = {}
    say("\n| policy | a decision, mean | 95 % | most |\n|---|---|---|---|")
    for name in _POLICIES:
        spent = sorted(
            s
            for i in range(2 * seeds)
            for s in _decisions(pipeline("held out", i, changing=True), name)
        )
        figures = (statistics.fmean(spent), spent[int(0.95 * len(spent))], spent[-1])
        found[name] = [round(1000 * f, 3) for f in figures]
        say(f"| {name} | " + " | ".join(f"{1000 * f:.2f} ms" for f in figures) + " |")
    return found


def _decisions(scenario: Scenario, name: str) -> list[float]:
    """Seconds of each of a hundred."""
    simulator, policy = (
        Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs),
        made(name, scenario),
    )
    state, spent = policy.initial(scenario.limits, simulator.knobs), []
    for _ in range(100):
        simulator.advance(scenario.interval_s)
        snapshot = simulator.snapshot()
        began = time.process_time()
        knobs, state, _ = policy.decide(snapshot, state)
        spent.append(time.process_time() - began)
        simulator.apply(scenario.limits.clamp(knobs))
    return spent


TABLES: dict[str, Callable[[int], dict[str, Any]]] = {
    "settings": settings_table,
    "sweeps": sweep_table,
    "ablation": ablation_table,
    "speed": speed_table,
    "lives": lives_table,
    "cost": cost_table,
}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=list(TABLES), action="append", help="this table (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--blind",
        type=Path,
        metavar="FILE",
        help="weights of `sluice teach --policy intune --without-model-latency --out FILE`",
    )
    options = parser.parse_args(argv)
    if options.seeds < 1:
        raise UsageError("--seeds is at least 1")
    tables = {**TABLES, "ablation": lambda seeds: ablation_table(seeds, options.blind)}
    return {name: tables[name](options.seeds) for name in options.only or tables}


if __name__ == "__main__":
    program(main)
