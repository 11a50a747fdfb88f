"""Compares tuned with frozen knobs when the cores are halved and given back, in simulated pipelines of many cores.

    python -m benchmarks.rescale [--results FILE] [--cores 16,64] [--seeds 3]

Each set-up of `sluice.benchmarks.live_setups` is measured live in its first five settings, which calibrate a simulated
pipeline (`benchmarks.calibration`). The simulation then has more cores. `auto` starts with one worker a stage. After 60
s the cores are halved, after 120 s they are given back, and after 180 s it ends. The frozen run keeps the knobs that
`auto` had at 60 s. Printed are the rows after 60 s as ratios to the frozen run's: those of `auto`, and the most that is
known to be possible (of the oracle, `auto` and the frozen run). Intervals are 95 % and draw the set-ups anew.

The live part takes three minutes on a machine that does nothing else. What was measured is kept in FILE.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration import Calibration, backends_of, measure
from benchmarks.results import Results, table
from benchmarks.small_table import small_table
from sluice.agent.policies import make
from sluice.agent.simulator.calibration import Sighting
from sluice.agent.simulator.physics import TrueCosts
from sluice.agent.simulator.rollout import frozen_rows, reference, run
from sluice.agent.simulator.scenario import Scenario, ScheduledChange
from sluice.benchmarks.live_setups import CALIBRATION, SETUPS, TABLE
from sluice.common.program import run as program
from sluice.common.program import say

_CHANGE_S = 60
_DRAWS = 4000


def calibrated(sightings: Mapping[str, Sequence[Sighting]]) -> TrueCosts:
    """The costs of a set-up, with the stages in the back ends of its fastest setting."""
    seen = [one for some in sightings.values() for one in some]
    fastest = max(seen, key=lambda one: one.seen.rows_per_s)
    return Calibration.of(seen).truths[backends_of(fastest.knobs)]


def scenario(name: str, truth: TrueCosts, cores: int) -> Scenario:
    halved = ScheduledChange(at=_CHANGE_S, key="machine.cores", value=cores / 2)
    back = ScheduledChange(at=2 * _CHANGE_S, key="machine.cores", value=cores)
    return Scenario(
        name=name,
        seconds=3 * _CHANGE_S,
        machine=replace(truth.machine, cores=cores),
        stages=truth.stages,
        consumer=truth.consumer,
        changes=(halved, back),
    )


def ratios(one: Scenario, seeds: int) -> dict[str, float]:
    """Medians over the seeds."""
    tuned, best = [], []
    for seed in range(seeds):
        frozen = max(1.0, frozen_rows(one, make("auto"), seed=seed))
        tuned.append(sum(run(one, make("auto"), seed=seed).rates[_CHANGE_S:]) / frozen)
        oracle = sum(reference(one, seed=seed).rates[_CHANGE_S:]) / frozen
        best.append(max(oracle, tuned[-1], 1.0))
    return {"auto": statistics.median(tuned), "best known": statistics.median(best)}


def interval(values: Sequence[float]) -> list[float]:
    """The mean, and its interval."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_DRAWS, len(values))).mean(axis=1)
    return [
        round(float(v), 3) for v in (statistics.fmean(values), *np.percentile(drawn, [2.5, 97.5]))
    ]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rescale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--results", type=Path, default=Path("rescale.jsonl"), help="(default: %(default)s)")
    add("--cores", default="16,64", help="of the machines, before and after (default: %(default)s)")
    add("--seeds", type=int, default=3, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    how = argparse.Namespace(rounds=1, seconds=0.6, most=600.0)
    few = [replace(one, settings=one.settings[:CALIBRATION]) for one in SETUPS]
    with tempfile.TemporaryDirectory() as folder:
        clicks = small_table(Path(folder) / "clicks", **TABLE)
        seen = measure(few, clicks, Results(options.results), how)
    found: dict[str, Any] = {}
    for cores in map(int, options.cores.split(",")):
        rows = [
            {"set-up": name, **ratios(scenario(name, calibrated(some), cores), options.seeds)}
            for name, some in seen.items()
        ]
        say(f"{cores} cores\n{table(rows)}\n")
        found[str(cores)] = {
            what: interval([row[what] for row in rows]) for what in ("auto", "best known")
        }
    return found


if __name__ == "__main__":
    program(main)
