"""Compares the towers: `python -m benchmarks.models --work DIR`.

Fixed beforehand: one epoch, on synthetic Criteo clicks (features/criteo.toml). Widths and layers are `sluice train`'s
defaults; the batch follows the rows. For each tower, learning rates are searched first, on the validation split with
seed 100: those of the dense layers in 0.001, 0.003 and 0.01 at 0.05 for the tables, then those of the tables in 0.02
and 0.1 at the best of them. With that pair, three other seeds are trained and judged on the test split. The table has
their mean and largest distance, and the AUC of the probabilities that the labels were drawn from. No model can pass
that AUC by more than chance.

2,000,000 rows take some six hours on two quiet cores. `--only dlrm dcn` compares these two. What was measured is kept
in DIR: a run that was cut short goes on. The loader runs in the training's process. On a machine that others use too,
the processor time is reliable, and samples/s are not. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Results, run_python, table
from benchmarks.trainer import learned
from sluice.common.lines import say
from sluice.common.program import run
from sluice.dlrm.options import MODELS, Config, ModelConfig, OptimConfig
from sluice.dlrm.ranks import Ranks, world
from sluice.dlrm.session.defaults import defaults
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.etl.table.table import FeatureTable

DENSE_RATES, TABLE_RATES, SEEDS = (0.001, 0.003, 0.01), (0.02, 0.1), (101, 102, 103)
KINDS = [kind for kind in MODELS if kind != "dien"]
"""DIEN needs histories, which these rows do not have."""


def make_table(rows: int, work: Path, results: Results) -> tuple[FeatureTable, float]:
    """Makes the feature table. Returns it, and the best AUC that can be reached on it."""
    folder = work / f"criteo-{rows}"

    def make() -> dict[str, Any]:
        folder.mkdir(parents=True)
        raw, spec = str(folder / "raw"), str(ROOT / "features/criteo.toml")
        made = run_python("-m", "sluice", "synth", "--rows", rows, "--seed", 7, "--out", raw)
        words = ["--spec", spec, "--input", raw, "--output", folder / "table"]
        run_python("-m", "sluice", "etl", *words)
        return dict(made["last"])

    about = results.once({"made": "criteo", "rows": rows}, make)
    return FeatureTable.open(str(folder / "table")), about["bayes_auc"]


def compared(args: argparse.Namespace, results: Results, here: Ranks) -> list[dict[str, Any]]:
    """Returns one line for each tower."""
    data, best = make_table(args.rows, args.work, results)
    rows = data.rows_of("train")
    batch = defaults(rows)["batch_size"]

    def judged(kind: str, rates: tuple[float, float], seed: int, split: str) -> dict[str, Any]:
        config = Config(
            data=data.uri,
            version=data.version,
            batch_size=batch,
            seed=seed,
            model=ModelConfig(kind=kind),
            optim=replace(OptimConfig(), lr=rates[0], dense_lr=rates[1]),
        )
        asked = {"rows": rows, "model": kind, "rates": rates, "seed": seed, "split": split}
        costs: dict[str, Any] = results.once(
            asked, lambda: learned(config, data, here, split=split)
        )
        say(
            f"{kind} lr {rates[0]} dense-lr {rates[1]} seed {seed}: {split} AUC {costs['auc']:.4f}, "
            f"{costs['samples_per_s']:,.0f} samples/s"
        )
        return costs

    def searched(kind: str) -> tuple[float, float]:
        def validated(rates: tuple[float, float]) -> float:
            return float(judged(kind, rates, 100, "validation")["auc"])

        dense = max(DENSE_RATES, key=lambda rate: validated((0.05, rate)))
        return max(((lr, dense) for lr in (0.05, *TABLE_RATES)), key=validated)

    lines = []
    for kind in args.only:
        rates = searched(kind)
        runs = [judged(kind, rates, seed, "test") for seed in SEEDS]
        aucs = [run["auc"] for run in runs]
        lines.append(
            {
                "model": kind,
                "test AUC": round(statistics.mean(aucs), 4),
                "spread": round(max(aucs) - min(aucs), 4),
                "best": best,
                "lr": rates[0],
                "dense lr": rates[1],
                "dense parameters": runs[0]["parameters"],
                "table parameters": runs[0]["table_bytes"] // 4,
                "samples/s": round(statistics.median(run["samples_per_s"] for run in runs)),
                "core µs a sample": round(
                    statistics.median(run["core_us_per_sample"] for run in runs), 1
                ),
            }
        )
    return lines


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of clicks")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, help="these towers alone"
    )
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    quiet()
    with world() as here:
        lines = compared(args, Results(args.work / "results.jsonl"), here)
    say(table(lines))
    return {"models": lines}


if __name__ == "__main__":
    run(main)
