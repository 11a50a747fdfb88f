"""What the recipe search saves on real training: `python -m benchmarks.search --data TABLE --work DIR --auc 0.79`.

dlrm.search beside a plain search (random choices, each seen to its end) over the same space, from the same seeds, until
each has reached the AUC on the validation split. What counts is the sum of the trials' seconds, of their processor's
seconds, start-up of each leg included, and the evaluations that they came to: a busy machine changes the first alone.

The searches take turns, leg by leg. Both are kept in DIR; asked again, they go on. With --seconds none begins after so
many. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import table
from sluice.dlrm.hpo.space import Space
from sluice.dlrm.hpo.study import Found, Search, latest
from sluice.dlrm.hpo.trials import Trainers, Trial
from sluice.etl.common.program import run, say

KINDS = {"search": False, "plain": True}


class Side:
    """One search, to its aim."""

    def __init__(self, args: argparse.Namespace, trainers: Trainers, seed: int, kind: str) -> None:
        folder = args.work / f"{kind}-{seed}"
        self.name, self._aim = f"{kind} {seed}", args.auc
        self._search = Search(folder, Space.read(args.space), seed=seed, plain=KINDS[kind])
        # No --stop-auc: a trial's curve then does not depend on the aim, and both kinds pay for whole trials.
        self._trial = Trial(trainers, args.data, folder, None, args.rest)

    @property
    def reached(self) -> bool:
        return any((one.auc or 0) >= self._aim for one in self._search.legs)

    def _until(self) -> list[Found]:
        """Its trials after the first leg that reached the aim: a search for a higher one may have gone on."""
        legs = self._search.legs
        return latest(legs[:next((n for n, one in enumerate(legs, 1) if (one.auc or 0) >= self._aim), len(legs))])

    def step(self) -> None:
        one = self._search.step(self._trial)
        assert one is not None
        say(f"{self.name}, trial {one.number}: {one.state}, AUC {one.auc}, {one.seconds:.1f} s {self._trial.error}")

    def row(self) -> dict[str, Any]:
        found = self._until()
        return {"search": self.name, "trials": len(found), "to the end": sum(one.state == "complete" for one in found),
                "legs": sum(one.legs for one in found), "evaluations": sum(len(one.aucs) for one in found),
                "seconds": sum(one.seconds for one in found), "processor's": sum(one.processor_s for one in found),
                "reached": self.reached, "best AUC": max((one.auc or 0 for one in found), default=0.0)}


def compared(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """All seeds of the search over all of the plain one."""
    def total(kind: str, name: str) -> float:
        return sum(row[name] for row in rows if row["search"].startswith(kind))

    return {name: round(total("search", name) / total("plain", name), 3)
            for name in ("seconds", "processor's", "evaluations") if total("plain", name)}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, metavar="TABLE", help="feature table")
    add("--work", type=Path, required=True, metavar="DIR", help="folder of the searches")
    add("--auc", type=float, required=True, help="the aim")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="(default: 0 1)")
    add("--space", type=Path, metavar="FILE", help="what may be chosen (default: dlrm.search's)")
    add("--seconds", type=float, help="begin no trial after so many (default: go on to the end)")
    add("rest", nargs="*", metavar="-- OPTION …", help="for every trial")
    args = parser.parse_args(argv)
    args.work = args.work.resolve()
    end = time.monotonic() + (math.inf if args.seconds is None else args.seconds)
    with Trainers() as trainers:
        sides = [Side(args, trainers, seed, kind) for seed in args.seeds for kind in KINDS]
        while (going := [side for side in sides if not side.reached]) and time.monotonic() < end:
            for side in going:
                if time.monotonic() < end:
                    side.step()
    rows = [side.row() for side in sides]
    complete = all(side.reached for side in sides)
    say(f"\n{table(rows)}" + ("" if complete else "\nnot at its end; the same command goes on"))
    return {"complete": complete, "aim": args.auc, "search over plain": compared(rows), "rows": rows,
            "space": json.loads(args.space.read_text()) if args.space else "dlrm.search's"}


if __name__ == "__main__":
    run(main)
