"""Compares tuned training with fixed settings: two ranks under torchrun, small models, in turns.

    python -m benchmarks.tuned_training --work DIR                    everything: about 50 minutes on two quiet cores
    python -m benchmarks.tuned_training --work DIR --only lookup --rounds 2 --seconds 20

Workloads: a `store` that takes 50 ms a read; a `lookup` that waits 12 ms for 64 rows; a `python` transform of pure
Python over texts; and `raw`, everything left to the loader. First each setting of a grid trains for a while, and the
best is kept. Then in each round `one` worker a stage, `cores` (as many workers as cores in every stage, as
benchmarks/rivals/cores.py has it), the `best` of the grid and `auto`, which begins at one worker, take turns, each time
in another order. Told are samples/s from `--settle` seconds after the first batch on (auto: also from the first batch
on), and ratios with a 95 % interval from drawing rounds anew.

`cost`: what tuning takes of a core where there is nothing to tune. `examples.demo.schema_change` changes the schema.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import ROOT, run_python, table
from sluice.agent.report.narrative import mean, started
from sluice.agent.report.run_folder import Run
from sluice.common.errors import UsageError
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.common.suggest import nearest
from sluice.ingest.knobs import Knobs
from sluice.ingest.machine import Machine

RANKS, ROWS, SEED = 2, 240_000, 1
SMALL = ("--width", "8", "--dense-layers", "32", "--over-layers", "32", "--log-every", "10")
ALONE = "decode=1,shuffle=1"
_MODULE = "benchmarks.tuned_training"
_LOOKUP_S, _ROWS = 0.012, 64  # for so many rows
_LOOPS = 20  # times that each value's text is walked through
_START_S, _END_S, _LOOK_S = 240.0, 30.0, 0.5
_DRAWS = 4000
_ACTIVATED = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}


# ---- the transforms


def lookup(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Waits as for the answers of a service that is asked about a few rows at a time."""
    for _ in range(0, len(columns["I1"]), _ROWS):
        time.sleep(_LOOKUP_S)
    return dict(columns)


def walk(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Works on each value's text in pure Python, as a first draft of a text feature does."""
    found = []
    for value in columns["I1"]:
        text, total = f"{value:.6f}", 0
        for _ in range(_LOOPS):
            for letter in text:
                total = (31 * total + ord(letter)) % 1009
        found.append(total / 1009)
    return {"I1": np.array(found, np.float32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A table, what lies between it and the trainer, and the settings of its grid."""

    name: str
    spec: str
    """The shipped spec that makes the table."""
    group_rows: int
    batch: int
    grid: tuple[str, ...]
    store: str = ""
    transform: str = ""

    @property
    def stages(self) -> tuple[str, ...]:
        return ("decode", "shuffle", "batch", *([self.transform] if self.transform else []))

    def words(self, at: Path) -> list[str]:
        """The options of its training over the table at this path."""
        found = ["--data", f"{self.store}{at}", "--batch-size", str(self.batch), *SMALL]
        if self.transform:
            found += ["--transform", f"{_MODULE}:{self.transform}:I1>I1"]
        return found


WORKLOADS = (
    Workload(
        name="store",
        spec="criteo",
        group_rows=512,
        batch=1024,
        store="latency://50ms",
        grid=("fetch=2", "fetch=4", "fetch=8", "fetch=16", "fetch=32"),
    ),
    Workload(
        name="lookup",
        spec="criteo",
        group_rows=8192,
        batch=1024,
        transform="lookup",
        grid=("lookup=2", "lookup=4", "lookup=8", "lookup=16", "lookup=8,decode=2"),
    ),
    Workload(
        name="python",
        spec="criteo",
        group_rows=8192,
        batch=1024,
        transform="walk",
        grid=(
            "walk=2",
            "walk=1,walk.backend=process",
            "walk=2,walk.backend=process",
            "walk=4,walk.backend=process",
        ),
    ),
    Workload(
        name="raw",
        spec="criteo_raw",
        group_rows=8192,
        batch=4096,
        grid=("decode=2", "decode=2,shuffle=2", "decode=3", "decode=4,shuffle=2"),
    ),
)
PARTS = (*(one.name for one in WORKLOADS), "cost")


# ---- one training


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training did, in samples a second of all ranks."""

    settled: float
    """From `--settle` seconds after the first batch on."""
    whole: float
    """From the first batch on."""
    stall: float
    """Share of the settled time spent waiting."""
    decisions: int
    knobs: str
    """The last ones."""


class Training:
    """Runs trainings in folders of their own."""

    def __init__(self, work: Path, settle_s: float) -> None:
        self._work, self.settle_s = work, settle_s
        self._numbers = count(len(list(work.glob("run-*"))))

    def run(self, words: Sequence[str], seconds: float) -> Run:
        """Trains until so many seconds have passed since the first rows, then stops it as a scheduler would."""
        folder = self._work / f"run-{next(self._numbers)}"
        log = folder.with_suffix(".log")
        with open(log, "w") as out:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    f"--nproc-per-node={RANKS}",
                    "-m",
                    "dlrm.train",
                    "--run-dir",
                    str(folder),
                    "--epochs",
                    "100000",
                    "--seed",
                    str(SEED),
                    *words,
                ],
                cwd=ROOT,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=_ACTIVATED,
            )
            try:
                self._wait(process, folder, seconds, log)
            finally:
                _end(process)
        return Run.read(folder)

    def _wait(
        self, process: subprocess.Popen[bytes], folder: Path, seconds: float, log: Path
    ) -> None:
        began, since = time.monotonic(), None
        while since is None or time.monotonic() < since + seconds:
            if process.poll() is not None:
                raise UsageError(f"a training ended early:\n{log.read_text()[-2000:]}")
            if since is None:
                if time.monotonic() > began + _START_S + 10 * seconds:
                    raise UsageError(f"no row came; see {log}")
                since = time.monotonic() if _going(folder) else None
            time.sleep(_LOOK_S)

    def figures(self, run: Run) -> Trained:
        looks = started(run.looks())
        later = [look for look in looks if look["at"] >= looks[0]["at"] + self.settle_s] or looks[
            -1:
        ]
        return Trained(
            mean(later, "rows_per_s") or 0.0,
            mean(looks, "rows_per_s") or 0.0,
            mean(later, "stall") or 0.0,
            len(run.of("decision")),
            Knobs.from_dict(looks[-1]["knobs"]).text,
        )


def _going(folder: Path) -> bool:
    """Whether rows have come."""
    return (folder / "config.json").exists() and any(
        look["rows_per_s"] for look in Run.read(folder).looks()
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


# ---- the parts


def made(work: Path, spec: str, group_rows: int) -> Path:
    """Returns the table of a shipped spec with other row groups. It is made once."""
    at = work / f"{spec}-{group_rows}"
    if at.exists():
        return at
    text = (
        (ROOT / f"features/{spec}.toml")
        .read_text()
        .replace("row_group_rows = 32768", f"row_group_rows = {group_rows}")
    )
    (own := at.with_suffix(".toml")).write_text(text)
    if not (work / "raw").exists():
        run_python("-m", "sluice", "synth", "--rows", ROWS, "--seed", SEED, "--out", work / "raw")
    paths = ["--spec", own, "--input", work / "raw", "--output", at]
    run_python("-m", "sluice", "etl", "--engine", "local", *paths)
    return at


def in_turns(arms: Mapping[str, Callable[[], Trained]], rounds: int) -> dict[str, list[Trained]]:
    """Every arm once a round, each round in another order."""
    found: dict[str, list[Trained]] = {name: [] for name in arms}
    order = np.random.default_rng(0)
    for number in range(rounds):
        for name in order.permutation(list(arms)).tolist():
            found[name].append(one := arms[name]())
            say(
                f"  round {number + 1}: {name} {one.settled:,.0f} samples/s, stall {one.stall:.1%}, {one.knobs}"
            )
    return found


def ratio(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The median over the rounds of one arm over another, and its 95 % interval."""
    each = np.asarray(over) / np.asarray(under)
    drawn = np.median(
        each[np.random.default_rng(0).integers(0, len(each), (_DRAWS, len(each)))], axis=1
    )
    return [
        round(float(value), 3) for value in (np.median(each), *np.percentile(drawn, [2.5, 97.5]))
    ]


def workload(one: Workload, training: Training, options: argparse.Namespace) -> dict[str, Any]:
    words = one.words(made(options.work, one.spec, one.group_rows))

    def arm(tuning: str, knobs: str, seconds: float) -> Trained:
        return training.figures(
            training.run([*words, "--tuning", tuning, "--knobs", knobs], seconds)
        )

    say(f"{one.name}: the grid")
    alone = ",".join(f"{stage}=1" for stage in one.stages)
    survey = {
        setting: arm("fixed", f"{alone},{setting}", options.survey)
        for setting in (*one.grid, ALONE)
    }
    best = max(survey, key=lambda setting: survey[setting].settled)
    cores = ",".join(f"{stage}={max(1, int(Machine().cores()))}" for stage in one.stages)
    rounds = in_turns(
        {
            name: lambda tuning=tuning, knobs=knobs: arm(tuning, knobs, options.seconds)  # type: ignore[misc]
            for name, tuning, knobs in (
                ("one", "fixed", alone),
                ("cores", "fixed", cores),
                ("best", "fixed", f"{alone},{best}"),
                ("auto", "auto", alone),
            )
        },
        options.rounds,
    )
    rates = {name: [t.settled for t in each] for name, each in rounds.items()}
    auto = rounds["auto"]
    return {
        "workload": one.name,
        **{name: round(statistics.median(each)) for name, each in rates.items()},
        "best setting": best,
        "stall one": _median(t.stall for t in rounds["one"]),
        "stall auto": _median(t.stall for t in auto),
        **{
            f"auto ÷ {name}": ratio(rates["auto"], rates[name]) for name in ("one", "cores", "best")
        },
        "from the start ÷ best": ratio([t.whole for t in auto], rates["best"]),
        "decisions": [t.decisions for t in auto],
        "auto at": auto[-1].knobs,
    }


def cost(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    """What the agent's own loop takes of a core while the trainer never waits."""
    words = ["--data", str(made(options.work, "criteo", 8192)), *SMALL]
    shares, stalls = [], []
    for _ in range(options.rounds):
        run = training.run([*words, "--tuning", "auto"], options.seconds)
        looks = started(run.looks())
        shares.append(run.of("verdict")[-1]["cost_s"] / max(1e-9, looks[-1]["at"] - looks[0]["at"]))
        stalls.append(training.figures(run).stall)
    return {
        "share of a core": round(statistics.median(shares), 5),
        "each": [round(s, 5) for s in shares],
        "stall": _median(stalls),
    }


def _median(values: Any) -> float:
    return round(float(statistics.median(values)), 4)


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuned_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--work",
        type=Path,
        required=True,
        help="folder for tables and runs; tables in it are used again",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="WORKLOAD",
        help=f"{', '.join(PARTS)}; may be given again",
    )
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add(
        "--seconds",
        type=float,
        default=30.0,
        help="of each turn, from the first rows on (default: %(default)s)",
    )
    add(
        "--settle",
        type=float,
        default=10.0,
        help="seconds that count as the start (default: %(default)s)",
    )
    add(
        "--survey",
        type=float,
        default=8.0,
        help="seconds of each setting of the grid (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    for name in options.only:
        if name not in PARTS:
            raise UsageError(
                f"--only: there is no {name!r}{nearest(name, PARTS)}: {', '.join(PARTS)}"
            )
    if options.rounds < 1 or min(options.seconds, options.survey) <= 0:
        raise UsageError("--rounds is at least 1, --seconds and --survey are above 0")
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    wanted, training = options.only or PARTS, Training(options.work, options.settle)
    found: dict[str, Any] = {}
    if rows := [workload(one, training, options) for one in WORKLOADS if one.name in wanted]:
        say(table(rows))
        found["workloads"] = rows
    if "cost" in wanted:
        found["cost"] = cost(training, options)
        say(table([found["cost"]]))
    return found


if __name__ == "__main__":
    program(main)
