"""Every tower side by side: `python -m benchmarks.models --work DIR`.

Fixed beforehand: one epoch, on synthetic Criteo clicks (features/criteo.toml) and on sessions (features/sessions.toml,
where DIEN reads the items clicked before); widths and layers are `sluice train`'s defaults, the batch follows the rows.
For each tower rates are looked for first, on the validation split with seed 100: the dense layers' in .001, .003 and
.01 at .05 for the tables, then the tables' in .02 and .1 at the best of them. With that pair three other seeds are
trained and judged on the test split; the table has their mean and largest distance, beside the AUC of the
probabilities that the labels were drawn from, which no model can pass by more than chance. DIEN is there twice:
with one item table and with two, both at the first one's rates.

2,000,000 rows of clicks and 1,000,000 of sessions: some six hours on two quiet cores. A short form, to see that all
trains: `--rows 60000 --seeds 1 --rates short`, a quarter of an hour; `--only dlrm dcn` compares these two. What was
measured is kept in DIR: a run that was cut short goes on. samples/s, and the processor time beside them, are of
training with the loader in its process; on a machine that others use too, only the second means something. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Results, table
from benchmarks.trainer import learned
from sluice.common.program import run, say
from sluice.dlrm.options import MODELS, Config, ModelConfig, OptimConfig
from sluice.dlrm.ranks import Ranks, world
from sluice.dlrm.session.defaults import defaults
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.etl.table.table import FeatureTable

DENSE_RATES, TABLE_RATES, SEEDS = (0.001, 0.003, 0.01), (0.02, 0.1), (101, 102, 103)
SHAPES = {"criteo": ("criteo.toml", 1.0), "sessions": ("sessions.toml", 0.5)}
"""Shape → its spec, and its part of --rows."""
HISTORY = {"history": "clicked", "target": "item"}
DIEN = {"dien": {}, "dien, two tables": {"history_table": "own"}}


def models(shape: str) -> dict[str, dict[str, Any]]:
    """The towers that are compared on a shape, with their settings."""
    plain = {kind: {"kind": kind} for kind in MODELS if kind != "dien"}
    return plain | (
        {name: {"kind": "dien", **HISTORY, **how} for name, how in DIEN.items()}
        if shape == "sessions"
        else {}
    )


def made(shape: str, rows: int, work: Path, results: Results) -> tuple[FeatureTable, float]:
    """The shape's feature table, and the best AUC that can be reached on it."""
    folder, spec = work / f"{shape}-{rows}", ROOT / "features" / SHAPES[shape][0]

    def make() -> dict[str, Any]:
        folder.mkdir(parents=True)
        about = _said(
            "synth",
            "--shape",
            shape,
            "--rows",
            str(rows),
            "--seed",
            "7",
            "--out",
            str(folder / "raw"),
        )
        _said(
            "etl",
            "--spec",
            str(spec),
            "--input",
            str(folder / "raw"),
            "--output",
            str(folder / "table"),
        )
        return about

    about = results.once({"made": shape, "rows": rows}, make)
    return FeatureTable.open(str(folder / "table")), about["bayes_auc"]


def _said(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(
    shape: str, args: argparse.Namespace, results: Results, here: Ranks
) -> list[dict[str, Any]]:
    """One line for each tower."""
    data, best = made(shape, round(args.rows * SHAPES[shape][1]), args.work, results)
    rows = data.rows_of("train")
    batch = defaults(rows)["batch_size"]

    def judged(
        how: dict[str, Any], rates: tuple[float, float], seed: int, split: str
    ) -> dict[str, Any]:
        config = Config(
            data=data.uri,
            version=data.version,
            batch_size=batch,
            seed=seed,
            model=ModelConfig(**how),
            optim=replace(OptimConfig(), lr=rates[0], dense_lr=rates[1]),
        )
        asked = {
            "shape": shape,
            "rows": rows,
            "model": how,
            "rates": rates,
            "seed": seed,
            "split": split,
        }
        found: dict[str, Any] = results.once(
            asked, partial(learned, config, data, None, here, split=split)
        )
        say(
            f"{shape} {how} lr {rates[0]} dense-lr {rates[1]} seed {seed}: {split} AUC {found['auc']:.4f}, "
            f"{found['samples_per_s']:,.0f} samples/s"
        )
        return found

    def searched(how: dict[str, Any]) -> tuple[float, float]:
        if args.rates == "short":
            return 0.05, defaults(rows)["dense_lr"]

        def validated(rates: tuple[float, float]) -> float:
            return float(judged(how, rates, 100, "validation")["auc"])

        dense = max(DENSE_RATES, key=lambda rate: validated((0.05, rate)))
        return max(((lr, dense) for lr in (0.05, *TABLE_RATES)), key=validated)

    found, rates = [], (0.05, 0.001)
    for name, how in models(shape).items():
        if args.only and name.partition(",")[0] not in args.only:
            continue
        if not name.startswith("dien, "):
            rates = searched(how)
        runs = [judged(how, rates, seed, "test") for seed in SEEDS[: args.seeds]]
        aucs = [one["auc"] for one in runs]
        found.append(
            {
                "table": shape,
                "model": name,
                "test AUC": round(statistics.mean(aucs), 4),
                "spread": round(max(aucs) - min(aucs), 4),
                "best": best,
                "lr": rates[0],
                "dense lr": rates[1],
                "dense parameters": runs[0]["parameters"],
                "table parameters": runs[0]["table_bytes"] // 4,
                "flops": runs[0]["flops"],
                "samples/s": round(statistics.median(one["samples_per_s"] for one in runs)),
                "core µs a sample": round(
                    statistics.median(one["core_us_per_sample"] for one in runs), 1
                ),
            }
        )
    return found


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--rows", type=int, default=2_000_000, help="rows of clicks; half as many of sessions"
    )
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, len(SEEDS) + 1))
    parser.add_argument(
        "--rates",
        choices=("search", "short"),
        default="search",
        help="short: the trainer's defaults for all",
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=MODELS, help="these towers alone")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    quiet()
    results, found = Results(args.work / "results.jsonl"), []
    with world() as here:
        for shape in args.shapes:
            found += compared(shape, args, results, here)
    say(table(found))
    return {"models": found}


if __name__ == "__main__":
    run(main)
