"""The decisions of `planner` and `auto` in simulated pipelines, which are drawn from seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.scenario_json import load
from tests.agent.simulated_fleet import FleetPipeline, FleetTruth
from tests.frozen.digest import digest, key_paths_by_kind

SEEDS = 64
SECONDS = 60
POLICIES = ("planner", "auto")
_ROWS = 8192


def record(folder: Path) -> dict[str, Any]:
    """Runs each policy on each seed. A hash stands for the sequence of decisions (when, what kind, which knobs) and for
    the setting that the learned policy proposed."""
    found: dict[str, Any] = {name: {} for name in POLICIES}
    lines: list[dict[str, Any]] = []
    for seed in range(SEEDS):
        drawn = _drawn(seed)
        path = folder / f"{seed}.json"
        path.write_text(json.dumps(drawn["scenario"]))
        for name in POLICIES:
            ran = _run(path, drawn["fleet"], name, seed)
            decisions = [_shown(line) for line in ran if line["kind"] == "decision"]
            proposed = [
                line["record"]["opening"]["knobs"] for line in ran if line["kind"] == "opening"
            ]
            found[name][f"seed {seed:02}"] = (
                f"{len(decisions)} decisions {digest(*decisions, *proposed)}"
            )
            lines += ran
    return {**found, "keys": key_paths_by_kind(lines)}


def _run(path: Path, fleet: dict[str, Any] | None, policy: str, seed: int) -> list[dict[str, Any]]:
    """Returns the events and the metrics that the agent writes in one run."""
    scenario = load(path)
    pipeline: Any
    if fleet is None:
        pipeline = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs, seed=seed)
    else:
        pipeline = FleetPipeline(scenario, FleetTruth(**fleet), seed=seed)
    lines: list[dict[str, Any]] = []

    def write(line: dict[str, Any]) -> None:
        lines.append({"at": round(pipeline.now, 3), **json.loads(json.dumps(line, default=dict))})

    agent = Controller(
        pipeline, policies.make(policy), record=write, observe=write, clock=lambda: pipeline.now
    )
    while pipeline.now < SECONDS:
        agent.step()
        pipeline.advance(agent.wait_s)
    agent.stop()
    assert agent.frozen is None, agent.frozen
    return lines


def _shown(decision: dict[str, Any]) -> list[Any]:
    reason = decision["reason"]
    return [decision["at"], decision["after"], reason["bottleneck"], reason["details"].get("kind")]


def _drawn(seed: int) -> dict[str, Any]:
    """Draws a scenario, as docs/scenarios.md describes its file, and for each eighth seed a fleet of remote workers."""
    draw = random.Random(f"pipeline {seed}")
    cores, count, fleet = draw.choice([1, 2, 4, 8, 16, 48]), draw.randint(2, 6), seed % 8 == 7
    stages = [_drawn_stage(draw, number) for number in range(count)]
    if fleet:
        stages[0] |= {"backends": ["remote", "thread"], "cpu": 0.05, "max_workers": 32}
    row_s = sum(stage["cost_s"] * max(stage["cpu"], 0.05) for stage in stages) / _ROWS
    step_s = draw.choice([0.0, _ROWS * row_s / cores * draw.uniform(0.7, 2)])
    held = sum(stage["item_bytes"] for stage in stages)
    memory = 2**30 + 4 * held + draw.choice([0.5, 4, 40]) * cores * held
    scenario = {
        "name": f"seed {seed}",
        "seconds": SECONDS,
        "stages": stages,
        "machine": {"cores": cores, "memory_limit": memory},
        "consumer": {"batch_rows": _ROWS, "step_s": step_s},
        "changes": _drawn_changes(draw, stages, cores),
    }
    return {"scenario": scenario, "fleet": {"start_s": 8.0, "unlike": 0.2} if fleet else None}


def _drawn_stage(draw: random.Random, number: int) -> dict[str, Any]:
    stage = {
        "name": f"stage {number}",
        "cost_s": _ROWS * 10 ** draw.uniform(-6.5, -4.8),
        "rows_per_item": _ROWS,
        "cpu": draw.choice([1.0, 1.0, draw.uniform(0.05, 0.9)]),
        "item_bytes": _ROWS * draw.uniform(100, 900),
    }
    if number and draw.random() < 0.3:
        stage |= {"lock": draw.uniform(0.1, 1), "backends": ["thread", "process"]}
    if draw.random() < 0.3:
        stage |= {"sigma": draw.uniform(0, 0.1), "kappa": 10 ** draw.uniform(-4, -2)}
    if draw.random() < 0.15:
        stage["tail"] = draw.uniform(0.2, 1.5)
    if number and draw.random() < 0.3:
        stage["fusable"] = True
    return stage


def _drawn_changes(
    draw: random.Random, stages: list[dict[str, Any]], cores: int
) -> list[dict[str, Any]]:
    if draw.random() < 0.25:
        return []
    name = draw.choice(stages)["name"]
    return [
        {
            "at": draw.randint(15, 35),
            "over": draw.choice([0, 0, 10]),
            **draw.choice(
                [
                    {"scale": {f"stages.{name}.cost_s": draw.choice([0.25, 4])}},
                    {"set": {"machine.cores": max(1, cores // 2)}},
                ]
            ),
        }
    ]
