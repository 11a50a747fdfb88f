"""Compares our `autotune` with tf.data's AUTOTUNE: the workers that each gives to the stages of small graphs.

    python -m benchmarks.autotune_peer [--graphs 30] [--seconds 8]

Each graph is a chain of one to four parallel maps with known costs and a budget of 4, 8 or 16 cores. tf.data runs it
(`make bench-peers` makes its environment) with functions that sleep on as many threads as the budget has, and tells its
choice through `tf.data.experimental.get_model_proto`; ours meets the same costs and budget in the simulator. tf.data's
published algorithm is HILL_CLIMB, which `autotune` follows; what this release does by DEFAULT is shown beside it. A
graph agrees when every stage is within one worker.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.peer import ROOT
from benchmarks.results import table
from sluice.agent.policies import make
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.simulator.rollout import run as simulated
from sluice.agent.simulator.scenario import Scenario
from sluice.common.errors import UsageError
from sluice.common.program import run, say

ALGORITHMS = ("HILL_CLIMB", "DEFAULT")
_CORES = (4, 8, 16)
_COST_S = (0.008, 0.08)
_PYTHON = ROOT / ".venv-peers-tf" / "bin" / "python"
_SIMULATED_S = 40.0


@dataclass(frozen=True, slots=True)
class Graph:
    costs: tuple[float, ...]
    """Seconds of each stage for an element."""
    cores: int


def graphs(count: int, seed: int) -> list[Graph]:
    """One to four stages in turn, their costs spread evenly on a logarithmic scale."""
    random_ = random.Random(seed)
    low, high = _COST_S
    return [
        Graph(
            tuple(round(low * (high / low) ** random_.random(), 4) for _ in range(1 + i % 4)),
            random_.choice(_CORES),
        )
        for i in range(count)
    ]


def theirs(todo: list[Graph], algorithm: str, seconds: float, at_once: int) -> list[dict[str, Any]]:
    asked = {
        "algorithm": algorithm,
        "seconds": seconds,
        "at_once": at_once,
        "graphs": [{"costs": list(g.costs), "cores": g.cores} for g in todo],
    }
    done = subprocess.run(
        [str(_PYTHON), "-m", "benchmarks.peers.tf_autotune"],
        cwd=ROOT,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError(
            f"tf.data ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(graph: Graph) -> list[int]:
    stages = tuple(
        SimStage(name=f"s{i}", cost_s=cost, rows_per_item=1, bytes_per_row=8, buffer_items=16)
        for i, cost in enumerate(graph.costs)
    )
    scenario = Scenario(
        name="graph",
        seconds=_SIMULATED_S,
        stages=stages,
        consumer=Consumer(batch_rows=1),
        machine=SimMachine(cores=graph.cores, timer_noise=0, switch_cost=0),
    )
    chosen = simulated(scenario, make("autotune")).knobs.workers
    return [chosen[stage.name] for stage in stages]


def agree(some: list[int], others: list[int]) -> bool:
    return all(abs(a - b) <= 1 for a, b in zip(some, others, strict=True))


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=8.0,
        help="that tf.data has for each (default: %(default)s)",
    )
    parser.add_argument(
        "--at-once", type=int, default=8, help="graphs of tf.data at a time (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the graphs (default: %(default)s)")
    options = parser.parse_args(argv)
    if min(options.graphs, options.seconds, options.at_once) <= 0:
        raise UsageError("--graphs, --seconds and --at-once are positive")
    if not _PYTHON.exists():
        raise UsageError("there is no environment for tf.data; run: make bench-peers")
    todo = graphs(options.graphs, options.seed)
    found = {a: theirs(todo, a, options.seconds, options.at_once) for a in ALGORITHMS}
    rows: list[dict[str, Any]] = []
    for i, graph in enumerate(todo):
        own = ours(graph)
        rows.append(
            {
                "cores": graph.cores,
                "costs in ms": " ".join(f"{1000 * c:.1f}" for c in graph.costs),
                "ours": " ".join(map(str, own)),
                **{a: " ".join(map(str, found[a][i]["workers"])) for a in ALGORITHMS},
                **{f"{a} agrees": agree(own, found[a][i]["workers"]) for a in ALGORITHMS},
            }
        )
    say(table(rows))
    stages = [
        abs(a - b) <= 1
        for row in rows
        for a, b in zip(
            map(int, row["ours"].split()), map(int, row["HILL_CLIMB"].split()), strict=True
        )
    ]
    return {
        "graphs": len(todo),
        **{
            f"{a.lower()}_agrees": round(sum(row[f"{a} agrees"] for row in rows) / len(rows), 3)
            for a in ALGORITHMS
        },
        "hill_climb_stages_agree": round(sum(stages) / len(stages), 3),
        "by_stages": {
            n: round(sum(r["HILL_CLIMB agrees"] for r in some) / len(some), 3)
            for n in range(1, 5)
            if (some := [r for r, g in zip(rows, todo, strict=True) if len(g.costs) == n])
        },
    }


if __name__ == "__main__":
    run(main)
