"""Times the way from raw rows to a test AUC: Sluice's two commands and the simplest pipeline, in turns.

    python -m benchmarks.end_to_end --work DIR --rows 200000 2000000 8000000 --rounds 3

The plainest is `plain_pipeline.py`: pandas and a loop written by hand. Ours are `sluice etl --engine local` with
features/criteo.toml and `sluice train`, both from nothing: every import, the table and its checks, checkpoints and
the run's page are in the time. Model, batch, epochs (one), optimisers and their rates are the same. An arm's time is
that of its commands, from the first to the end of the last; told with it are its processor time, and the medians of
the rounds' ratios. The arms' test rows are drawn apart, and of 20,000 rows an AUC is known to .004.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.results import run_python, table
from sluice.common.lines import say
from sluice.common.program import run
from sluice.etl.synth.raw_logs import synthesize

LAYERS = {"dense": (128, 64), "over": (128, 64)}
WIDTH, TABLE_RATE, DENSE_RATE = 16, 0.03, 0.001
MODEL = ("--width", WIDTH, "--batch-size")


def batch_of(rows: int) -> int:
    """The rows of a batch, for both arms."""
    return 512 if rows < 1_000_000 else 2048


def plain(raw: Path, _work: Path, rows: int) -> dict[str, Any]:
    outcome = run_python(
        "-W",
        "ignore",
        "benchmarks/plain_pipeline.py",
        raw,
        *MODEL,
        batch_of(rows),
        "--embedding-rate",
        TABLE_RATE,
        "--dense-rate",
        DENSE_RATE,
        "--dense-layers",
        *LAYERS["dense"],
        "--over-layers",
        *LAYERS["over"],
    )
    said = outcome.pop("last")
    return {
        **outcome,
        "auc": said["auc"],
        "prepare_s": said["prepare_s"],
        "samples_per_s": said["samples_per_s"],
    }


def ours(raw: Path, work: Path, rows: int) -> dict[str, Any]:
    for name in ("table", "run"):
        shutil.rmtree(work / name, ignore_errors=True)
    made = run_python(
        "-m",
        "sluice",
        "etl",
        "--engine",
        "local",
        "--spec",
        "features/criteo.toml",
        "--input",
        raw,
        "--output",
        work / "table",
    )
    trained = run_python(
        "-m",
        "sluice",
        "train",
        "--data",
        work / "table",
        "--run-dir",
        work / "run",
        *MODEL,
        batch_of(rows),
        "--lr",
        TABLE_RATE,
        "--dense-lr",
        DENSE_RATE,
        "--table-optimiser",
        "adagrad",
        "--dense-layers",
        ",".join(map(str, LAYERS["dense"])),
        "--over-layers",
        ",".join(map(str, LAYERS["over"])),
    )
    return {
        "seconds": made["seconds"] + trained["seconds"],
        "cpu_s": made["cpu_s"] + trained["cpu_s"],
        "auc": trained["last"]["auc"],
        "prepare_s": made["seconds"],
        "samples_per_s": trained["last"]["samples_per_s"],
    }


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 2_000_000, 8_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    arms = {"plain": plain, "sluice": ours}
    results: dict[str, Any] = {}
    for rows in args.rows:
        raw = args.work / f"raw-{rows}.tsv"
        if not raw.exists():
            synthesize(raw, rows=rows, seed=1)
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(args.rounds):
            order = list(arms) if number % 2 else list(arms)[::-1]
            rounds.append({name: arms[name](raw, args.work, rows) for name in order})
            say(f"{rows:,} rows, round {number + 1}: {json.dumps(rounds[-1])}")
        middle = {
            name: {
                key: statistics.median(turn[name][key] for turn in rounds)
                for key in rounds[0][name]
            }
            for name in arms
        }
        faster = statistics.median(
            turn["plain"]["seconds"] / turn["sluice"]["seconds"] for turn in rounds
        )
        cheaper = statistics.median(
            turn["plain"]["cpu_s"] / turn["sluice"]["cpu_s"] for turn in rounds
        )
        results[str(rows)] = {**middle, "times_faster": faster, "times_less_processor": cheaper}
        say(table([{"arm": name, **figures} for name, figures in middle.items()]))
        say(f"{rows:,} rows: {faster:.2f} times as fast, {cheaper:.2f} times less processor time\n")
    return results


if __name__ == "__main__":
    run(main)
