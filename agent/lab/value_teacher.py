"""Trains the value network on labelled looks: `teach_values`.

The loss of a look has three parts: the error of each gain, the gain that a choice by these values would lose, and the
spread, which is to exceed the error in most cases. Networks differ in their first weights and in the order of looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.choice.value import NETWORKS, SHAPES, answer, pick
from sluice.agent.lab.adam import Adam
from sluice.agent.lab.labels import LabelledLook

Arrays = dict[str, ndarray]
_BATCH = 64
_DECAY = 1e-3  # of the weights' squares; without it, a few thousand looks are learned by heart
_RATE = 2e-3
_NEAR = 0.05  # errors up to this gain count by their square
_SURE = 0.02  # the gain by which a choice among the values is made softly
_CAUTIONS = (0.0, 0.25, 0.5, 1.0, 2.0)


class _Batches:
    """All looks as padded arrays."""

    def __init__(self, looks: Sequence[LabelledLook]) -> None:
        import torch

        count = len(looks)
        most = max(len(look.rows) for look in looks)
        wide = max(len(look.given.stages) for look in looks)
        first = looks[0].given
        self.stages = np.zeros((count, wide, first.stages.shape[1]), np.float32)
        self.changes = np.zeros((count, most, wide, first.changes.shape[2]), np.float32)
        self.candidates = np.zeros((count, most, first.candidates.shape[1]), np.float32)
        self.pipeline = np.stack([look.given.pipeline for look in looks])
        self.real = np.zeros((count, wide), np.float32)
        self.listed = np.zeros((count, most), np.float32)
        self.gains = np.zeros((count, most), np.float32)
        for i, look in enumerate(looks):
            stages, candidates = len(look.given.stages), len(look.rows)
            self.stages[i, :stages] = look.given.stages
            self.changes[i, :candidates, :stages] = look.given.changes
            self.candidates[i, :candidates] = look.given.candidates
            self.real[i, :stages] = self.listed[i, :candidates] = 1
            self.gains[i, :candidates] = gains_of(look)
        self.tensors = {name: torch.from_numpy(array) for name, array in vars(self).items()}


def gains_of(look: LabelledLook) -> ndarray:
    """Returns the true gain of each candidate over staying, from -1 to 1."""
    return np.asarray(np.clip(look.rows - look.rows[0], -1, 1))


def fresh(seed: int) -> Arrays:
    draw, arrays = np.random.default_rng((13, seed)), {}
    for name, shape in SHAPES.items():
        scale = (0.1 if ".value." in name else math.sqrt(2)) / math.sqrt(shape[-1])
        arrays[name] = (scale * draw.standard_normal(shape) * name.endswith("weight")).astype(
            np.float32
        )
    return arrays


def train(looks: Sequence[LabelledLook], epochs: float, seed: int) -> Arrays:
    """Returns weights that were trained on these looks, each seen so many times."""
    import torch

    torch.set_num_threads(1)  # so small a network is slower on several, and the sums differ
    arrays, batches = fresh(seed), _Batches(looks)
    steps = max(1, round(epochs * len(looks) / _BATCH))
    for network in range(NETWORKS):
        names = [name for name in SHAPES if name.startswith(f"{network}.")]
        weights = {name: torch.from_numpy(arrays[name]).requires_grad_() for name in names}
        adam = Adam(list(weights.values()), 0.0)
        draw = np.random.default_rng((14, seed, network))
        for step in range(steps):
            rows = torch.from_numpy(draw.integers(len(looks), size=_BATCH))
            batch = {name: tensor[rows] for name, tensor in batches.tensors.items()}
            loss = _loss(weights, network, batch, min(1.0, 2 * step / steps))
            gradients = torch.autograd.grad(loss, adam.weights)
            length = torch.sqrt(sum(((g * g).sum() for g in gradients), torch.zeros(())))
            adam.rate = _RATE * (1 - 0.95 * step / steps)
            with torch.no_grad():
                adam.step([g * min(1.0, 2.0 / float(length + 1e-9)) for g in gradients])
        arrays |= {name: tensor.detach().numpy().copy() for name, tensor in weights.items()}
    return arrays


def _loss(weights: dict[str, Any], network: int, batch: dict[str, Any], ramp: float) -> Any:
    import torch
    from torch.nn.functional import smooth_l1_loss, softplus

    value = _value(weights, network, batch)
    listed = batch["listed"]
    gain = value[..., 0] - value[:, :1, 0]
    spread = softplus(value[..., 1])
    true, each = batch["gains"], listed / listed.sum(1, keepdim=True)
    errors = (smooth_l1_loss(gain, true, reduction="none", beta=_NEAR) * each).sum(1)
    likely = torch.softmax((gain / _SURE).masked_fill(listed == 0, -1e9), 1)
    lost = -(likely * true).sum(1)
    # The 0.8 quantile of the error's size.
    over = (gain.detach() - true).abs() - spread
    wide = (torch.maximum(0.8 * over, -0.2 * over) * each).sum(1)
    squares = sum(
        (weight * weight).sum() for name, weight in weights.items() if name.endswith("weight")
    )
    return (errors + ramp * lost + 0.5 * wide).mean() + _DECAY * squares


def _value(weights: dict[str, Any], network: int, batch: dict[str, Any]) -> Any:
    """Returns the same as `sluice.agent.choice.value.answer`, with gradients: gain and raw spread."""
    import torch

    def layer(name: str, values: Any) -> Any:
        part = f"{network}.{name}"
        return torch.nn.functional.linear(
            values, weights[f"{part}.weight"], weights[f"{part}.bias"]
        )

    changes, real = batch["changes"], batch["real"]
    most, wide = changes.shape[1:3]
    whole = torch.cat([batch["pipeline"][:, None].expand(-1, most, -1), batch["candidates"]], 2)
    each = torch.cat(
        [
            batch["stages"][:, None].expand(-1, most, -1, -1),
            changes,
            whole[:, :, None].expand(-1, -1, wide, -1),
        ],
        3,
    )
    state = torch.relu(layer("stage", each)) * real[:, None, :, None]
    mean = state.sum(2) / real.sum(1)[:, None, None]
    judged = torch.relu(layer("whole", torch.cat([mean, state.amax(2), whole], 2)))
    return layer("value", judged)


class ChoiceVerdict(NamedTuple):
    """What choices by a network bring on looks that it was not trained on, as shares of the best candidate's rows."""

    caution: float
    gain: float
    """Over the planner's decision, in the mean."""
    best: float
    """The same with perfect choices."""
    deviates: float
    """The share of looks with another choice than the planner's."""
    error: float


def judge(weights: Arrays, looks: Sequence[LabelledLook], caution: float) -> ChoiceVerdict:
    gained, best, deviates, errors = [], [], [], []
    for look in looks:
        gains, spreads = answer(weights, look.given)
        chosen = pick(gains, spreads, caution)
        true = gains_of(look)
        gained.append(true[chosen] - true[look.planned])
        best.append(true.max() - true[look.planned])
        deviates.append(chosen != look.planned)
        errors.append(np.abs(gains - true).mean())
    return ChoiceVerdict(
        caution, *(float(np.mean(figure)) for figure in (gained, best, deviates, errors))
    )


def teach_values(
    looks: Sequence[LabelledLook], *, epochs: float, seed: int
) -> tuple[Arrays, dict[str, Any]]:
    """Returns weights, and their record with the caution that a sixth of the pipelines, kept out for it, speaks for."""
    numbers = sorted({look.number for look in looks})
    kept = set(numbers[::6])
    held = [look for look in looks if look.number in kept]
    tried = train([look for look in looks if look.number not in kept], epochs, seed)
    verdicts = [judge(tried, held, caution) for caution in _CAUTIONS]
    # Of cautions that bring about the same, the largest changes least.
    enough = 0.9 * max(verdict.gain for verdict in verdicts)
    best = [verdict for verdict in verdicts if verdict.gain >= enough][-1]
    return train(looks, epochs, seed), {
        "looks": len(looks),
        "pipelines": len(numbers),
        "caution": best.caution,
        "held_out": [verdict._asdict() for verdict in verdicts],
    }
