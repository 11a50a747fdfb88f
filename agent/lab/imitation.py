"""Trains the student to imitate good settings: `lesson` makes a lesson of a look, and `imitate` learns from lessons."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.lab.student import Arrays, Student
from sluice.agent.policies.opening.policy import Glimpse, Inputs, buffers

STAGES = 12
"""The most stages of a pipeline. Shorter pipelines are padded to this."""
_BATCH = 128
_RATE = 2e-3


class OracleSettings(NamedTuple):
    """The best settings of some pipelines whose true costs are known.

    Arrays are pipeline × stage, or have one value for each pipeline. A pipeline's last stage is in the last column."""

    workers: ndarray
    process: ndarray
    read_ahead_bytes: ndarray
    prefetch_bytes: ndarray
    rows_per_s: ndarray


def lesson(look: Glimpse, inputs: Inputs, best: OracleSettings) -> Arrays:
    """Returns the student's inputs for a look, and the best setting as the student's outputs."""
    width = look.real.shape[1]
    # The oracle's own buffer sizes are for rates that never vary.
    ahead, fetch = buffers(look, best.workers[:, -width:])
    sizes = [
        np.log(np.maximum(1.0, best.read_ahead_bytes / ahead)),
        np.log(np.maximum(1.0, best.prefetch_bytes / fetch)),
        np.log(best.rows_per_s / inputs.bound),
    ]
    by_stage = {
        "stages": inputs.stages,
        "real": look.real,
        "movable": look.movable & look.real,
        "workers": np.log(best.workers[:, -width:]) - inputs.workers,
        "process": best.process[:, -width:],
    }
    wide = {
        name: np.pad(values, [(0, 0), (STAGES - width, 0), *[(0, 0)] * (values.ndim - 2)])
        for name, values in by_stage.items()
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
) -> float:
    """Runs the steps of imitation of a round. Returns the mean loss of the last ones."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

    columns, losses = {name: torch.from_numpy(values) for name, values in taught.items()}, []
    for step in range(steps):
        rows = np.random.default_rng((seed, 2, number, step)).integers(
            len(taught["weight"]), size=_BATCH
        )
        batch = {name: values[torch.from_numpy(rows)] for name, values in columns.items()}
        workers, process, sizes = student.answers(
            batch["stages"], batch["pipelines"], batch["real"]
        )
        off = batch["workers"] - workers
        far = 0.5 * off.abs()
        of_stages = (far * batch["real"]).sum(1) / batch["real"].sum(1)
        moved = (
            binary_cross_entropy_with_logits(process, batch["process"], reduction="none")
            * batch["movable"]
        )
        of_sizes = smooth_l1_loss(sizes, batch["sizes"], reduction="none").sum(1)
        loss = (
            (of_stages + 0.5 * moved.sum(1) / batch["movable"].sum(1).clamp(min=1) + 0.2 * of_sizes)
            * batch["weight"]
        ).mean()
        student.learn(loss, _RATE * (1 - 0.9 * step / steps))
        losses.append(float(loss.detach()))
    return float(np.mean(losses[-100:]))
