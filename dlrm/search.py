"""Searches for settings of the trainer that reach an AUC on the validation split, and shows AUC against time.

    sluice search --data TABLE --out DIR --auc 0.80 --budget 3600
    sluice search --data TABLE --out DIR --space space.json -- --epochs 2    what follows -- goes to every trial

The space is a JSON file of {flag of dlrm.train: [values] or {"low": …, "high": …, "log": true}}. A search in a folder
that holds one goes on. The last line is JSON: the best settings, the front of AUC against seconds, and the page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sluice.dlrm.hpo.space import DEFAULT, Space, words
from sluice.dlrm.hpo.trials import Trainers, Trial
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run, say
from sluice.etl.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions

_STATES = {"complete": "seen to its end", "aside": "set aside", "fail": "failed"}


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What is searched, and for how long."""

    title = "what"
    data: str = setting("", "feature table", metavar="TABLE")
    out: Path | None = setting(None, "folder of the search", metavar="DIR")
    space: Path | None = setting(None, "what may be chosen (default: see --show-space)", metavar="FILE")
    show_space: bool = setting(False, "print the default space and leave")
    auc: float | None = setting(None, "end once a trial reaches it", metavar="AUC")
    trials: int = setting(30, "at most, with those of before")
    budget: float | None = setting(None, "begin no trial after so many seconds of trials", metavar="SECONDS")
    seed: int = setting(0, "decides what is tried")
    plain: bool = setting(False, "at random, each to its end: what the search is compared with")
    rest: tuple[str, ...] = setting((), "for every trial", metavar="-- OPTION …", positional=True, several=True)
    code: CodeOptions = field(default_factory=CodeOptions)


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(SearchOptions, argv=argv, prog="sluice search", description=__doc__)
    if args.show_space:
        say(json.dumps(DEFAULT, indent=1))
        return {"space": DEFAULT}
    if not args.data or args.out is None:
        raise UsageError("--data and --out are needed")
    from sluice.dlrm.hpo.study import Search, front, write_page

    search = Search(args.out, Space.read(args.space), seed=args.seed, plain=args.plain)

    def reached() -> bool:
        return any(one.auc is not None and args.auc and one.auc >= args.auc for one in search.found)

    def more() -> bool:
        return len(search.found) < args.trials and (args.budget is None or search.seconds < args.budget)

    with Trainers() as trainers:
        trial = Trial(trainers, args.data, args.out, args.auc, [*args.code.words, *args.rest])
        while not reached() and (one := search.step(trial, more=more())) is not None:
            say(f"trial {one.number}: " + (f"AUC {one.auc:.5f}" if one.auc is not None else trial.error or "failed")
                + f" after {one.seconds:.1f} s, {_STATES[one.state]}: {' '.join(words(one.settings))}")
    best, page = front(search.found), write_page(args.out, search.found)
    return {"best": best[-1].settings if best else None, "auc": best[-1].auc if best else None, "reached": reached(),
            "trials": len(search.found), "seconds": round(search.seconds, 1), "page": str(page),
            "front": [{"auc": one.auc, "seconds": one.seconds, "settings": one.settings} for one in best]}


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
