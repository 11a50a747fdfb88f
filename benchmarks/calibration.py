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
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Results, table
from benchmarks.small_table import small_table
from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage, TrueCosts, steady
from sluice.benchmarks.live_setups import CALIBRATION, SETUPS, TABLE, Session, Setup
from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import MAX_WORKERS, Knobs, Limits
from sluice.ingest.stats import Snapshot

_TIE = 0.05  # settings that are nearer than this live have no order
_SMT = tuple(
    1 - 0.05 * i for i in range(17)
)  # what a core's second thread is worth; if unknown, all of it
_SIGMA = tuple(0.02 * i for i in range(51))
_SWITCH = (0.0, 0.02, 0.05, 0.1, 0.2)
_SLACK = (0.85, 1.3)  # the limits of the factor by which rates may correct the costs
_SIMPLER = 2.0  # times better than a slope alone a cliff has to fit
_CROWDED = (
    0.5  # share of a stage's workers that must be at work to show how they disturb each other
)
_LEAST_S = 1e-6
_IN_HAND = 1.5  # times an item's bytes that a worker holds: its output, and part of its input


class CalibrationError(ValueError):
    """Sightings that say nothing: the message says of what."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A measurement of a live pipeline with one setting, from one moment to another."""

    knobs: Knobs
    before: Snapshot
    after: Snapshot

    @property
    def seen(self) -> PipelineRates:
        measured = rates(self.before, self.after)
        if measured is None or measured.rows_per_s <= 0:
            raise CalibrationError(f"no rows came with {self.knobs}; measure longer")
        return measured

    @property
    def held(self) -> bool:
        """Whether work waited for memory during the measurement."""
        return self.after.held_back > self.before.held_back


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of a stage's item at one setting."""

    workers: float
    """How many workers were at work at the same time, on average."""
    cpu_s: float
    wait_s: float
    crowd: float
    """The share of the cores that were at work."""

    @property
    def busy_s(self) -> float:
        return self.cpu_s + self.wait_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """The simulated pipelines that come nearest to what was seen: one for each choice of back ends.

    The cost of a stage's item comes from its useful time and processor time. How that cost grows with the stage's
    workers comes from the settings at which they worked side by side: each further worker adds a share of waiting,
    or there is a cliff beyond some number of workers. Work that the governor held back for memory becomes a cliff,
    or a cap on reading. Three things are fitted last: how much dearer a row is when all cores work, from processor
    time; what switching wastes; and what the fluid's ideal hand-over leaves out, both from the rates. Each choice
    of back ends is a pipeline of its own, because Python that holds the interpreter's lock slows all stages. The
    fit uses no setting that it is to predict."""

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
        return cls({backends: _truth(group) for backends, group in chosen.items()})

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


def _truth(sightings: Sequence[Sighting]) -> TrueCosts:
    free = [
        s for s in sightings if not s.held
    ] or sightings  # held-back settings say something of memory alone
    costs = {
        s.name: [_cost(sighting, s.name) for sighting in free] for s in sightings[0].after.stages
    }
    smt = min(
        _SMT,
        key=lambda value: sum(_cpu_error(stage_costs, value) for stage_costs in costs.values()),
    )
    stages = tuple(
        _stage(name, [_alone(c, smt) for c in stage_costs], free)
        for name, stage_costs in costs.items()
    )
    machine = SimMachine(
        cores=sightings[-1].after.cpu_quota,
        smt=smt,
        timer_noise=0.0,
        switch_cost=0.0,
        memory_limit=float(sightings[-1].after.memory_limit),
        base_bytes=_base(sightings),
    )
    return _fitted(TrueCosts(machine, _governed(stages, sightings), _consumer(sightings)), free)


def _cost(sighting: Sighting, name: str) -> _Cost:
    before, after, seen = sighting.before.stage(name), sighting.after.stage(name), sighting.seen
    items = max(1, after.items - before.items)
    cpu = max(0.0, after.cpu_s - before.cpu_s)
    busy = max(
        after.busy_s - before.busy_s - (after.core_wait_s - before.core_wait_s), cpu, _LEAST_S
    )
    workers = min(float(sighting.knobs.workers[name]), max(1.0, busy / seen.seconds))
    if workers < _CROWDED * sighting.knobs.workers[name]:
        workers = 1.0
    return _Cost(workers, cpu / items, (busy - cpu) / items, min(1.0, seen.cpu / seen.cpu_quota))


def _dearer(crowd: float, smt: float) -> float:
    """The factor on processor time when such a share of the cores works, as the simulator computes it."""
    return 1 + max(0.0, 2 * crowd - 1) * (2 / (1 + smt) - 1)


def _cpu_error(costs: Sequence[_Cost], smt: float) -> float:
    """How much a stage's processor time differs between settings, once corrected; a stage counts by its share of the
    time."""
    alone = [c.cpu_s / _dearer(c.crowd, smt) for c in costs if c.cpu_s > 0]
    if len(alone) < 2:
        return 0.0
    centre = _mean(alone)
    return sum(math.log(a / centre) ** 2 for a in alone) * centre


def _alone(cost: _Cost, smt: float) -> _Cost:
    return replace(cost, cpu_s=cost.cpu_s / _dearer(cost.crowd, smt))


def _stage(name: str, costs: Sequence[_Cost], sightings: Sequence[Sighting]) -> SimStage:
    curve = _curve(costs)
    cost_s = max(curve.cost_s, _LEAST_S)
    counters = [(s.before.stage(name), s.after.stage(name)) for s in sightings]
    items = sum(b.items - a.items for a, b in counters) or 1
    rows = sum(b.rows - a.rows for a, b in counters) or 1
    size = sum(b.bytes - a.bytes for a, b in counters)
    return SimStage(
        name=name,
        cost_s=cost_s,
        cpu=min(1.0, _mean([max(c.cpu_s, _LEAST_S) for c in costs]) / cost_s),
        sigma=curve.sigma,
        cliff_workers=curve.cliff,
        cliff_factor=curve.factor,
        rows_per_item=max(1.0, rows / items),
        bytes_per_row=size / rows,
        item_bytes=_IN_HAND * size / items,
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    cost_s: float
    sigma: float = 0.0
    cliff: int = 0
    factor: float = 1.0
    error: float = 0.0


def _curve(costs: Sequence[_Cost]) -> _Curve:
    """The cost of an item as the number of workers at work grows: a slope, or a slope with a cliff where that fits far
    better."""
    slope = _sloping(costs, 0)
    at_work = sorted(round(c.workers) for c in costs)
    cliffs = [
        _sloping(costs, n) for n in sorted(set(at_work)) if n < at_work[-min(2, len(at_work))]
    ]
    steep = min(cliffs, key=lambda c: c.error, default=slope)
    return steep if _SIMPLER * steep.error + 1e-3 < slope.error else slope


def _sloping(costs: Sequence[_Cost], cliff: int) -> _Curve:
    """The best slope, if settings with more than `cliff` workers at work (0: none) pay a factor."""
    best = None
    for sigma in _SIGMA:
        flat = [
            (round(c.workers) > cliff > 0, c.busy_s / (1 + sigma * (c.workers - 1))) for c in costs
        ]
        low, high = [b for beyond, b in flat if not beyond], [b for beyond, b in flat if beyond]
        if not low:
            continue
        factor = max(1.0, _mean(high) / _mean(low)) if high else 1.0
        error = sum(math.log(b / _mean(low)) ** 2 for b in low) + sum(
            math.log(b / (factor * _mean(low))) ** 2 for b in high
        )
        if best is None or error < best.error - 1e-9:
            best = _Curve(_mean(low), sigma, cliff if factor > 1 else 0, factor, error)
    assert best is not None, "some setting has fewest at work"
    return best


def _consumer(sightings: Sequence[Sighting]) -> Consumer:
    """The consumer: its step, and the processor time that no stage accounts for."""
    batches = sum(s.after.batches - s.before.batches for s in sightings) or 1
    rows = sum(s.after.rows - s.before.rows for s in sightings)
    step = (
        sum(s.after.consumer_compute_s - s.before.consumer_compute_s for s in sightings) / batches
    )
    other = (
        max(
            0.0,
            sum(s.after.cpu_used_s - s.before.cpu_used_s for s in sightings)
            - sum(
                b.cpu_s - a.cpu_s
                for s in sightings
                for a, b in zip(s.before.stages, s.after.stages, strict=True)
            ),
        )
        / batches
    )
    step = max(step, _LEAST_S)
    return Consumer(
        batch_rows=max(1, round(rows / batches)),
        step_s=step,
        cpu=min(1.0, other / step),
        cores=max(1.0, other / step),
    )


def _governed(stages: tuple[SimStage, ...], sightings: Sequence[Sighting]) -> tuple[SimStage, ...]:
    """Adds the governor's effect. With more readers than the most that memory never held back, reading is as slow as it
    was measured there; where memory always held it back, reading is capped."""
    first = stages[0].name
    held, free = [s for s in sightings if s.held], [s for s in sightings if not s.held]
    if not held:
        return stages
    if not free:
        return (
            replace(stages[0], cap_rows_per_s=max(s.seen.rows_per_s for s in held)),
            *stages[1:],
        )
    most = max(s.knobs.workers[first] for s in free)
    each = [
        _mean([s.seen.rows_per_s / s.knobs.workers[first] for s in some])
        for some in ([s for s in free if s.knobs.workers[first] == most], held)
    ]
    return (
        replace(stages[0], cliff_workers=most, cliff_factor=max(1.0, each[0] / each[1])),
        *stages[1:],
    )


def _base(sightings: Sequence[Sighting]) -> float:
    """The memory that neither workers nor queues hold."""
    held = (
        s.after.memory_used - sum(stage.queue_bytes for stage in s.after.stages) for s in sightings
    )
    return max(0.0, float(min(held)))


def _fitted(truth: TrueCosts, sightings: Sequence[Sighting]) -> TrueCosts:
    """The truth corrected by the settings' rates: the cores' loss to switching, and slack in every cost."""
    measured = [s.seen.rows_per_s for s in sightings]
    best, least = truth, math.inf
    for switch in _SWITCH:
        tried = replace(truth, machine=replace(truth.machine, switch_cost=switch))
        off = [r / m for r, m in zip(_rates(tried, sightings), measured, strict=True)]
        slack = min(max(_mean(off), _SLACK[0]), _SLACK[1])
        tried = replace(
            tried, stages=tuple(replace(s, cost_s=s.cost_s * slack) for s in truth.stages)
        )
        error = sum(
            math.log(r / m) ** 2 for r, m in zip(_rates(tried, sightings), measured, strict=True)
        )
        if error < least:
            best, least = tried, error
    return best


def _rates(truth: TrueCosts, sightings: Iterable[Sighting]) -> list[float]:
    return [
        steady(
            truth,
            [s.knobs.workers[stage.name] for stage in truth.stages],
            ["thread"] * len(truth.stages),
        ).rates[-1]
        for s in sightings
    ]


def _mean(values: Sequence[float]) -> float:
    """The geometric mean: twice and half cancel out."""
    return math.exp(sum(math.log(v) for v in values) / len(values))


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
