"""Teaches an opening: first to imitate the clairvoyant, then by what its own openings bring.

Imitation (DAgger): in thousands of simulated lives the student is asked at each look what it would set, and is told
what the clairvoyant, who knows the truth, would have set there. From the second round on the states are those that
the student itself has brought about. Then policy gradient: each pipeline is opened several times at once around what
the student would do, with the same chance; what an opening brings in its first eight seconds compared with the others
of its group is its advantage. The student before is the anchor. All of it is a function of the curriculum, and goes
on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sluice.agent.learn.lives import Clairvoyance, Lives
from sluice.agent.learn.student import Arrays, Student
from sluice.agent.policies.opening.policy import (
    FARTHEST,
    SURE,
    Answers,
    Glimpse,
    Inputs,
    Setting,
    answer,
    buffers,
    observe,
    setting,
)
from sluice.agent.simulator.random_pipelines import pipeline

STAGES = 12
"""The most that a pipeline has, to which all are filled up."""
_TOGETHER = 500  # lives that are simulated at once
_LOOKS_S = (0.25, 0.25, 0.25, 0.25, 0.5, 1.0, 2.0)
_LATER_LOOKS, _BETWEEN_S = 2, 2.0
_BATCH = 128
GROUP, PIPELINES = 8, 64
"""How many openings are tried of how many pipelines in a step of policy gradient."""
HELD_S, _SPREAD = (
    8.0,
    0.3,
)  # seconds for which an opening is held; how far attempts lie around the student's
_IMITATION_RATE, _GRADIENT_RATE = 2e-3, 3e-4


def lessons(
    weights: Mapping[str, np.ndarray] | None, numbers: range, seed: int
) -> Iterator[Arrays]:
    """Lets these training pipelines be lived by the student, or near the clairvoyant if there is none yet; yields what
    was seen at each look, and what the clairvoyant would have set."""
    for first in range(numbers.start, numbers.stop, _TOGETHER):
        some = range(first, min(first + _TOGETHER, numbers.stop))
        draw, scenarios = (
            np.random.default_rng((seed, 1, first)),
            [pipeline("training", n) for n in some],
        )
        lives, best = Lives(scenarios, seed=first + seed), Clairvoyance.of(scenarios, STAGES)
        look = lives.look(float(draw.choice(_LOOKS_S)))
        for later in range(1 + _LATER_LOOKS):
            if later:
                lives.look(_BETWEEN_S)
                look = lives.look(float(draw.choice(_LOOKS_S)))
            inputs, alive = observe(look), ~lives.killed
            yield {
                **lesson(look, inputs, best),
                "number": np.array(some, np.float32),
                "weight": (alive * (1.0 if later else 2.0)).astype(np.float32),
            }
            if weights is None:
                width = look.real.shape[1]
                near = best.workers[:, -width:] * np.exp(
                    0.7 * draw.standard_normal(look.real.shape)
                )
                lives.act(
                    Setting(
                        near, best.process[:, -width:] > 0, *buffers(look, near), best.rows_per_s
                    )
                )
            else:
                lives.act(setting(look, inputs, answer(weights, inputs, look.real)))


def lesson(look: Glimpse, inputs: Inputs, best: Clairvoyance) -> Arrays:
    """What was seen, as the student sees it, and what would have been best, as the student says it."""
    width = look.real.shape[1]
    ahead, fetch = buffers(
        look, best.workers[:, -width:]
    )  # the clairvoyant's are for rates that never vary
    sizes = [
        np.log(np.maximum(1.0, best.read_ahead_bytes / ahead)),
        np.log(np.maximum(1.0, best.prefetch_bytes / fetch)),
        np.log(best.rows_per_s / inputs.bound),
    ]
    found = {
        "stages": inputs.stages,
        "real": look.real,
        "movable": look.movable & look.real,
        "workers": np.log(best.workers[:, -width:]) - inputs.workers,
        "process": best.process[:, -width:],
    }
    wide = {
        name: np.pad(values, [(0, 0), (STAGES - width, 0), *[(0, 0)] * (values.ndim - 2)])
        for name, values in found.items()
    }
    return {
        name: np.ascontiguousarray(values, np.float32)
        for name, values in {
            **wide,
            "pipelines": inputs.pipelines,
            "sizes": np.clip(np.stack(sizes, -1), -3, 3),
            "unit": best.rows_per_s,
        }.items()
    }


def imitate(
    student: Student,
    taught: Arrays,
    steps: int,
    seed: int,
    number: int,
    *,
    rate: float = _IMITATION_RATE,
) -> float:
    """Steps of imitation in a round; returns the mean loss of the last of them."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

    columns, losses = {name: torch.from_numpy(values) for name, values in taught.items()}, []
    for step in range(steps):
        rows = np.random.default_rng((seed, 2, number, step)).integers(
            len(taught["weight"]), size=_BATCH
        )
        one = {name: values[torch.from_numpy(rows)] for name, values in columns.items()}
        workers, process, sizes = student.answers(one["stages"], one["pipelines"], one["real"])
        off = one["workers"] - workers
        far = 0.5 * off.abs()
        of_stages = (far * one["real"]).sum(1) / one["real"].sum(1)
        moved = (
            binary_cross_entropy_with_logits(process, one["process"], reduction="none")
            * one["movable"]
        )
        of_sizes = smooth_l1_loss(sizes, one["sizes"], reduction="none").sum(1)
        loss = (
            (of_stages + 0.5 * moved.sum(1) / one["movable"].sum(1).clamp(min=1) + 0.2 * of_sizes)
            * one["weight"]
        ).mean()
        student.learn(loss, rate * (1 - 0.9 * step / steps))
        losses.append(float(loss.detach()))
    return float(np.mean(losses[-100:]))


def opened(
    weights: Mapping[str, np.ndarray], numbers: Sequence[int], units: np.ndarray, seed: int
) -> np.ndarray:
    """What the student's openings bring in their first seconds, in units of the best rate."""
    lives = Lives([pipeline("training", n) for n in numbers], seed=seed)
    look = lives.look(_LOOKS_S[0])
    inputs, before = observe(look), lives.rows
    lives.act(setting(look, inputs, answer(weights, inputs, look.real)))
    lives.pass_time(HELD_S)
    return np.asarray(np.maximum(0.0, lives.rows - before) / (units * HELD_S))


class Attempts(NamedTuple):
    """Openings of some pipelines around what the student would do, and what came of them. Arrays are pipeline ×
    attempt, and stage or buffer; each pipeline's first attempt is what the student would do."""

    workers: np.ndarray
    process: np.ndarray
    sizes: np.ndarray
    brought: np.ndarray
    """The rows of the first seconds, in units of the best rate; nothing where the pipeline was killed."""
    pace: np.ndarray
    """The rate that the first attempt came to, as a share of the bound; pipeline alone."""

    @property
    def better(self) -> np.ndarray:
        """What each attempt brought, compared with the others of its pipeline."""
        spread = self.brought.std(axis=1, keepdims=True)
        return np.where(
            spread < 1e-3,
            0.0,
            (self.brought - self.brought.mean(axis=1, keepdims=True)) / (spread + 0.02),
        )


def attempt(
    lives: Lives,
    look: Glimpse,
    inputs: Inputs,
    said: Answers,
    *,
    units: np.ndarray,
    draw: np.random.Generator,
) -> Attempts:
    """Opens each pipeline in all its lives, the first as `said`, the others around that."""
    first = np.arange(len(units) * GROUP) % GROUP == 0

    def around(values: np.ndarray, tried: int) -> np.ndarray:
        values = values.repeat(GROUP, axis=0)
        noise = _SPREAD * draw.standard_normal(values.shape) * (np.arange(values.shape[1]) < tried)
        return np.where(first[:, None], values, values + noise)

    workers, sizes = (
        around(said.workers, look.real.shape[1]),
        around(said.pipelines, 2),
    )  # a promise is not tried
    process = said.process.repeat(GROUP, axis=0)
    chance = draw.random(process.shape) < 1 / (1 + np.exp(-process))
    moved = np.where(first[:, None], process > np.where(look.process, -SURE, SURE), chance)
    before = lives.rows
    lives.act(setting(look, inputs, Answers(workers, np.where(moved, FARTHEST, -FARTHEST), sizes)))
    lives.pass_time(HELD_S / 2)
    half = lives.rows
    lives.pass_time(HELD_S / 2)
    brought = np.maximum(0.0, lives.rows - before) / (units.repeat(GROUP) * HELD_S)
    pace = np.maximum(0.0, lives.rows - half) / (HELD_S / 2) / inputs.bound
    tried = [values.reshape(len(units), GROUP, -1) for values in (workers, moved, sizes)]
    return Attempts(tried[0], tried[1], tried[2], brought.reshape(-1, GROUP), pace[::GROUP])


def improve(student: Student, anchor: Student, units: np.ndarray, seed: int, step: int) -> float:
    """A step of policy gradient; returns what the student's own openings brought. `units` are the best rates of the
    pipelines that were lived."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

    draw = np.random.default_rng((seed, 3, step))
    numbers = draw.integers(len(units), size=PIPELINES)
    lives = Lives([pipeline("training", int(n)) for n in numbers], seed=seed + step, alike=GROUP)
    look = lives.look(float(draw.choice(_LOOKS_S)))
    inputs = observe(look)
    seen = [
        torch.from_numpy(values[::GROUP].copy())
        for values in (inputs.stages, inputs.pipelines, look.real)
    ]
    workers, process, sizes = student.answers(*seen)
    with torch.no_grad():
        was = anchor.answers(*seen)
    made = attempt(
        lives,
        look,
        inputs,
        Answers(*(said.detach().numpy() for said in (workers, process, sizes))),
        units=units[numbers],
        draw=draw,
    )
    tried = [
        torch.from_numpy(values).float() for values in (made.workers, made.process, made.sizes)
    ]
    real, movable = (
        seen[2].float(),
        torch.from_numpy((look.movable & look.real)[::GROUP].copy()).float(),
    )
    near = ((tried[0] - workers[:, None]) ** 2 * real[:, None]).sum(2) + (
        (tried[2] - sizes[:, None])[..., :2] ** 2
    ).sum(2)
    moves = binary_cross_entropy_with_logits(
        process[:, None].expand_as(tried[1]), tried[1], reduction="none"
    )
    likely = -near / (2 * _SPREAD**2) - (moves * movable[:, None]).sum(2)
    gain = (torch.from_numpy(made.better).float() * likely).mean()
    away = (
        0.5 * (((workers - was[0]) ** 2 * real).sum(1) / real.sum(1)).mean()
        + 0.05 * ((process - was[1]) ** 2 * movable).mean()
        + 0.2 * ((sizes - was[2])[:, :2] ** 2).mean()
    )
    pace = torch.from_numpy(np.log(np.maximum(made.pace, 1e-2))).float()
    promised = smooth_l1_loss(sizes[:, 2], pace, reduction="none") * torch.from_numpy(
        made.pace > 1e-2
    )
    student.learn(away - gain + 0.2 * promised.mean(), _GRADIENT_RATE)
    return float(made.brought[:, 0].mean())
