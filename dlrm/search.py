"""Searches for settings of the trainer that reach an AUC on the validation split, and shows AUC against time.

    sluice search --data TABLE --out DIR --auc 0.80 --budget 3600
    sluice search --data TABLE --out DIR --space space.json -- --epochs 2    what follows -- goes to every trial

The space is a JSON file of {flag of dlrm.train: [values] or {"low": …, "high": …, "log": true}}; --show-space prints
the default. A search in a folder that holds one goes on with it. The last line of standard output is one JSON object:
the best settings, the front of AUC against seconds, and the page with its picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NoReturn

from sluice.agent.report import page as report
from sluice.agent.report.run_folder import read_lines
from sluice.dlrm.hpo.space import DEFAULT, Space, words
from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run, say
from sluice.etl.spec import code_options

_EVALS = 9
"""Evaluations in an epoch; `sluice.dlrm.hpo.study` says after which a trial is set aside."""
_STATES = {"complete": "seen to its end", "aside": "set aside", "fail": "failed"}


def main(argv: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="sluice search", description=__doc__,
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
    code_options.add_options(parser)
    args = parser.parse_args(argv)
    if args.show_space:
        say(json.dumps(DEFAULT, indent=1))
        return {"space": DEFAULT}
    if args.data is None or args.out is None:
        raise UsageError("--data and --out are needed")
    from sluice.dlrm.hpo.study import Search, front

    search = Search(args.out, Space.read(args.space), seed=args.seed, plain=args.plain)

    def reached() -> bool:
        return any(one.auc is not None and args.auc and one.auc >= args.auc for one in search.found)

    def more() -> bool:
        return len(search.found) < args.trials and (args.budget is None or search.seconds < args.budget)

    with Trainers() as trainers:
        trial = Trial(trainers, args.data, args.out, args.auc, [*code_options.words(args), *args.rest])
        while not reached() and (one := search.step(trial, more=more())) is not None:
            say(f"trial {one.number}: " + (f"AUC {one.auc:.5f}" if one.auc is not None else trial.error or "failed")
                + f" after {one.seconds:.1f} s, {_STATES[one.state]}: {' '.join(words(one.settings))}")
    best = front(search.found)
    page = _page(args.out, search.found)
    return {"best": best[-1].settings if best else None, "auc": best[-1].auc if best else None, "reached": reached(),
            "trials": len(search.found), "seconds": round(search.seconds, 1), "page": str(page),
            "front": [{"auc": one.auc, "seconds": one.seconds, "settings": one.settings} for one in best]}


class Trainers:
    """The process that starts trainers (`sluice.dlrm.hpo.trial_server`). It runs from the first trainer on, for as long
    as the context lasts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets a trainer that still runs save and end."""
        if self._process is not None:
            self._process.communicate()

    def run(self, words: Sequence[str], log: Path) -> float:
        """Runs one trainer; returns the processor time that it took, in seconds."""
        self.begin(words, log)
        return self.ended()

    def begin(self, words: Sequence[str], log: Path) -> None:
        if self._process is None:
            self._process = subprocess.Popen([sys.executable, "-m", "sluice.dlrm.hpo.trial_server"],
                                             stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, text=True,
                                             env={"OMP_NUM_THREADS": "1", **os.environ})
        print(json.dumps({"words": words, "log": str(log)}), file=self._process.stdin, flush=True)

    def ended(self) -> float:
        line = self._process.stdout.readline() if self._process is not None and self._process.stdout else ""
        if not line:
            raise RuntimeError("the process that starts trainers is gone; begin the search again to go on with it")
        return float(json.loads(line)["processor_s"])


class Trial:
    """A run of the trainer, a leg at a time."""

    def __init__(self, trainers: Trainers, data: str, folder: Path, auc: float | None, rest: list[str]) -> None:
        self._trainers, self._data, self._folder, self._auc, self._rest = trainers, data, folder, auc, rest
        self.error = ""

    def __call__(self, number: int, settings: dict[str, Any], until: int | None) -> Any:
        from sluice.dlrm.hpo.study import Ended

        folder, log = self._folder / f"trial-{number:04d}", self._folder / f"trial-{number:04d}.log"
        command = ["--data", self._data, "--run-dir", str(folder), "--resume", "--evals", str(_EVALS),
                   *words(settings), *self._rest]
        if self._auc is not None:
            command += ["--stop-auc", str(self._auc)]
        if until is not None:
            command += ["--pause-after", str(max(1, until - len(_validations(folder))))]
        began = time.monotonic()
        used = self._trainers.run(command, log)
        result = _result(log)
        self.error = str(result.get("error", ""))
        return Ended(aucs=tuple(_validations(folder)), seconds=time.monotonic() - began, processor_s=used,
                     stopped=bool(result.get("stopped")), error=self.error)


def _validations(folder: Path) -> list[float]:
    """The AUC of each validation, once a step: one that was broken off before its checkpoint was complete is
    repeated."""
    return list({line["step"]: line["auc"] for line in read_lines(folder / "metrics.jsonl")
                 if line["kind"] == "eval" and line["split"] == "validation" and line["auc"] is not None}.values())


def _result(log: Path) -> dict[str, Any]:
    """The JSON object in the trainer's last line."""
    try:
        return dict(json.loads(log.read_text(errors="replace").splitlines()[-1]))
    except (OSError, ValueError, TypeError, IndexError):
        return {"error": "the trainer ended without a word; its log is beside its folder"}


def _page(folder: Path, found: Any) -> Path:
    from sluice.dlrm.hpo.study import front, picture

    best = front(found)
    rows = "".join(f"<tr><td>{one.number}</td><td>{one.auc:.5f}</td><td>{one.seconds:.1f} s</td><td>"
                   f"{escape(' '.join(words(one.settings)))}</td></tr>" for one in best)
    table = f"<table><tr><th>trial</th><th>AUC</th><th>time</th><th>settings</th></tr>{rows}</table>"
    aside = sum(one.state == "aside" for one in found)
    page = folder / "search.html"
    page.write_text(report.filled(
        title="Search", name=folder.resolve().name,
        verdict=f"{len(found)} trials, AUC up to {best[-1].auc:.5f}" if best else f"{len(found)} trials",
        rest=f"{aside} were set aside early.", charts=picture(found), decisions=table,
        footer=f"{sum(one.seconds for one in found):.0f} seconds of trials."), encoding="utf-8")
    return page


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
