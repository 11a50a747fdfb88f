"""The training plan of the policy for the initial setting: `Curriculum`, `teach`. An interrupted training continues."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice.agent.lab import opening_teacher
from sluice.agent.lab.episodes import find_oracle_settings
from sluice.agent.lab.imitation import STAGES, imitate
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.student import MOMENTS, Arrays, Student
from sluice.agent.policies.opening.policy import SHAPES
from sluice.agent.policies.opening.weights import WeightsError, read, write

_EXAM = 1_000_000  # training pipelines from this number on are only for the exam
_SAVED_EVERY = 50  # steps of policy gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """The length of the training. The same curriculum gives the same weights."""

    seed: int = 0
    lives: int = 20_000
    rounds: int = 4
    imitations: int = 2_000
    """Steps of imitation in each round."""
    gradients: int = 600
    """Steps of policy gradient."""
    exams: int = 256

    def __post_init__(self) -> None:
        if (
            not 1 <= self.rounds <= self.lives
            or min(self.imitations, self.gradients + 1, self.exams) < 1
        ):
            raise ValueError(
                f"{self}: each round needs an episode and a step of imitation, and an exam needs a pipeline"
            )

    def numbers(self, round_: int) -> range:
        """Returns the numbers of the training pipelines of a round."""
        return range(round_ * self.lives // self.rounds, (round_ + 1) * self.lives // self.rounds)


class _Progress:
    """The student and the finished steps, on disk."""

    def __init__(self, plan: Curriculum, folder: Path) -> None:
        self.folder = folder
        self.done: dict[str, Any] = {"plan": asdict(plan), "rounds": 0, "gradients": 0, "count": 0}
        self._file, self.student = folder / "student.safetensors", Student.fresh(plan.seed)
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            arrays, done = read(self._file, {**SHAPES, **MOMENTS})
            if done["plan"] != self.done["plan"]:
                raise WeightsError(
                    f"{self._file}: this training has the plan {done['plan']}, not "
                    f"{self.done['plan']}; give another folder, or the same plan"
                )
            self.student, self.done = Student(arrays, done["count"]), done

    def save(self, **done: int) -> None:
        arrays, count = self.student.saved()
        self.done = {**self.done, **done, "count": count}
        write(self._file, arrays, self.done)

    def load_or_make(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Returns the arrays of that name from the folder, and makes them if they are not there."""
        from safetensors.numpy import load_file

        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            write(path, make(), {})
        return load_file(path)


def teach(
    plan: Curriculum, folder: Path, say: Callable[[str], None]
) -> tuple[Arrays, dict[str, Any]]:
    """Returns the weights and the record of their training. `folder` keeps the progress."""
    import torch

    torch.set_num_threads(1)  # so small a network is slower on several, and the sums differ
    progress = _Progress(plan, folder)
    student, taught = progress.student, []
    for number in range(plan.rounds):
        taught.append(
            progress.load_or_make(
                f"round-{number}", functools.partial(_round, plan, number, student)
            )
        )
        if progress.done["rounds"] > number:
            continue
        loss = imitate(
            student,
            {name: np.concatenate([one[name] for one in taught]) for name in taught[0]},
            plan.imitations,
            plan.seed,
            number,
        )
        progress.save(rounds=number + 1)
        say(
            f"round {number + 1} of {plan.rounds}: {plan.numbers(number).stop:,} episodes, loss {loss:.3f}"
        )
    brought = _improve(plan, progress, taught, say)
    tried = plan.gradients * opening_teacher.PIPELINES * opening_teacher.GROUP
    return student.arrays(), {
        "lives": plan.lives + tried,
        "curriculum": asdict(plan),
        "seed": plan.seed,
        "exam": brought,
        "ranges": {
            "stages": _ranges(np.concatenate([one["stages"][one["real"] > 0] for one in taught])),
            "pipelines": _ranges(np.concatenate([one["pipelines"] for one in taught])),
        },
    }


def _round(plan: Curriculum, number: int, student: Student) -> Arrays:
    weights = student.arrays() if number else None
    looks = list(opening_teacher.lessons(weights, plan.numbers(number), plan.seed))
    return {name: np.concatenate([look[name] for look in looks]) for name in looks[0]}


def _improve(
    plan: Curriculum, progress: _Progress, taught: list[Arrays], say: Callable[[str], None]
) -> list[float]:
    """Runs the steps of policy gradient. Returns the results in the exam before and after them."""
    units = np.ones(plan.lives)
    for one in taught:
        units[one["number"].astype(int)] = one["unit"]
    student, anchor = (
        progress.student,
        Student(progress.load_or_make("anchor", progress.student.arrays)),
    )
    exam = range(_EXAM, _EXAM + plan.exams)
    best = progress.load_or_make(
        "exam",
        lambda: {
            "unit": find_oracle_settings([pipeline("training", n) for n in exam], STAGES).rows_per_s
        },
    )["unit"]
    before, brought = (
        float(opening_teacher.initial_gains(anchor.arrays(), exam, best, plan.seed).mean()),
        [],
    )
    say(f"imitation: the first seconds reach {before:.3f} of the best rate")
    for step in range(progress.done["gradients"], plan.gradients):
        brought.append(opening_teacher.improve(student, anchor, units, plan.seed, step))
        if (step + 1) % _SAVED_EVERY == 0 or step + 1 == plan.gradients:
            progress.save(gradients=step + 1)
            say(
                f"policy gradient: {step + 1} of {plan.gradients} steps, {np.mean(brought[-_SAVED_EVERY:]):.3f}"
            )
    after = float(opening_teacher.initial_gains(student.arrays(), exam, best, plan.seed).mean())
    say(f"policy gradient: the first seconds reach {after:.3f} of the best rate")
    return [before, after]


def _ranges(values: np.ndarray) -> list[list[float]]:
    """Returns the least and the most of each input."""
    return [
        [float(low), float(high)]
        for low, high in zip(values.min(axis=0), values.max(axis=0), strict=True)
    ]
