"""Trains the policy for the initial setting: first it imitates the oracle, then it learns from its own results.

Imitation (DAgger): in thousands of simulated episodes, each look is paired with the oracle's setting. The oracle knows
the true costs. From the second round on, the student's own settings decide the states.

Policy gradient: each pipeline starts several times in parallel, with settings around the student's and with the same
random events. The advantage of a setting is what it delivers in its first eight seconds, compared with its group. The
student before this phase is the anchor. The curriculum decides everything, and an interrupted training continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.lab.episodes import Episodes, find_oracle_settings
from sluice.agent.lab.imitation import STAGES, lesson
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.student import Arrays, Student
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

_TOGETHER = 500  # episodes that are simulated at once
_LOOKS_S = (0.25, 0.25, 0.25, 0.25, 0.5, 1.0, 2.0)
_LATER_LOOKS, _BETWEEN_S = 2, 2.0
GROUP, PIPELINES = 8, 64
"""The attempts for each pipeline, and the pipelines, in a step of policy gradient."""
HELD_S = 8.0  # seconds for which an attempt's setting is kept
_SPREAD = 0.3  # standard deviation of attempts around the student's setting
_GRADIENT_RATE = 3e-4


def lessons(weights: Arrays | None, numbers: range, seed: int) -> Iterator[Arrays]:
    """Runs these training pipelines, and yields each look with the oracle's setting.

    The student with these weights acts. Without weights, the settings are near the oracle's."""
    for first in range(numbers.start, numbers.stop, _TOGETHER):
        some = range(first, min(first + _TOGETHER, numbers.stop))
        draw, scenarios = (
            np.random.default_rng((seed, 1, first)),
            [pipeline("training", n) for n in some],
        )
        episodes, best = (
            Episodes(scenarios, seed=first + seed),
            find_oracle_settings(scenarios, STAGES),
        )
        look = episodes.look(float(draw.choice(_LOOKS_S)))
        for later in range(1 + _LATER_LOOKS):
            if later:
                episodes.look(_BETWEEN_S)
                look = episodes.look(float(draw.choice(_LOOKS_S)))
            inputs, alive = observe(look), ~episodes.killed
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
                episodes.act(
                    Setting(
                        near, best.process[:, -width:] > 0, *buffers(look, near), best.rows_per_s
                    )
                )
            else:
                episodes.act(setting(look, inputs, answer(weights, inputs, look.real)))


def initial_gains(weights: Arrays, numbers: Sequence[int], units: ndarray, seed: int) -> ndarray:
    """Returns the rate after the student's initial settings in their first seconds, in units of the best rate."""
    episodes = Episodes([pipeline("training", n) for n in numbers], seed=seed)
    look = episodes.look(_LOOKS_S[0])
    inputs, before = observe(look), episodes.rows
    episodes.act(setting(look, inputs, answer(weights, inputs, look.real)))
    episodes.pass_time(HELD_S)
    return np.asarray(np.maximum(0.0, episodes.rows - before) / (units * HELD_S))


class Attempts(NamedTuple):
    """Initial settings around the student's, and their results. Each pipeline's first attempt is the student's own
    setting. Arrays are pipeline × attempt, and stage or buffer."""

    workers: ndarray
    process: ndarray
    sizes: ndarray
    brought: ndarray
    """The rows of the first seconds, in units of the best rate; 0 if the pipeline was killed."""
    pace: ndarray
    """The rate that the first attempt reached, as a share of the bound. One value for each pipeline."""

    @property
    def advantage(self) -> ndarray:
        """The result of each attempt, compared with the others of its pipeline."""
        spread = self.brought.std(axis=1, keepdims=True)
        return np.where(
            spread < 1e-3,
            0.0,
            (self.brought - self.brought.mean(axis=1, keepdims=True)) / (spread + 0.02),
        )


def attempt(
    episodes: Episodes,
    look: Glimpse,
    inputs: Inputs,
    answers: Answers,
    *,
    units: ndarray,
    draw: np.random.Generator,
) -> Attempts:
    """Sets the knobs of each pipeline: `answers` in its first episode, settings around them in the others."""
    first = np.arange(len(units) * GROUP) % GROUP == 0

    def around(values: ndarray, tried: int) -> ndarray:
        values = values.repeat(GROUP, axis=0)
        noise = _SPREAD * draw.standard_normal(values.shape) * (np.arange(values.shape[1]) < tried)
        return np.where(first[:, None], values, values + noise)

    workers = around(answers.workers, look.real.shape[1])
    sizes = around(answers.pipelines, 2)  # the promised rate is not varied
    process = answers.process.repeat(GROUP, axis=0)
    chance = draw.random(process.shape) < 1 / (1 + np.exp(-process))
    moved = np.where(first[:, None], process > np.where(look.process, -SURE, SURE), chance)
    before = episodes.rows
    episodes.act(
        setting(look, inputs, Answers(workers, np.where(moved, FARTHEST, -FARTHEST), sizes))
    )
    episodes.pass_time(HELD_S / 2)
    half = episodes.rows
    episodes.pass_time(HELD_S / 2)
    brought = np.maximum(0.0, episodes.rows - before) / (units.repeat(GROUP) * HELD_S)
    pace = np.maximum(0.0, episodes.rows - half) / (HELD_S / 2) / inputs.bound
    tried = [values.reshape(len(units), GROUP, -1) for values in (workers, moved, sizes)]
    return Attempts(tried[0], tried[1], tried[2], brought.reshape(-1, GROUP), pace[::GROUP])


def improve(student: Student, anchor: Student, units: ndarray, seed: int, step: int) -> float:
    """Runs a step of policy gradient. Returns the mean result of the student's own settings.

    `units` are the best rates of the training pipelines."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

    draw = np.random.default_rng((seed, 3, step))
    numbers = draw.integers(len(units), size=PIPELINES)
    episodes = Episodes(
        [pipeline("training", int(n)) for n in numbers], seed=seed + step, alike=GROUP
    )
    look = episodes.look(float(draw.choice(_LOOKS_S)))
    inputs = observe(look)
    seen = [
        torch.from_numpy(values[::GROUP].copy())
        for values in (inputs.stages, inputs.pipelines, look.real)
    ]
    workers, process, sizes = student.answers(*seen)
    with torch.no_grad():
        was = anchor.answers(*seen)
    made = attempt(
        episodes,
        look,
        inputs,
        Answers(*(one.detach().numpy() for one in (workers, process, sizes))),
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
    gain = (torch.from_numpy(made.advantage).float() * likely).mean()
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
