"""Times how programs start: `import sluice`, a tuned loader's first batch, and a training's first step.

    python -m benchmarks.start TABLE [--rounds 5] [--cold]

TABLE is a feature table, as `sluice etl` makes it. Each program is a fresh process. A phase ends when a known
line is printed. Its figures are the seconds and the processor seconds since the program's start, as medians over the
rounds. With `--cold`, programs find no byte code of Python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import ROOT, table
from sluice.common.lines import say
from sluice.common.program import run

_IMPORT = "import sluice; print('imported')"
_FIRST_BATCH = """
import sys
from sluice import Loader
print("imported", flush=True)
with Loader(sys.argv[1], batch_size=512, tuning="auto") as loader:
    print("opened", flush=True)
    next(iter(loader))
    print("first batch", flush=True)
"""
_TRAINING = {
    "planned": "a rank holds",
    "opened": "loader needs",
    "model made": "a checkpoint:",
    "first step": "step 1 of",
}
"""The phases of a training, each with words of the line that ends it."""


def programs(data: Path, work: Path) -> dict[str, tuple[list[str], Mapping[str, str]]]:
    """Returns each program's arguments, and its phases with the words that end them."""
    training = [
        *("-m", "sluice", "train", "--data", str(data), "--run-dir", str(work / "run")),
        *("--batch-size", "512", "--log-every", "1"),
    ]
    return {
        "import sluice": (["-c", _IMPORT], {"imported": "imported"}),
        "first batch": (
            ["-c", _FIRST_BATCH, str(data)],
            {name: name for name in ("imported", "opened", "first batch")},
        ),
        "first step": (training, _TRAINING),
    }


def timed(
    arguments: Sequence[str], phases: Mapping[str, str], cold: bool, caches: Path
) -> dict[str, dict[str, float]]:
    """Runs a program until its last phase ends. Returns the seconds since its start, for each phase. `caches` is an
    empty folder, for the byte code of a `cold` start."""
    compiled = {"PYTHONPYCACHEPREFIX": str(caches)} if cold else {}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **compiled},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reached: dict[str, dict[str, float]] = {}
    left = list(phases.items())
    printed = ""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            printed += line
            if left and left[0][1] in line:
                spent = psutil.Process(process.pid).cpu_times()
                reached[left.pop(0)[0]] = {
                    "seconds": time.perf_counter() - began,
                    "cpu_s": spent.user + spent.system,
                }
            if not left:
                process.kill()
                break
    process.wait()
    if left:
        raise RuntimeError(f"{arguments[:4]} ended before {left[0][0]!r}: {printed[-2000:]}")
    return reached


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, metavar="TABLE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="without byte code")
    args = parser.parse_args(argv)
    seen: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as work:
            for program, (words, phases) in programs(args.table.resolve(), Path(work)).items():
                caches = Path(work, f"compiled {program}")
                for phase, spent in timed(words, phases, args.cold, caches).items():
                    seen.setdefault((program, phase), []).append(spent)
        say(f"round {number + 1} of {args.rounds}")
    rows = [
        {
            "program": program,
            "phase": phase,
            **{key: round(statistics.median(s[key] for s in spent), 2) for key in spent[0]},
        }
        for (program, phase), spent in sorted(seen.items(), key=lambda item: item[0][0])
    ]
    say(table(rows))
    return {"rounds": args.rounds, "phases": rows}


if __name__ == "__main__":
    run(main)
