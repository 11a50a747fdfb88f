"""Compares the simulator with live pipelines: it is calibrated on five settings of a set-up and predicts the others.

    python -m benchmarks.calibration [--results FILE] [--rounds 2] [--seconds 1.2] [--most 170]

Every set-up of `sluice.benchmarks.live_setups` is opened once a round and its settings are taken in turn, each once
what was under way
has drained; the second round takes them backwards. A measurement stops after --most seconds and goes on at the next
call. The first five settings (as many sightings as rounds) calibrate a simulated pipeline; for the others the error of
rows a second, Kendall's τ over the pairs that differ by more than 5 % live, and what is lost, live, by the setting that
the simulator would choose of all, are reckoned against the mean of the rounds. The noise is how far two rounds of one
setting are apart.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Results, table
from benchmarks.small_table import small_table
from sluice.agent.simulator.calibration import CalibrationError, Sighting, fit
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import TrueCosts
from sluice.benchmarks.live_setups import CALIBRATION, SETUPS, TABLE, Session, Setup
from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import MAX_WORKERS, Knobs, Limits
from sluice.ingest.stats import Snapshot

_TIE = 0.05  # settings that are nearer than this live have no order


@dataclass(frozen=True, slots=True)
class Calibration:
    """The simulated pipelines that come nearest to what was seen: one for each choice of back ends.

    Each choice of back ends is a pipeline of its own, because Python that holds the interpreter's lock slows all
    stages. The fit uses no setting that it is to predict."""

    truths: Mapping[tuple[str, ...], TrueCosts]

    @classmethod
    def of(cls, sightings: Sequence[Sighting]) -> Calibration:
        if not sightings:
            raise CalibrationError("there is no sighting; measure at least one setting")
        chosen = {
            backends_of(s.knobs): [
                o for o in sightings if backends_of(o.knobs) == backends_of(s.knobs)
            ]
            for s in sightings
        }
        return cls({backends: fit(group) for backends, group in chosen.items()})

    def rows_per_s(self, knobs: Knobs, *, warm_s: float = 5.0, seconds: float = 5.0) -> float:
        """The rate that the simulator predicts with these knobs."""
        truth = self.truths.get(backends_of(knobs))
        if truth is None:
            raise CalibrationError(
                f"no sighting has the back ends of {knobs}; measure one that has"
            )
        limits = Limits(workers=dict.fromkeys(knobs.workers, (1, MAX_WORKERS)))
        simulator = Simulator(lambda _: truth, limits, replace(knobs, backend={}))
        simulator.advance(warm_s)
        before = simulator.consumed
        simulator.advance(seconds)
        return (simulator.consumed - before) / seconds


def backends_of(knobs: Knobs) -> tuple[str, ...]:
    """The stages that run in processes."""
    return tuple(sorted(name for name, backend in knobs.backend.items() if backend == "process"))


@dataclass(frozen=True, slots=True)
class Prediction:
    """One setting that was not calibrated on, or one that was."""

    setting: str
    workers: int
    measured: float
    predicted: float
    noise: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def measure(
    setups: Sequence[Setup],
    feature_table: FeatureTable,
    results: Results,
    options: argparse.Namespace,
) -> dict[str, dict[str, list[Sighting]]]:
    """Returns a sighting a round, by set-up and setting; None of a set-up for which time ran out."""
    end = time.monotonic() + options.most
    found: dict[str, dict[str, list[Sighting]]] = {}
    for round_ in range(options.rounds):
        for setup in setups:
            sightings = found.setdefault(setup.name, {s: [] for s in setup.settings})
            with _Lazily(setup, feature_table) as session:
                for setting in setup.settings[:: -1 if round_ % 2 else 1]:
                    asked = {
                        "setup": setup.name,
                        "setting": setting,
                        "round": round_,
                        "seconds": options.seconds,
                    }
                    if time.monotonic() > end and not results.has(asked):
                        raise UsageError(
                            f"{options.most:.0f} s are over; run it again to go on with {setup.name!r}"
                        )
                    sightings[setting].append(
                        _from_json(
                            results.once(
                                asked,
                                lambda s=setting, session=session: session.sighting(
                                    s, options.seconds
                                ),
                            )
                        )
                    )
    return found


class _Lazily:
    """Opens a session when something is to be measured."""

    def __init__(self, setup: Setup, feature_table: FeatureTable) -> None:
        self._setup, self._table = setup, feature_table
        self._session: Session | None = None

    def sighting(self, setting: str, seconds: float) -> dict[str, Any]:
        if self._session is None:
            self._session = Session(self._setup, self._table)
        knobs = self._session.setting(setting)
        before, after = self._session.measure(knobs, seconds)
        return {"knobs": knobs.to_dict(), "before": before.to_dict(), "after": after.to_dict()}

    def __enter__(self) -> _Lazily:
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.close()


def _from_json(found: Mapping[str, Any]) -> Sighting:
    return Sighting(
        Knobs.from_dict(found["knobs"]),
        Snapshot.from_dict(found["before"]),
        Snapshot.from_dict(found["after"]),
    )


def predictions(sightings: Mapping[str, Sequence[Sighting]]) -> list[Prediction]:
    """All settings of a set-up, those calibrated on first."""
    by_setting = list(sightings.items())
    calibration = Calibration.of([s for _, some in by_setting[:CALIBRATION] for s in some])
    found = []
    for setting, some in by_setting:
        measured = [s.seen.rows_per_s for s in some]
        knobs = some[0].knobs
        found.append(
            Prediction(
                setting,
                knobs.total_workers,
                statistics.fmean(measured),
                calibration.rows_per_s(knobs),
                max(measured) / min(measured) - 1,
            )
        )
    return found


def choice(some: Sequence[Prediction]) -> Prediction:
    """What the simulator would choose: of the settings within a hundredth of its best, the one of fewest workers."""
    best = max(p.predicted for p in some)
    return min((p for p in some if p.predicted >= 0.99 * best), key=lambda p: p.workers)


def ordered(unseen: Sequence[Prediction]) -> tuple[int, int]:
    """Pairs that differ live: those in the right order less those in the wrong one, and how many there are."""
    agreed = pairs = 0
    for a, b in itertools.combinations(unseen, 2):
        if abs(a.measured / b.measured - 1) > _TIE:
            pairs += 1
            agreed += int(np.sign((a.measured - b.measured) * (a.predicted - b.predicted)))
    return agreed, pairs


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "table",
        nargs="?",
        help="a feature table with a train split (default: a small one of made-up clicks)",
    )
    add(
        "--results",
        type=Path,
        default=Path("calibration.jsonl"),
        help="where they are kept (default: %(default)s)",
    )
    add("--setup", action="append", help="this one alone: " + ", ".join(s.name for s in SETUPS))
    add("--rounds", type=int, default=2, help="(default: %(default)s)")
    add(
        "--seconds",
        type=float,
        default=1.2,
        help="of each measurement, at least (default: %(default)s)",
    )
    add(
        "--most",
        type=float,
        default=170.0,
        help="seconds after which it stops (default: %(default)s)",
    )
    add("--details", action="store_true", help="also list every setting")
    options = parser.parse_args(argv)
    setups = [s for s in SETUPS if not options.setup or s.name in options.setup]
    if options.rounds < 1 or options.seconds <= 0 or not setups:
        raise UsageError("--rounds and --seconds are positive, and --setup names one that there is")
    with tempfile.TemporaryDirectory() as folder:
        feature_table = (
            FeatureTable.open(options.table)
            if options.table
            else small_table(Path(folder) / "clicks", **TABLE)
        )
        found = measure(setups, feature_table, Results(options.results), options)
    rows, everything, agreed, pairs = [], [], 0, 0
    for name, sightings in found.items():
        some = predictions(sightings)
        unseen = some[CALIBRATION:]
        best, chosen = max(some, key=lambda p: p.measured), choice(some)
        right, of = ordered(unseen)
        agreed, pairs, everything = agreed + right, pairs + of, [*everything, *unseen]
        rows.append(
            {
                "set-up": name,
                "unseen": len(unseen),
                "median error": statistics.median(p.error for p in unseen),
                "largest": max(p.error for p in unseen),
                "τ": right / of if of else 1.0,
                "pairs": of,
                "best": best.setting,
                "chosen": chosen.setting,
                "lost": 1 - chosen.measured / best.measured,
                "noise": statistics.median(p.noise for p in some),
            }
        )
        if options.details:
            say(
                table(
                    [
                        {
                            "set-up": name,
                            "setting": p.setting,
                            "live rows/s": p.measured,
                            "predicted": p.predicted,
                            "error": p.error,
                            "noise": p.noise,
                        }
                        for p in some
                    ]
                )
                + "\n"
            )
    say(table(rows))
    errors = [p.error for p in everything]
    return {
        "setups": len(rows),
        "unseen": len(errors),
        "median_error": round(statistics.median(errors), 4),
        "p95_error": round(float(np.percentile(errors, 95)), 4),
        "tau": round(agreed / max(1, pairs), 3),
        "lost_most": round(max(row["lost"] for row in rows), 4),
        "lost_median": round(statistics.median(row["lost"] for row in rows), 4),
        "noise": round(statistics.median(p.noise for p in everything), 4),
    }


if __name__ == "__main__":
    run(main)
