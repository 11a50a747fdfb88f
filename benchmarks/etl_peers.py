"""Compares the ETL job with single-process programs: `python -m benchmarks.etl_peers --work DIR`.

pandas, Polars and DuckDB (benchmarks.etl_arms) run in a separate environment, which `make bench-peers-etl` makes from
requirements-peers-etl.txt. The same job runs on the local engine and on Spark, each in a new process; Spark's start
counts. All programs have both cores. At each size the benchmark checks that the three programs make the same features.
The last line is JSON."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.etl_arms import ARMS
from benchmarks.results import ROOT, run_python, table
from benchmarks.spark_scale import submit
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.etl.synth.raw_logs import synthesize

PYTHON = ROOT / ".venv-peers-etl/bin/python"
SPEC = ROOT / "features/criteo.toml"


def make_input(folder: Path, rows: int) -> Path:
    """Returns the input with so many rows. It is made on first use, completely or not at all."""
    path = folder / "in"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        synthesize(path.with_suffix(".part"), rows=rows, seed=1)
        (folder / "spec.toml").write_text(SPEC.read_text())
        path.with_suffix(".part").rename(path)
    return path


def run_spark(raw: Path, out: Path) -> dict[str, Any]:
    job = submit(raw.parent, out / "table", "--master", "local[2]")
    job.followed()
    return {
        "seconds": time.monotonic() - job.began,
        "cpu_s": job.processor_s,
        "peak_mib": sum(job.peak_mib.values()),
    }


def check_same_features(contents: Sequence[dict[str, Any]]) -> None:
    """Raises an error if two programs made different features. The sums of numbers may differ slightly, because their
    order differs."""
    dense = [content.pop("dense") for content in contents]
    if any(content != contents[0] for content in contents) or (
        max(dense) - min(dense) > 1e-6 * max(dense)
    ):
        raise RuntimeError(f"the programs made different features: {contents}, {dense}")


def measure(work: Path, rows: int) -> list[dict[str, Any]]:
    raw = make_input(work / str(rows), rows)
    measured = {}
    for name in [*ARMS, "local", "Spark"]:
        with tempfile.TemporaryDirectory(prefix="out-", dir=work) as folder:
            if name == "Spark":
                measured[name] = run_spark(raw, Path(folder))
            elif name == "local":
                paths = ["--spec", SPEC, "--input", raw, "--output", Path(folder, "table")]
                measured[name] = run_python("-m", "sluice", "etl", "--engine", "local", *paths)
            else:
                arm = run_python("-m", "benchmarks.etl_arms", name, raw, folder, python=PYTHON)
                measured[name] = arm["last"]
    check_same_features([measured[name].pop("content") for name in ARMS])
    return [
        {
            "rows": rows,
            "arm": name,
            "seconds": float(costs["seconds"]),
            "CPU s": float(costs["cpu_s"]),
            "rows/s": rows / costs["seconds"],
            "peak MiB": costs["peak_mib"],
        }
        for name, costs in measured.items()
    ]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for inputs and outputs; some 10 GB"
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[500_000, 2_000_000, 8_000_000],
        help="sizes (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not PYTHON.exists():
        raise UsageError(
            f"there is no {PYTHON.parent.parent.name}; make it with: make bench-peers-etl"
        )
    work, rows = args.work.resolve(), []
    for size in args.rows:
        rows += measure(work, size)
        say(f"\n{table(rows)}\n")
    return {"load": round(os.getloadavg()[0], 1), "rows": rows}


if __name__ == "__main__":
    run(main)
