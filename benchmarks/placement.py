"""Placement advice, foretold and then measured: the same rows with their operators in the loader and in the ETL.

    python -m benchmarks.placement --work DIR [--rows 400000] [--seconds 15]

Spark writes both tables, from features/criteo.toml and from the same with `clip` and `log` left to the loader. The
advice of a run over the one (all columns' operators into the ETL) stands beside what the other table does, in rows a
second and in bytes a row; rounds take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, together
from sluice.agent.report.operator_placement import moves
from sluice.agent.report.run_folder import Run
from sluice.etl.common.program import run as program
from sluice.etl.common.program import say
from sluice.etl.table.table import FeatureTable

_ROUNDS = 3
ACTIVATED = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def tables(work: Path, rows: int) -> dict[str, Path]:
    """Made once."""
    spec = (ROOT / "features/criteo.toml").read_text()
    left = work / "left.toml"
    for end in ("low = -2}", "shift = 3}"):
        spec = spec.replace(end, f"{end[:-1]}, online = true}}")
    left.write_text(spec)
    if not (work / "raw").exists():
        together([["etl", "synth", "--rows", str(rows), "--seed", "1", "--out", str(work / "raw")]])
    found = {"loader": work / "loader", "etl": work / "etl"}
    for name, text in (("loader", left), ("etl", ROOT / "features/criteo.toml")):
        if not found[name].exists():
            subprocess.run(["spark-submit", "--properties-file", ROOT / "spark-defaults.conf", ROOT / "etl/job.py",
                            "--spec", text, "--input", work / "raw", "--output", found[name]], check=True, cwd=ROOT,
                           env=ACTIVATED, stdout=subprocess.DEVNULL)
    return found


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the tables and runs")
    parser.add_argument("--rows", type=int, default=400_000, help="raw lines (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="of each run: long enough to take back what failed "
                        "(default: %(default)s)")
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    made = tables(options.work, options.rows)
    bytes_a_row = {n: sum(f.bytes for f in t.files) / t.rows
                   for n, t in ((n, FeatureTable.open(str(p))) for n, p in made.items())}
    rates: dict[str, list[float]] = {name: [] for name in made}
    foretold = []
    for number in range(_ROUNDS):
        for name, table in made.items():
            run = options.work / f"run-{name}-{number}-{len(list(options.work.glob('run-*')))}"
            (one,) = together([["ingest", "bench", str(table), "--seconds", str(options.seconds), "--tuning", "planner",
                                "--run", str(run)]])
            rates[name].append(one["rows_per_s_settled"])
            if name == "loader" and (advice := [m for m in moves(Run.read(run)) if m.to_etl]):
                foretold.append(advice[0])
    gain = statistics.median(rates["etl"]) / statistics.median(rates["loader"]) - 1
    say(f"foretold: {foretold[-1].sentence if foretold else 'nothing'}\n"
        f"measured: {gain:+.0%} rows/s, {bytes_a_row['etl'] / bytes_a_row['loader'] - 1:+.1%} bytes")
    return {"foretold": [round(m.gain, 4) for m in foretold], "measured": round(gain, 4), "rows_per_s": rates,
            "foretold_bytes": [m.more_bytes and round(m.more_bytes, 4) for m in foretold],
            "measured_bytes": round(bytes_a_row["etl"] / bytes_a_row["loader"] - 1, 4)}


if __name__ == "__main__":
    program(main)
