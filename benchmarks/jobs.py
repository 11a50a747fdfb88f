"""Measures several jobs on one host: whether they starve each other, and what sharing cores by agreement brings.

    python -m benchmarks.jobs TABLE [--jobs 3] [--seconds 15]

K jobs load the same table at the same time, and two training runs do, each arm with and without `--registry`. One of
the loaders begins with many workers, as a job does that was started while the machine was free. Told are each job's
rows a second, the least over the mean (1: all get the same) and the sum.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.program import run as program
from sluice.common.program import say

ROOT = Path(__file__).resolve().parent.parent
_GREEDY = "read=8,shuffle=4,batch=4"


def together(commands: list[list[str]]) -> list[dict[str, Any]]:
    """Each command's last line; all run at the same time."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for words in commands
    ]
    found = []
    for process in started:
        out, err = process.communicate()
        if process.returncode:
            raise UsageError(err[-2000:])
        found.append(json.loads(out.splitlines()[-1]))
    return found


def make_tables(work: Path, rows: int, specs: Mapping[str, Path]) -> dict[str, Path]:
    """Makes a table for each spec from one log of so many rows. Those that are there are kept."""
    raw = str(work / "log")
    if not Path(raw).exists():
        together([["sluice", "synth", "--rows", str(rows), "--seed", "1", "--out", raw]])
    for name, spec in specs.items():
        if not (work / name).exists():
            files = ["--spec", str(spec), "--input", raw, "--output", str(work / name)]
            together([["sluice", "etl", "--engine", "local", *files]])
    return {name: work / name for name in specs}


def told(name: str, rates: list[float]) -> dict[str, Any]:
    fair = min(rates) / (sum(rates) / len(rates))
    say(f"| {name} | {' | '.join(f'{r:,.0f}' for r in rates)} | {fair:.2f} | {sum(rates):,.0f} |")
    return {"rows_per_s": rates, "least_of_mean": round(fair, 3), "sum": round(sum(rates))}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument(
        "--jobs", type=int, default=3, help="loaders at the same time (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=15, help="of each loader (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    work, found = Path(tempfile.mkdtemp(prefix="sluice-jobs-")), {}
    try:
        for name, extra in (
            ("each for itself", []),
            ("agreed", ["--registry", str(work / "registry")]),
        ):
            loaders = [
                [
                    "ingest",
                    "bench",
                    options.table,
                    "--tuning",
                    "auto",
                    "--seconds",
                    str(options.seconds),
                    *extra,
                    "--knobs",
                    _GREEDY if number == 0 else "read=1,shuffle=1",
                ]
                for number in range(options.jobs)
            ]
            found[f"loaders, {name}"] = told(
                f"{options.jobs} loaders, {name}",
                [one["rows_per_s_settled"] for one in together(loaders)],
            )
            trainers = [
                [
                    "dlrm.train",
                    "--data",
                    options.table,
                    "--run-dir",
                    str(work / f"{name} {number}"),
                    *extra,
                ]
                for number in range(2)
            ]
            found[f"trainers, {name}"] = told(
                f"2 trainers, {name}", [one["samples_per_s"] for one in together(trainers)]
            )
    finally:
        shutil.rmtree(work)
    return found


if __name__ == "__main__":
    program(main)
