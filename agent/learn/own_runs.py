"""`sluice learn RUN…`: goes on teaching the learned policy with the results of your own runs.

A run that asked for an opening has left a record of it, in numbers, without data or names: what was seen at the first
look, and on what the planner settled. The weights learn to open with that; a run counts the more, the nearer its rate
came to the best of its pipeline. A quarter of the records is kept apart, and judges: the new weights are installed in
the user's cache, where every run looks first, only if they are nearer there to what was settled on than those before,
surely. `--out` writes them elsewhere, for `--agent-weights`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sluice.agent.learn.lives import Clairvoyance
from sluice.agent.learn.opening_judgement import mean_between
from sluice.agent.learn.opening_teacher import STAGES, imitate, lesson
from sluice.agent.learn.student import Arrays, Student
from sluice.agent.policies.opening.policy import SHAPES, Answers, Glimpse, Inputs, answer, observe
from sluice.agent.policies.opening.record import OpeningRecord
from sluice.agent.policies.opening.weights import in_use, installed, read, write
from sluice.agent.report.run_folder import Run
from sluice.common.errors import UsageError
from sluice.common.program import say
from sluice.common.settings import parse, setting

_LEAST = 12
"""Records below which nothing can be judged."""
_APART = 4  # each fourth record is kept apart
_RATE = 3e-4
_SHARPNESS = 4.0
"""By this power of its rate, as a share of the best of its pipeline, a record counts."""


@dataclass(frozen=True, kw_only=True)
class OwnRuns:
    """The run folders that are learned from, and how."""

    runs: tuple[str, ...] = setting(
        help="run folders", metavar="RUN", positional=True, several=True
    )
    weights: Path | None = setting(
        None, "weights to go on from (default: those in use)", metavar="FILE"
    )
    out: Path | None = setting(
        None, "where better weights are written (default: the user's cache)", metavar="FILE"
    )
    steps: int = setting(300, "steps of imitation", least=1)
    seed: int = setting(0, "decides the order of the lessons")


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    options = parse(OwnRuns, argv=argv, prog="sluice learn", description=__doc__)
    found = in_use() if options.weights is None else options.weights
    if found is None:
        raise UsageError(
            "no weights to go on from: none came with this package; --weights names some, and `sluice "
            "teach --policy opening` makes them"
        )
    before, how = read(found, SHAPES)
    taught, apart = parted(records(options.runs))
    after = learned(before, taught, options.steps, options.seed)
    gain = errors(before, apart) - errors(after, apart)
    _, low, _ = mean_between(gain)
    better, out = low > 0, options.out or installed()
    figures = {
        "taught": len(taught["weight"]),
        "apart": len(gain),
        "error_before": float(errors(before, apart).mean()),
        "error_after": float(errors(after, apart).mean()),
        "gain_at_least": low,
    }
    if better:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(
            out,
            after,
            {
                **how,
                "ranges": widened(how["ranges"], taught),
                "own_runs": {
                    **figures,
                    "command": shlex.join(["sluice", "learn", *argv]),
                    "date": datetime.now(UTC).date().isoformat(),
                },
            },
        )
    say(
        f"{found}: {figures['error_before']:.3f} off in {len(gain)} records kept apart, {figures['error_after']:.3f} "
        f"after {len(taught['weight'])} others were learned from: "
        + (f"{out} has the new weights" if better else "not surely better, so nothing is changed")
    )
    return {**figures, "better": better, "weights": str(out) if better else str(found)}


def records(runs: Sequence[str]) -> list[OpeningRecord]:
    """The records that these runs have left, of openings after which something was settled on in the shape that was
    opened."""
    events = [event for run in runs for event in Run.read(run).of("opening")]
    found = [OpeningRecord.from_dict(event["record"]) for event in events]
    useful = [
        one
        for one in found
        if one.settled is not None
        and one.rows_per_s
        and one.settled.fused == one.given.knobs.fused
        and len(one.given.limits.workers) <= STAGES
    ]
    if len(useful) < _LEAST:
        raise UsageError(
            f"{len(runs)} runs have left {len(useful)} records of openings to learn from, and at least "
            f"{_LEAST} are needed; runs with `--tuning auto` leave them in their run folders"
        )
    return useful


def parted(some: Sequence[OpeningRecord]) -> tuple[Arrays, Arrays]:
    """The lessons that are learned, and those that are kept apart."""
    best: dict[Any, float] = {}
    for one in some:
        best[_pipeline(one)] = max(best.get(_pipeline(one), 0.0), one.rows_per_s or 0.0)
    each = [_lesson(one, best[_pipeline(one)]) for one in some]

    def together(part: Sequence[Arrays]) -> Arrays:
        return {name: np.concatenate([one[name] for one in part]) for name in part[0]}

    return (together([one for i, one in enumerate(each) if i % _APART]), together(each[::_APART]))


def _pipeline(one: OpeningRecord) -> Any:
    """The values that runs of one pipeline on one machine have in common."""
    return (
        tuple(one.given.limits.workers.values()),
        one.given.known.row_bytes,
        one.given.seen.cpu_quota,
    )


def _lesson(one: OpeningRecord, best_rows_per_s: float) -> Arrays:
    """What was seen, with what was settled on in the clairvoyant's place."""
    settled, rate = one.settled, one.rows_per_s
    assert settled is not None, "the run has ended"
    assert rate is not None, "and its rate is known"
    look = Glimpse.of(one.given)
    own = [stage.name for stage in one.given.seen.stages if stage.name not in one.given.knobs.fused]

    def wide(values: Sequence[float]) -> np.ndarray:
        return np.pad(np.array([values], float), [(0, 0), (STAGES - len(own), 0)])

    goal = Clairvoyance(
        wide([settled.workers[name] for name in own]),
        wide([settled.backend.get(name) == "process" for name in own]),
        np.array([float(settled.read_ahead_bytes)]),
        np.array([float(settled.prefetch_bytes)]),
        np.array([rate]),
    )
    return {
        **lesson(look, observe(look), goal),
        "weight": np.array([(rate / best_rows_per_s) ** _SHARPNESS], np.float32),
    }


def learned(weights: Arrays, taught: Arrays, steps: int, seed: int) -> Arrays:
    import torch

    torch.set_num_threads(1)  # so small a network is slower on several, and the sums differ
    student = Student(weights)
    imitate(student, taught, steps, seed, 0, rate=_RATE)
    return student.arrays()


def errors(weights: Mapping[str, np.ndarray], some: Arrays) -> np.ndarray:
    """How far from what was settled on these weights would open, for each record: the mean of the stages' logarithms
    of workers, half the share of wrong back ends, and a tenth of the buffers' logarithms and the rate's."""
    said = _said(weights, some)
    real, movable = some["real"] > 0, some["movable"] > 0
    workers = (abs(said.workers - some["workers"]) * real).sum(axis=1) / real.sum(axis=1)
    wrong = (((said.process > 0) != (some["process"] > 0)) * movable).sum(axis=1) / np.maximum(
        1, movable.sum(axis=1)
    )
    sizes = abs(said.pipelines - some["sizes"]).sum(axis=1)
    return np.asarray(workers + 0.5 * wrong + 0.1 * sizes)


def _said(weights: Mapping[str, np.ndarray], some: Arrays) -> Answers:
    nothing = np.zeros(len(some["unit"]))
    return answer(
        weights, Inputs(some["stages"], some["pipelines"], nothing, nothing), some["real"] > 0
    )


def widened(ranges: Mapping[str, Any], taught: Arrays) -> dict[str, Any]:
    """What counts as taught now: what did before, and what these lessons showed."""

    def more(old: Sequence[Sequence[float]], new: np.ndarray) -> list[list[float]]:
        return [
            [min(low, float(least)), max(high, float(most))]
            for (low, high), least, most in zip(old, new.min(axis=0), new.max(axis=0), strict=True)
        ]

    return {
        "stages": more(ranges["stages"], taught["stages"][taught["real"] > 0]),
        "pipelines": more(ranges["pipelines"], taught["pipelines"]),
    }
