"""Compares the ETL job with single-process programs: `python -m benchmarks.etl_peers --work DIR`.

pandas, Polars, DuckDB and a loop over rows (benchmarks.etl_arms) run in a separate environment, which `make
bench-peers-etl` makes from requirements-peers-etl.txt. Spark runs as with spark-submit: each size has a new session,
and its start counts. The same job also runs on the local engine, in a new process. All programs have both cores. At
each size the benchmark checks that all programs make the same features. The loop reads only 500,000 rows, and its time
for more rows is extrapolated.

DIR/results.jsonl keeps each measurement, and the same command resumes an interrupted run. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.etl import ROOT, session
from benchmarks.etl_arms import ARMS, LOOP_ROWS
from benchmarks.etl_turns import raw_of
from benchmarks.results import Results, table
from sluice.common.errors import UsageError
from sluice.common.program import run, say

PYTHON = ROOT / ".venv-peers-etl/bin/python"
_CONTENT = (
    "import json, pathlib, sys; from benchmarks.etl_arms import content; "
    "print(json.dumps(content(pathlib.Path(sys.argv[1]))))"
)


def arm(name: str, work: Path, rows: int) -> dict[str, Any]:
    """Runs one program in a new process. Returns its time, its peak memory, and a summary of its features."""
    with tempfile.TemporaryDirectory(prefix="sluice-arm-", dir=work) as out:
        found = _last_line("-m", "benchmarks.etl_arms", name, str(raw_of(work, rows)), out)
        found["content"] = _last_line("-c", _CONTENT, out)
    scale = rows / found.pop("rows")
    return {
        **found,
        "seconds": found["seconds"] * scale,
        "cpu_s": found["cpu_s"] * scale,
        "scaled": scale,
    }


def _last_line(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [str(PYTHON), *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words[:3])} ended with {done.returncode}: {done.stderr[-500:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def spark(work: Path, rows: int) -> dict[str, Any]:
    raw_of(work, rows)
    start = time.perf_counter()
    turn = session(work, [f"job:{rows}"])["turns"][0]
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_s": turn["cpu_s"],
        "job_s": turn["seconds"],
        "peak_mib": sum(turn["peak_mib"].values()),
    }


def local(work: Path, rows: int) -> dict[str, Any]:
    """Runs the job on the local engine in a new process, up to the committed table."""
    raw = raw_of(work, rows)
    with tempfile.TemporaryDirectory(prefix="sluice-local-", dir=work) as out:
        start = time.perf_counter()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sluice",
                "etl",
                "--engine",
                "local",
                "--spec",
                "features/criteo.toml",
                "--input",
                str(raw),
                "--output",
                f"{out}/table",
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"the local job ended with {process.returncode}")
        return {
            "seconds": round(time.perf_counter() - start, 2),
            "cpu_s": round(used.ru_utime + used.ru_stime, 2),
            "peak_mib": used.ru_maxrss // 1024,
        }


def alike(found: dict[str, dict[str, Any]]) -> None:
    """Raises an error if two programs made different features. Sums may differ slightly, because their order
    differs."""
    contents = {
        name: dict(f["content"])
        for name, f in found.items()
        if f.get("scaled") == 1 and "content" in f
    }
    dense = [c.pop("dense") for c in contents.values()]
    if len({json.dumps(c, sort_keys=True) for c in contents.values()}) > 1 or (
        dense and max(dense) - min(dense) > 1e-6 * max(dense)
    ):
        raise RuntimeError(f"the arms made different features: {contents}, {dense}")


def measure(work: Path, results: Results, rows: int, arms: list[str]) -> list[dict[str, Any]]:
    found = {
        name: results.once(
            {"figure": "peers", "arm": name, "rows": rows},
            lambda: arm(name, work, rows),  # noqa: B023
        )
        for name in arms
    }
    alike(found)
    found["local"] = results.once(
        {"figure": "peers", "arm": "local", "rows": rows}, lambda: local(work, rows)
    )
    found["Spark"] = results.once(
        {"figure": "peers", "arm": "spark", "rows": rows}, lambda: spark(work, rows)
    )
    return [
        {
            "rows": rows,
            "arm": name + (f" (of {LOOP_ROWS:,} rows)" if f.get("scaled", 1) > 1 else ""),
            "seconds": float(f["seconds"]),
            "CPU s": float(f["cpu_s"]),
            "rows/s": rows / f["seconds"],
            "peak MiB": f["peak_mib"],
        }
        for name, f in found.items()
    ]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.etl_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for inputs, outputs and results; some 10 GB",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[500_000, 2_000_000, 8_000_000],
        help="sizes (default: %(default)s)",
    )
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="default: all"
    )
    args = parser.parse_args(argv)
    if not PYTHON.exists():
        raise UsageError(
            f"there is no {PYTHON.parent.parent.name}; make it with: make bench-peers-etl"
        )
    args.work.mkdir(parents=True, exist_ok=True)
    results, rows = Results(args.work / "results.jsonl"), []
    for size in args.rows:
        rows += measure(args.work, results, size, args.arms)
        say(f"\n{table(rows)}\n")
    return {"load": round(os.getloadavg()[0], 1), "rows": rows}


if __name__ == "__main__":
    run(main)
