"""Measures live runs after a change: how soon the rate is back, and the rate with unchanged knobs.

    python -m benchmarks.occasions [--only transform] [--rounds 3]

The occasions: transforms become four times as dear; the share of the cores falls to a half, and rises from there to all
(by a control group's quota where one can be made, else by affinity); a version of the table comes whose features need a
lookup more. In each round the planner tunes one pipeline from a worker a stage, the occasion comes, and it tunes on;
another pipeline begins with what it had settled on, meets the same and stays as it is. Which goes first takes turns.

Told are medians: what both settle at (the last third of the time after), the seconds until the tuned one is at 95 % of
that for good, its rows in the first seconds and in all the time after over those of the frozen one, and the changes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.results import table
from benchmarks.small_table import small_table
from sluice.agent.controller import Controller
from sluice.agent.policies import make
from sluice.agent.report.incidents import recovery
from sluice.benchmarks.live_setups import SETUPS, TABLE, Session, Setup, Turn
from sluice.common.program import run as program
from sluice.ingest.faults.core_limit import CoreShare
from sluice.ingest.knobs import Knobs
from sluice.ingest.machine import Machine

_LOOK_S, _WARM_S = 0.4, 2.0
_SOON_S = 10.0
_HALF = 0.5
_SETUPS = {setup.name: setup for setup in SETUPS}
_LOOKUP = Setup(name="a lookup", about="4 ms a batch", transforms=("light",), settings=())
_MORE = replace(_SETUPS["store and lookup"], transforms=("lookup", "heavy"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    name: str
    setup: Setup
    burden: int = 1
    share: tuple[float, float] | None = None
    """Cores before and after; 0: all."""
    then: Setup | None = None
    """The pipeline of the next version."""


OCCASIONS = (
    Occasion(name="transform four times as dear", setup=_LOOKUP, burden=4),
    Occasion(name="cores: all to a half", setup=_SETUPS["pure Python"], share=(0, _HALF)),
    Occasion(name="cores: a half to all", setup=_SETUPS["pure Python"], share=(_HALF, 0)),
    Occasion(name="schema: a lookup more", setup=_SETUPS["store and lookup"], then=_MORE),
)


@dataclass(frozen=True, slots=True)
class After:
    """Rows a second by seconds since the occasion."""

    rates: tuple[tuple[float, float], ...]
    changes: int

    @property
    def settled(self) -> float:
        return recovery(0.0, self.rates)[0] or float("nan")

    @property
    def recovered_s(self) -> float:
        found = recovery(0.0, self.rates)[1]
        return float("inf") if found is None else found

    def rows(self, until_s: float) -> float:
        """The rows of all that was taken in these seconds."""
        total, before = 0.0, 0.0
        for at, rate in self.rates:
            total += rate * max(0.0, min(at, until_s) - before)
            before = max(before, min(at, until_s))
        return total


def watch(session: Session, began: float, seconds: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    while not found or found[-1][0] < seconds:
        turn = Turn.of(*session.run(_LOOK_S), session.tunable.knobs)
        found.append((time.monotonic() - began, turn.rows_per_s))
    return found


@contextlib.contextmanager
def tuned(session: Session) -> Iterator[Callable[[], int]]:
    """The planner at work; gives how often it has changed something."""
    with Controller(session.tunable, make("planner"), record=lambda _: None) as controller:
        yield lambda: controller.decisions


@contextlib.contextmanager
def frozen(_: Session) -> Iterator[Callable[[], int]]:
    yield lambda: 0


class Arm:
    def __init__(self, occasion: Occasion, clicks: Any, settle_s: float, seconds: float) -> None:
        self._occasion, self._clicks, self._settle_s, self._seconds = (
            occasion,
            clicks,
            settle_s,
            seconds,
        )

    def run(self, start: Knobs | None) -> tuple[Knobs, After]:
        """Tuned from a worker a stage, or frozen at `start`; the knobs before the occasion and what came after it."""
        one, share, whole = self._occasion, CoreShare(), Machine().cores()
        before, after = one.share or (0, 0)
        kind, warm_s = (tuned, self._settle_s) if start is None else (frozen, _WARM_S)
        try:
            if before:
                share.set(before)
            with Session(one.setup, self._clicks) as session:
                if start is not None:
                    session.tunable.apply(start)
                with kind(session) as changes:
                    session.run(warm_s)
                    knobs, made = session.tunable.knobs, changes()
                    if one.then is None:
                        if one.burden > 1:
                            session.tunable.burden(one.burden)
                        if one.share:
                            share.set(after or whole)
                        rates = watch(session, time.monotonic(), self._seconds)
                        return knobs, After(tuple(rates), changes() - made)
            began = time.monotonic()
            with Session(one.then, self._clicks) as session:
                session.tunable.apply(session.tunable.limits.clamp(knobs))
                with kind(session) as changes:
                    return knobs, After(tuple(watch(session, began, self._seconds)), changes())
        finally:
            share.restore()


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.occasions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", default="", help="occasions whose name begins so")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add(
        "--settle",
        type=float,
        default=12.0,
        metavar="S",
        help="before the occasion (default: %(default)s)",
    )
    add("--seconds", type=float, default=20.0, metavar="S", help="after it (default: %(default)s)")
    options = parser.parse_args(argv)
    found = []
    with tempfile.TemporaryDirectory(prefix="sluice-occasions-") as folder:
        clicks = small_table(Path(folder) / "clicks", **TABLE)
        for occasion in (o for o in OCCASIONS if o.name.startswith(options.only)):
            pairs: list[tuple[After, After]] = []
            knobs: Knobs | None = None
            for number in range(options.rounds):
                arm = Arm(occasion, clicks, options.settle, options.seconds)
                if (
                    number % 2 and knobs is not None
                ):  # the frozen one first, with what was settled on in the last round
                    other = arm.run(knobs)[1]
                    knobs, own = arm.run(None)
                else:
                    knobs, own = arm.run(None)
                    other = arm.run(knobs)[1]
                pairs.append((own, other))
            found.append(row(occasion.name, pairs))
            print(table(found[-1:]), flush=True)
    print(table(found))
    return {"occasions": found}


def row(name: str, pairs: list[tuple[After, After]]) -> dict[str, Any]:
    def median(values: Iterator[float]) -> float:
        return round(statistics.median(values), 2)

    return {
        "occasion": name,
        "settles at": round(median(own.settled for own, _ in pairs)),
        "frozen": round(median(other.settled for _, other in pairs)),
        "back after s": [round(own.recovered_s, 1) for own, _ in pairs],
        "× frozen, settled": median(own.settled / other.settled for own, other in pairs),
        f"× frozen, first {_SOON_S:g} s": median(
            own.rows(_SOON_S) / other.rows(_SOON_S) for own, other in pairs
        ),
        "× frozen, all": median(own.rows(1e9) / other.rows(1e9) for own, other in pairs),
        "changes": [own.changes for own, _ in pairs],
    }


if __name__ == "__main__":
    program(main)
