"""The trainer up a ladder, one lever a step: `python -m benchmarks.ladder --work DIR [--seconds 150]`.

Each step is a run of dlrm.train on two ranks, on rows of the Criteo shape that are made once and kept in DIR, with
the settings of the steps that were kept and one lever more: samples a second, AUC on the test split, bytes, and
processor seconds of the whole command with its start, which others on the machine change little. A step is kept if it
is faster by either time, or smaller at no loss of speed, and its AUC lies no more than --loses below the highest
kept; the others are shown and taken back. Levers that are no setting of dlrm.train are measured beside it, or it is
said why not.

At the end: ETL and training from raw rows to the AUC in one table, ours (spark-submit, the best step) against the
plainest (a loop over rows, the first step). The report of the best step's run shows the ladder.

Measurements are kept in DIR/results.jsonl, one by one; asked again, the ladder goes on. With --seconds it begins no
measurement after so many, and says that it is not at its end. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.etl import ROOT
from benchmarks.etl_turns import raw_of
from benchmarks.results import Results, table
from sluice.agent.report import page as report
from sluice.common.program import run, say
from sluice.ingest.knobs import format_bytes

Row = dict[str, Any]
FASTER = 1.02  # what counts as faster, on a machine whose times vary
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYSPARK_PYTHON": sys.executable,
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A lever, turned once more."""

    lever: str
    step: str
    words: Mapping[str, str] = field(default_factory=dict)
    """Options of dlrm.train that it sets."""
    table: str = ""
    """`all` columns, or `few`; empty: as before."""
    beside: tuple[str, ...] = ()
    """A case of benchmarks/trainer.py, and the figure of it, that measures what is no option."""
    why_not: str = ""
    """Why it cannot be measured here."""


PLAINEST = Rung(
    lever="the plainest",
    table="all",
    words={
        "tuning": "fixed",
        "knobs": "read=1,prefetch_bytes=1MiB,read_ahead_bytes=1MiB",
        "batch-size": "512",
        "width": "64",
        "dense-layers": "512,256",
        "over-layers": "512,256",
        "table-optimiser": "adagrad",
        "lr": "0.02",
        "dense-optimiser": "adam",
        "dense-lr": "0.0005",
    },
    step="one read worker, least buffers, 512 rows, width 64, wide towers",
)

RUNGS = (
    Rung(
        lever="fused optimiser",
        step="dense gradients, Adagrad after the backward pass, in one process",
        beside=("plain", "plain"),
    ),
    Rung(
        lever="fused optimiser",
        step="within the backward pass, row-wise state, in one process",
        beside=("plain", "ours"),
    ),
    Rung(
        lever="fused optimiser",
        step="row-wise Adagrad",
        words={"table-optimiser": "rowwise_adagrad", "lr": "0.03"},
    ),
    Rung(
        lever="prefetch", step="on: read ahead 64 MiB, prefetch 32 MiB", words={"knobs": "read=1"}
    ),
    Rung(lever="loader tuning", step="auto", words={"tuning": "auto"}),
    Rung(
        lever="evaluation",
        step="with gradients, in one process",
        beside=("evaluation", "with_gradients"),
    ),
    Rung(
        lever="evaluation",
        step="without gradients (the trainer's)",
        beside=("evaluation", "without_gradients"),
    ),
    Rung(
        lever="batch size",
        step="2,048",
        words={"batch-size": "2048", "lr": "0.05", "dense-lr": "0.001"},
    ),
    Rung(
        lever="batch size",
        step="4,096",
        words={"batch-size": "4096", "lr": "0.07", "dense-lr": "0.002"},
    ),
    Rung(
        lever="lighter towers",
        step="128-64 and 256-128",
        words={"dense-layers": "128,64", "over-layers": "256,128"},
    ),
    Rung(
        lever="lighter towers",
        step="64 and 128-64",
        words={"dense-layers": "64", "over-layers": "128,64"},
    ),
    Rung(lever="narrower embeddings", step="32", words={"width": "32"}),
    Rung(lever="narrower embeddings", step="16", words={"width": "16"}),
    Rung(lever="fewer sparse tables", step="12 of 26", table="few"),
    Rung(lever="all-to-all", step="half as wide, repeated to the full", words={"table-width": "8"}),
    Rung(lever="all-to-all", step="in half precision", words={"wire": "fp16"}),
    Rung(lever="bf16", step="dense layers' products", words={"precision": "bf16"}),
    Rung(
        lever="overlap",
        step="all-to-all beside the step before",
        why_not="on GPUs alone: a CPU would only wait for itself",
    ),
)


def climb(
    rungs: Sequence[Rung], measure: Callable[[Rung], Row], *, loses: float
) -> tuple[list[Row], Rung]:
    """A row for each rung, and the last that was kept. `measure` gets a rung with all settings up to it."""
    top, best = PLAINEST, measure(PLAINEST)
    most = best["auc"]
    rows = [{"lever": PLAINEST.lever, "step": PLAINEST.step, **best, "verdict": "kept"}]
    for rung in rungs:
        row = {"lever": rung.lever, "step": rung.step}
        if rung.why_not:
            rows.append({**row, "verdict": rung.why_not})
            continue
        tried = replace(rung, words={**top.words, **rung.words}, table=rung.table or top.table)
        found = measure(tried)
        verdict = "measured beside" if rung.beside else _verdict(best, found, most - loses)
        if verdict == "kept":
            top, best, most = tried, found, max(most, found["auc"])
        rows.append({**row, **found, "verdict": found.get("verdict", verdict)})
    return rows, top


def _verdict(best: Row, found: Row, least_auc: float) -> str:
    faster = max(found["samples_per_s"] / best["samples_per_s"], best["cpu_s"] / found["cpu_s"])
    smaller = any(
        found[name] < best[name] for name in ("table_bytes", "state_bytes", "bytes_per_step")
    )
    if found["auc"] < least_auc:
        return f"AUC {found['auc'] - best['auc']:+.4f}"
    if faster < (1 / FASTER if smaller else FASTER):
        return f"{faster:.2f} times as fast"
    return "kept"


class Work:
    """What the runs need and leave, in one folder."""

    def __init__(self, folder: Path, rows: int, seconds: float | None) -> None:
        self._folder, self._rows = folder, rows
        folder.mkdir(parents=True, exist_ok=True)
        self._results = Results(folder / "results.jsonl")
        self._end = None if seconds is None else time.monotonic() + seconds

    def measure(self, rung: Rung) -> Row:
        found: Row
        if rung.beside:
            case, name = rung.beside
            found = self._once(
                {"figure": "beside", "case": case, "rows": self._rows}, lambda: self._beside(case)
            )
            return found[name]
        self.table(rung.table)
        asked = {
            "figure": "run",
            "rows": self._rows,
            "table": rung.table,
            "words": dict(rung.words),
        }
        found = self._once(asked, lambda: self._train(rung))
        say(
            f"{rung.lever}: {rung.step}: {found['samples_per_s']:,.0f} samples/s, AUC {found['auc']:.4f}"
        )
        return found

    def table(self, name: str) -> Path:
        """By spark-submit; `few` leaves columns out."""
        path = self._folder / f"table-{name}-{self._rows}"
        self._once(
            {"figure": "etl", "table": name, "rows": self._rows}, lambda: self._etl(name, path)
        )
        return path

    def _etl(self, name: str, path: Path) -> Row:
        raw = raw_of(self._folder, self._rows)
        spec = self._folder / f"{name}.toml"
        text = (ROOT / "features/criteo.toml").read_text()
        spec.write_text(text if name == "all" else text.replace('match = "C*"', 'match = "C1?"'))
        shutil.rmtree(path, ignore_errors=True)
        found, seconds = _run(
            "spark-submit",
            "--properties-file",
            ROOT / "spark-defaults.conf",
            ROOT / "etl/job.py",
            "--spec",
            spec,
            "--input",
            raw,
            "--output",
            path,
        )
        return {"seconds": seconds, "rows": found["rows_out"]}

    def _train(self, rung: Rung) -> Row:
        folder = self._folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        before = _cpu_s()
        found, seconds = _run(
            "torchrun",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "dlrm.train",
            "--data",
            self.table(rung.table),
            "--run-dir",
            folder,
            *[word for name, value in rung.words.items() for word in (f"--{name}", value)],
        )
        start = next(
            e
            for e in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
            if e["kind"] == "start"
        )
        return {
            "samples_per_s": found["samples_per_s"],
            "stall": found["stall_fraction"],
            "auc": found["auc"],
            "table_bytes": sum(4 * p["rows"] * p["width"] for p in start["plan"]),
            "state_bytes": start["state_bytes"],
            "bytes_per_step": found["bytes_per_step"],
            "seconds": seconds,
            "cpu_s": round(_cpu_s() - before, 1),
        }

    def _beside(self, case: str) -> Row:
        words = ["--data", self.table("all")] if case != "plain" else []
        found = _run(
            "python",
            ROOT / "benchmarks/trainer.py",
            case,
            *words,
            "--seconds",
            "3",
            "--rounds",
            "3",
        )[0]
        if case == "plain":
            return {
                "ours": {"samples_per_s": found["ours"], "state_bytes": found["state_bytes"]},
                "plain": {
                    "samples_per_s": found["plain"],
                    "state_bytes": found["plain_state_bytes"],
                },
            }
        kept = f"measured beside; keeps {format_bytes(found['kept_bytes'])} a batch of 4,096"
        return {
            "with_gradients": {"samples_per_s": found["with_gradients"], "verdict": kept},
            "without_gradients": {"samples_per_s": found["without_gradients"]},
        }

    def loop(self) -> Row:
        """The plainest ETL: a loop over rows in one process, which writes the same features."""
        raw = raw_of(self._folder, self._rows)

        def measure() -> Row:
            with tempfile.TemporaryDirectory(prefix="sluice-loop-", dir=self._folder) as out:
                found, seconds = _run("python", "-m", "benchmarks.etl_arms", "python", raw, out)
            return {"seconds": seconds * self._rows / found["rows"], "rows": self._rows}

        found: Row = self._once({"figure": "loop", "rows": self._rows}, measure)
        return found

    def end_to_end(self, best: Rung) -> list[Row]:
        etl: Row = self._once({"figure": "etl", "table": "all", "rows": self._rows}, dict)
        found = []
        for name, first, rung in (("the plainest", self.loop(), PLAINEST), ("ours", etl, best)):
            row = self.measure(rung)
            found.append(
                {
                    "whole": name,
                    "ETL s": first["seconds"],
                    "train s": row["seconds"],
                    "seconds": first["seconds"] + row["seconds"],
                    "AUC": row["auc"],
                }
            )
        return found

    def show(self, best: Rung, rows: list[Row]) -> Path:
        """The report of the best step's run, with the ladder in it."""
        folder = self._folder / "best"
        if not (folder / "report.html").exists():
            self._train(best)
            shutil.rmtree(folder, ignore_errors=True)
            (self._folder / "run").rename(folder)
        with (folder / "events.jsonl").open("a") as events:
            events.write(json.dumps({"at": 0, "kind": "ladder", "steps": rows}) + "\n")
        return report.write(folder)

    def _once(self, asked: Row, measure: Callable[[], Row]) -> Any:
        def unless_late() -> Row:
            if self._end is not None and time.monotonic() > self._end:
                raise TimeUp
            return measure()

        return self._results.once(asked, unless_late)


class TimeUp(Exception):
    """The rest is for another call."""


def _cpu_s() -> float:
    """The processor seconds of all commands that ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(*words: str | os.PathLike[str]) -> tuple[Row, float]:
    """A command's last line, and its seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        [*map(os.fspath, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=_ENVIRONMENT,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        said = done.stdout.strip().splitlines()[-1:] or [done.stderr[-1500:]]
        raise RuntimeError(
            f"{' '.join(map(os.fspath, words))} ended with {done.returncode}: {said[0]}"
        )
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found, round(seconds, 2)


def _shown(row: Row) -> Row:
    """The row as it is printed: an AUC with four places, bytes as a person reads them."""
    how: dict[str, Callable[[Any], str]] = {
        "auc": "{:.4f}".format,
        "AUC": "{:.4f}".format,
        **dict.fromkeys(("table_bytes", "state_bytes", "bytes_per_step"), format_bytes),
    }
    return {name: how[name](value) if name in how else value for name, value in row.items()}


def main(argv: list[str]) -> Row:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for rows, tables, runs and results; some 1 GB",
    )
    parser.add_argument("--rows", type=int, default=400_000, help="raw rows (default: %(default)s)")
    parser.add_argument(
        "--loses",
        type=float,
        default=0.005,
        metavar="AUC",
        help="that all steps together may cost (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, help="begin nothing after so many (default: go on to the end)"
    )
    args = parser.parse_args(argv)
    work = Work(args.work.resolve(), args.rows, args.seconds)
    try:
        rows, best = climb(RUNGS, work.measure, loses=args.loses)
        whole = work.end_to_end(best)
    except TimeUp:
        say("time is up; the same command goes on")
        return {"complete": False}
    page = work.show(best, rows)
    say(
        f"\n{table([_shown(row) for row in rows])}\n\n{table([_shown(row) for row in whole])}\n\n{page}"
    )
    return {
        "complete": True,
        "load": round(os.getloadavg()[0], 1),
        "ladder": rows,
        "best": dict(best.words),
        "whole": whole,
        "report": str(page),
    }


if __name__ == "__main__":
    run(main)
