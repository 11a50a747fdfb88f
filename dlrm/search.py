"""Searches for settings of the trainer that reach an AUC on the validation split, and shows AUC against time.

    python -m dlrm.search --data TABLE --out DIR --auc 0.80 --budget 3600
    python -m dlrm.search --data TABLE --out DIR --space space.json -- --epochs 2    what follows -- goes to every trial

The space is a JSON file of {flag of dlrm.train: [values] or {"low": …, "high": …, "log": true}}; --show-space prints
the default. A search in a folder that holds one goes on with it. The last line of standard output is one JSON object:
the best settings, the front of AUC against seconds, and the page with its picture.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from agent import report
from agent.runs import RunError, read_lines
from dlrm.config import ConfigError
from dlrm.space import DEFAULT, Space, words
from etl.names import Parser
from etl.program import UsageError, run, say

_EVALS = 9
"""Evaluations of a trial: three rungs of successive halving."""


def main(argv: list[str]) -> dict[str, Any]:
    parser = Parser(prog="python -m dlrm.search", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", metavar="TABLE", help="feature table")
    add("--out", type=Path, metavar="DIR", help="folder of the search")
    add("--space", type=Path, metavar="FILE", help="what may be chosen (default: see --show-space)")
    add("--show-space", action="store_true", help="print the default space and leave")
    add("--auc", type=float, help="end once a trial reaches it")
    add("--trials", type=int, default=30, help="at most, with those of before (default: %(default)s)")
    add("--budget", type=float, metavar="SECONDS", help="begin no trial after so many seconds of trials")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--plain", action="store_true", help="at random, each to its end: what the search is compared with")
    add("rest", nargs="*", metavar="-- OPTION …", help="for every trial")
    args = parser.parse_args(argv)
    if args.show_space:
        say(json.dumps(DEFAULT, indent=1))
        return {"space": DEFAULT}
    if args.data is None or args.out is None:
        raise UsageError("--data and --out are needed")
    from dlrm.searching import Search, front

    search = Search(args.out, Space.read(args.space), seed=args.seed, plain=args.plain)
    trial = Trial(args.data, args.out, args.auc, args.rest)
    while len(search.found) < args.trials and (args.budget is None or search.seconds < args.budget):
        if any(one.auc is not None and args.auc and one.auc >= args.auc for one in search.found):
            break
        one = search.step(trial)
        say(f"trial {one.number}: " + (f"AUC {one.auc:.5f}" if one.auc is not None else trial.error or "failed")
            + f" after {one.seconds:.1f} s, {one.state}: {' '.join(words(one.settings))}")
    best = front(search.found)
    page = _page(args.out, search.found)
    reached = bool(args.auc and best and (best[-1].auc or 0) >= args.auc)
    return {"best": best[-1].settings if best else None, "auc": best[-1].auc if best else None, "reached": reached,
            "trials": len(search.found), "seconds": round(search.seconds, 1), "page": str(page),
            "front": [{"auc": one.auc, "seconds": one.seconds, "settings": one.settings} for one in best]}


class Trial:
    """A run of the trainer in a process of its own, looked at while it goes."""

    def __init__(self, data: str, folder: Path, auc: float | None, rest: list[str]) -> None:
        self._data, self._folder, self._auc, self._rest = data, folder, auc, rest
        self.error = ""

    def __call__(self, number: int, settings: dict[str, Any], given_up: Callable[[float], bool]) -> Any:
        from dlrm.searching import Ended

        folder = self._folder / f"trial-{number:04d}"
        command = [sys.executable, "-m", "dlrm.train", "--data", self._data, "--run-dir", str(folder), "--evals",
                   str(_EVALS), *words(settings), *self._rest]
        if self._auc is not None:
            command += ["--stop-auc", str(self._auc)]
        began = time.monotonic()
        seen: list[float] = []
        over = False
        with open(self._folder / f"trial-{number:04d}.log", "w") as log, subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={"OMP_NUM_THREADS": "1", **os.environ}
                ) as process:
            try:
                while process.poll() is None:
                    threading.Event().wait(0.2)
                    for auc in _validations(folder)[len(seen):]:
                        seen.append(auc)
                        if not over and given_up(auc):
                            over = True
                            process.send_signal(signal.SIGTERM)
            except BaseException:
                process.send_signal(signal.SIGINT)
                process.wait(10)
                raise
            out = process.stdout.read() if process.stdout is not None else ""
        seen += _validations(folder)[len(seen):]
        self.error = "" if process.returncode == 0 else _error(out)
        return Ended(auc=max(seen) if seen else None, seconds=time.monotonic() - began, error=self.error)


def _validations(folder: Path) -> list[float]:
    return [line["auc"] for line in read_lines(folder / "metrics.jsonl")
            if line["kind"] == "eval" and line["split"] == "validation" and line["auc"] is not None]


def _error(out: str) -> str:
    try:
        return str(json.loads(out.strip().splitlines()[-1])["error"])
    except (ValueError, KeyError, IndexError):
        return "the trainer ended without a word; its log is beside its folder"


def _page(folder: Path, found: Any) -> Path:
    from dlrm.searching import front, picture

    best = front(found)
    rows = "".join(f"<tr><td>{one.number}</td><td>{one.auc:.5f}</td><td>{one.seconds:.1f} s</td><td>"
                   f"{escape(' '.join(words(one.settings)))}</td></tr>" for one in best)
    table = f"<table><tr><th>trial</th><th>AUC</th><th>time</th><th>settings</th></tr>{rows}</table>"
    given_up = sum(one.state == "pruned" for one in found)
    page = folder / "search.html"
    page.write_text(report.filled(
        title="Search", name=folder.resolve().name,
        verdict=f"{len(found)} trials, AUC up to {best[-1].auc:.5f}" if best else f"{len(found)} trials",
        rest=f"{given_up} were given up early.", charts=picture(found), decisions=table,
        footer=f"{sum(one.seconds for one in found):.0f} seconds of trials."), encoding="utf-8")
    return page


if __name__ == "__main__":
    run(main, input_errors=(ConfigError, RunError))
