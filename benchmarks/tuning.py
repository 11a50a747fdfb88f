"""Compares policies in the simulator in the settings of a publication, and with dearer functions and other batches.

    python benchmarks/tuning.py [--only settings] [--only sweeps] [--seeds 3]

All figures are simulated. Each is the median of the seeds. The two settings are those of the publications (32 cores):
`custom`, dozens of sparse columns and 5 dense, batches of 10,000; `criteo`, 26 sparse and 13 dense, batches of 24,000.
Costs a row and column are assumptions, as the publications give none. The sweeps show what the ratios owe to them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.rollout import reference, run, score
from sluice.agent.lab.simulator.scenario import Scenario, ScheduledChange
from sluice.agent.lab.yardsticks import make_policy
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run as program

_COLUMN_S = {"load": 120e-9, "shuffle": 25e-9, "batch": 30e-9, "udf": 400e-9, "prefetch": 20e-9}
_ITEM_S = 2e-3  # of each stage for a batch, whatever its size
_BATCH = {"custom": 10_000, "criteo": 24_000}
_COLUMNS = {"custom": (40, 5), "criteo": (26, 13)}
_POLICIES = (
    "fixed",
    "even",
    "cores",
    "autotune",
    "plumber",
    "intune",
    "auto",
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
            score(run(scenario, make_policy(name, scenario), seed=s), best[s]) for s in range(seeds)
        )
        for name in _POLICIES
    }


def settings_table(seeds: int) -> dict[str, Any]:
    tables = {}
    ratios_of = "auto ÷ autotune | ÷ even | intune ÷ autotune"
    head = f"| setting | {' | '.join(_POLICIES)} | {ratios_of} |"
    say(f"\n{_PUBLISHED}\n{head}\n|" + "---|" * (len(_POLICIES) + 4))
    for setting in _BATCH:
        for rescale in (False, True):
            scores = compare(published(setting, rescale=rescale), seeds)
            name = setting + (", 32 → 8 → 32 cores" if rescale else "")
            ratios = [scores["auto"] / scores[p] for p in ("autotune", "even")]
            say(
                f"| {name} | "
                + " | ".join(f"{scores[p]:.3f}" for p in _POLICIES)
                + " | "
                + " | ".join(f"{r:.2f}" for r in [*ratios, scores["intune"] / scores["autotune"]])
                + " |"
            )
            tables[name] = scores
    return tables


def sweep_table(seeds: int) -> dict[str, Any]:
    tables = {}
    shown = ("even", "autotune", "plumber", "intune", "auto")
    say(
        "\n| criteo | "
        + " | ".join(shown)
        + " | auto ÷ autotune | auto ÷ even |\n|"
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
            + f" | {scores['auto'] / scores['autotune']:.2f} | {scores['auto'] / scores['even']:.2f} |"
        )
        tables[name] = scores
    return tables


TABLES = {"settings": settings_table, "sweeps": sweep_table}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=list(TABLES), action="append", help="this table (default: both)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        raise UsageError("--seeds is at least 1")
    return {name: TABLES[name](options.seeds) for name in options.only or TABLES}


if __name__ == "__main__":
    program(main)
