"""Compares the ETL job with single-process programs: `python -m benchmarks.etl_peers --work DIR`.

pandas, Polars and DuckDB (benchmarks.etl_arms) run in a separate environment, which `make bench-peers-etl` makes from
requirements-peers-etl.txt. The same job runs on the local engine and on Spark, each in a new process; Spark's start
counts. All programs have both cores. At each size the benchmark checks that the three programs make the same features.
The last line is JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.etl_arms import ARMS
from benchmarks.results import ROOT, table
from benchmarks.spark_scale import submit
from sluice.common.errors import UsageError
from sluice.common.program import run, say
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


def run_arm(name: str, raw: Path, out: Path) -> dict[str, Any]:
    """Runs one program in a new process. Returns its time, its peak memory, and a summary of its features."""
    words = [PYTHON, "-m", "benchmarks.etl_arms", name, raw, out]
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-500:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def run_spark(raw: Path, out: Path) -> dict[str, Any]:
    job = submit(raw.parent, out / "table", "--master", "local[2]")
    job.followed()
    return {
        "seconds": time.monotonic() - job.began,
        "cpu_s": job.processor_s,
        "peak_mib": sum(job.peak_mib.values()),
    }


def run_local(raw: Path, out: Path) -> dict[str, Any]:
    """Runs the job on the local engine in a new process, up to the committed table."""
    words = ["etl", "--engine", "local", "--spec", SPEC, "--input", raw, "--output", out / "table"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the local job ended with {process.returncode}")
    return {
        "seconds": time.perf_counter() - start,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss // 1024,
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
            out = Path(folder)
            if name in ARMS:
                measured[name] = run_arm(name, raw, out)
            else:
                measured[name] = (run_local if name == "local" else run_spark)(raw, out)
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
