"""Compares large batches with small ones: `python -m benchmarks.large_batches --work DIR`.

Fixed beforehand: one epoch of a DLRM of `sluice train`'s sizes on synthetic Criteo clicks; row-wise Adagrad updates the
tables in each arm. Small batches (2,048 rows) have Adam for the dense layers; large ones (16,384) Adam or Adagrad,
both with a straight warm-up over the first tenth of the epoch.

Rates are looked for in each arm by itself, on the validation split of a smaller table with seed 100: the dense layers'
of `ARMS` with .05 for the tables, then the tables' at the best of these. Where the best one lies at an end of its row,
the next by a factor of three is looked at too, `--reach` times at most. With that pair the arm is trained on the whole
table with another seed and judged on the test split after an eighth, a quarter, a half and all of its rows: whether a
large batch lacks steps shows in how its distance shrinks. The aim: at the end within .003 of the small batches' AUC.

8 M rows to train on (`--rows 10000000`, a tenth each are validation and test), rates looked for on 1 M: 25 minutes of
one quiet core. What was measured is kept in DIR, a line for each training: a run that was cut short goes on. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import made
from benchmarks.results import Results, table
from benchmarks.trainer import step
from sluice.common.program import run, say
from sluice.dlrm import run_plan
from sluice.dlrm.evaluation.split import evaluate
from sluice.dlrm.options import Config, OptimConfig
from sluice.dlrm.ranks import Ranks, machine, world
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.training import loaders
from sluice.dlrm.training.assemble import parts_of
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.etl.table.table import FeatureTable
from sluice.ingest.loader import BatchLoader


class Arm(NamedTuple):
    batch: int
    optimiser: str
    dense: tuple[float, ...]
    """Rates of the dense layers that are looked at."""
    tables: tuple[float, ...]
    """Rates of the tables, beside .05."""


ARMS = {
    "small": Arm(2048, "adam", (0.001, 0.003, 0.01), (0.015, 0.15)),
    "large, adam": Arm(16384, "adam", (0.003, 0.01, 0.03), (0.15, 0.45)),
    "large, adagrad": Arm(16384, "adagrad", (0.01, 0.03, 0.1), (0.15, 0.45)),
}
PARTS = (0.125, 0.25, 0.5, 1.0)


class Asked(NamedTuple):
    """One training."""

    rows: int
    arm: Arm
    rates: tuple[float, float]
    seed: int
    split: str
    parts: tuple[float, ...]
    """Of the epoch, after which the split is looked at."""


def trained(asked: Asked, data: FeatureTable, here: Ranks) -> dict[str, Any]:
    """The AUC after each part of an epoch, and the processor time of training."""
    _, arm, rates, seed, split, parts = asked
    warmup = "constant" if arm.batch == ARMS["small"].batch else "warmup=0.1,by=epoch"
    config = Config(
        data=data.uri,
        version=data.version,
        batch_size=arm.batch,
        seed=seed,
        optim=OptimConfig(
            lr=rates[0],
            dense_lr=rates[1],
            dense_optimiser=arm.optimiser,
            schedule=warmup,
            dense_schedule=warmup,
        ),
    )
    now, aucs, core_s = run_plan.plan_run(config, data, machine(1, 1)), list[float](), 0.0
    with BatchLoader(data, batch_size=arm.batch, seed=seed) as loader:
        of_it = parts_of(
            config,
            now.layout,
            len(loader.dense_names),
            now.placement,
            here,
            steps_per_epoch=len(loader),
        )
        looks = {max(1, round(part * len(loader))) for part in parts}
        began = time.process_time()
        for number, batch in enumerate(loader):
            step(of_it, batch, number, here)
            if number + 1 in looks:
                core_s += time.process_time() - began
                with loaders.evaluation(config, data, split, rank=0, local_ranks=1) as batches:
                    checker = BatchChecker(
                        {t.name: t.rows for t in now.layout.columns}, batches.dense_names, split
                    )
                    aucs.append(evaluate(of_it, batches, checker, here).quality.auc)
                say(
                    f"batches of {arm.batch:,}, {arm.optimiser}, lr {rates[0]:g}, dense-lr {rates[1]:g}, seed {seed}: "
                    f"{split} AUC {aucs[-1]:.4f} after {number + 1:,} of {len(loader):,} steps"
                )
                began = time.process_time()
        return {
            "aucs": aucs,
            "steps": len(loader),
            "core_us_per_sample": core_s / data.rows_of("train") * 1e6,
        }


def searched(
    arm: Arm, reach: int, quality: Callable[[tuple[float, float]], float]
) -> tuple[float, float]:
    """The best pair of rates, the tables' first."""

    def best(rates: Sequence[float], judge: Callable[[float], float]) -> float:
        known = {rate: judge(rate) for rate in rates}
        for _ in range(reach):
            top = max(known, key=known.__getitem__)
            if top in (max(known), min(known)):
                beyond = top * 3 if top == max(known) else top / 3
                known[beyond] = judge(beyond)
        return max(known, key=known.__getitem__)

    dense = best(arm.dense, lambda rate: quality((0.05, rate)))
    return best((0.05, *arm.tables), lambda rate: quality((rate, dense))), dense


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--rows", type=int, default=10_000_000, help="raw rows; eight of ten are trained on"
    )
    parser.add_argument(
        "--search-rows", type=int, default=1_250_000, help="raw rows of the table for rates"
    )
    parser.add_argument("--reach", type=int, default=1, metavar="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    quiet()
    results = Results(args.work / "results.jsonl")

    with world() as here:

        def judged(asked: Asked) -> dict[str, Any]:
            known = {
                "rows": asked.rows,
                "batch": asked.arm.batch,
                "optimiser": asked.arm.optimiser,
                "rates": asked.rates,
                "seed": asked.seed,
                "split": asked.split,
            }
            data, _ = made("criteo", asked.rows, args.work, results)
            return results.once(known, partial(trained, asked, data, here))

        def validated(arm: Arm, rates: tuple[float, float]) -> float:
            return float(
                judged(Asked(args.search_rows, arm, rates, 100, "validation", (1.0,)))["aucs"][0]
            )

        pairs = {
            name: searched(ARMS[name], args.reach, partial(validated, ARMS[name]))
            for name in args.arms
        }
        found, small = [], {}
        for seed in args.seeds:
            for name, rates in pairs.items():
                one = judged(Asked(args.rows, ARMS[name], rates, seed, "test", PARTS))
                small.setdefault(seed, one["aucs"][-1])
                found.append(
                    {
                        "arm": name,
                        "seed": seed,
                        "lr": rates[0],
                        "dense lr": rates[1],
                        "steps": one["steps"],
                        **{
                            f"at {part:g}": round(auc, 4)
                            for part, auc in zip(PARTS, one["aucs"], strict=True)
                        },
                        "to the first arm": round(one["aucs"][-1] - small[seed], 4),
                        "core µs a sample": round(one["core_us_per_sample"], 1),
                    }
                )
        best = made("criteo", args.rows, args.work, results)[1]
    say(table(found))
    return {"arms": found, "best": best}


if __name__ == "__main__":
    run(main)
