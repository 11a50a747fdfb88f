"""Trains the learned policy further, on the looks that your own runs have recorded."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.learn.imitation import STAGES, OracleSettings, imitate, lesson, mean_between
from sluice.agent.learn.student import Arrays, Student
from sluice.agent.policies.opening.contract import Foreknowledge, PolicyInput
from sluice.agent.policies.opening.policy import SHAPES, Glimpse, Inputs, answer, observe
from sluice.agent.policies.opening.weights import in_use, installed, read, write
from sluice.agent.report import looks
from sluice.common.errors import UsageError
from sluice.ingest.knobs import Knobs

_LEAST = 12
"""The fewest records that allow a comparison."""
_HELD_OUT = 4  # each fourth record is held out
_RATE = 3e-4
_SHARPNESS = 4.0
"""The weight of a record is this power of its rate, as a share of the best rate of its pipeline."""


def learn(
    runs: Sequence[str],
    *,
    weights: Path | None,
    out: Path | None,
    steps: int,
    seed: int,
    command: Sequence[str],
    say: Callable[[str], None],
) -> Mapping[str, Any]:
    """Trains the policy on these runs, and writes better weights. `command` is recorded in their file."""
    import safetensors  # noqa: F401  fails now, not after the training

    initial = in_use() if weights is None else weights
    if initial is None:
        raise UsageError(
            "no weights to start from: this package has none; name a file with --weights, or make weights with "
            "`python -m sluice.agent.lab.teach` in a checkout"
        )
    before, how = read(initial, SHAPES)
    taught, apart = split_lessons(records(runs))
    after = train(before, taught, steps, seed)
    gain = errors(before, apart) - errors(after, apart)
    _, low, _ = mean_between(gain)
    better, out = low > 0, out or installed()
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
                "ranges": widen(how["ranges"], taught),
                "own_runs": {
                    **figures,
                    "command": shlex.join(command),
                    "date": datetime.now(UTC).date().isoformat(),
                },
            },
        )
    say(
        f"{initial}: error {figures['error_before']:.3f} in {len(gain)} held-out records, {figures['error_after']:.3f} "
        f"after training on {len(taught['weight'])} others: "
        + (
            f"{out} has the new weights"
            if better
            else "not significantly better, so nothing is changed"
        )
    )
    return {**figures, "better": better, "weights": str(out) if better else str(initial)}


@dataclass(frozen=True, slots=True)
class OwnRun:
    """The first look at which all stages had worked, the knobs at the end, and the rate in between."""

    given: PolicyInput
    settled: Knobs
    rows_per_s: float

    @classmethod
    def of(cls, start: looks.Start) -> OwnRun | None:
        """Returns what a policy's start shows. None: too little, or other fused stages than at the start."""
        if not start.looks or len(start.limits.workers) > STAGES:
            return None
        begun, last = start.looks[0].snapshot, start.looks[-1]
        for before, look in itertools.pairwise(start.looks):
            seen = look.snapshot
            if before.knobs != start.knobs or last.knobs.fused != start.knobs.fused:
                return None
            if all(stage.rows > begun.stage(stage.name).rows for stage in seen.stages):
                break
        else:
            return None
        seconds, rows = last.snapshot.at - seen.at, last.snapshot.rows - seen.rows
        if rows <= 0:
            return None
        given = PolicyInput(
            begun=begun,
            seen=seen,
            knobs=start.knobs,
            limits=start.limits,
            known=Foreknowledge(**start.made_of.get("known", {})),
        )
        return cls(given, last.knobs, rows / seconds)


def records(runs: Sequence[str]) -> list[OwnRun]:
    """Returns what these runs show."""
    starts = [start for run in runs for start in looks.read(Path(run))]
    useful = [one for one in map(OwnRun.of, starts) if one is not None]
    if len(useful) < _LEAST:
        raise UsageError(
            f"{len(runs)} runs have {len(useful)} usable records, and at least {_LEAST} are needed; runs with "
            "`--tuning auto` write them in their run folders (looks.jsonl)"
        )
    return useful


def split_lessons(some: Sequence[OwnRun]) -> tuple[Arrays, Arrays]:
    """Returns the lessons for training, and those held out."""
    best: dict[Any, float] = {}
    for one in some:
        best[_pipeline(one)] = max(best.get(_pipeline(one), 0.0), one.rows_per_s)
    each = [_lesson(one, best[_pipeline(one)]) for one in some]

    def together(part: Sequence[Arrays]) -> Arrays:
        return {name: np.concatenate([one[name] for one in part]) for name in part[0]}

    return (
        together([one for i, one in enumerate(each) if i % _HELD_OUT]),
        together(each[::_HELD_OUT]),
    )


def _pipeline(one: OwnRun) -> Any:
    """Returns values that are equal in all runs of one pipeline on one machine."""
    return (
        tuple(one.given.limits.workers.values()),
        one.given.known.row_bytes,
        one.given.seen.cpu_quota,
    )


def _lesson(one: OwnRun, best_rows_per_s: float) -> Arrays:
    """Returns a lesson with the settled knobs in place of the oracle's."""
    settled, rate = one.settled, one.rows_per_s
    look = Glimpse.of(one.given)
    own = one.given.own_stages

    def wide(values: Sequence[float]) -> ndarray:
        return np.pad(np.array([values], float), [(0, 0), (STAGES - len(own), 0)])

    goal = OracleSettings(
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


def train(weights: Arrays, taught: Arrays, steps: int, seed: int) -> Arrays:
    import torch

    torch.set_num_threads(1)  # so small a network is slower on several, and the sums differ
    student = Student(weights)
    imitate(student, taught, steps, seed, 0, rate=_RATE)
    return student.arrays()


def errors(weights: Arrays, some: Arrays) -> ndarray:
    """Returns for each record how far the policy's setting is from the settled knobs.

    The error has three parts: the mean difference of the stages' log workers, half the share of wrong back ends, and a
    tenth of the differences of the logarithms of buffers and rate."""
    nothing = np.zeros(len(some["unit"]))
    inputs = Inputs(some["stages"], some["pipelines"], nothing, nothing)
    answers = answer(weights, inputs, some["real"] > 0)
    real, movable = some["real"] > 0, some["movable"] > 0
    workers = (abs(answers.workers - some["workers"]) * real).sum(axis=1) / real.sum(axis=1)
    wrong = (((answers.process > 0) != (some["process"] > 0)) * movable).sum(axis=1) / np.maximum(
        1, movable.sum(axis=1)
    )
    sizes = abs(answers.pipelines - some["sizes"]).sum(axis=1)
    return np.asarray(workers + 0.5 * wrong + 0.1 * sizes)


def widen(ranges: Mapping[str, Any], taught: Arrays) -> dict[str, Any]:
    """Returns the training ranges, extended by these lessons."""

    def more(old: Sequence[Sequence[float]], new: ndarray) -> list[list[float]]:
        return [
            [min(low, float(least)), max(high, float(most))]
            for (low, high), least, most in zip(old, new.min(axis=0), new.max(axis=0), strict=True)
        ]

    return {
        "stages": more(ranges["stages"], taught["stages"][taught["real"] > 0]),
        "pipelines": more(ranges["pipelines"], taught["pipelines"]),
    }
