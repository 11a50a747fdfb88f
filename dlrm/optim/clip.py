"""Limits the length of the dense layers' gradients, and raises if one is not finite: `clip`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


class GradientError(ValueError):
    """A gradient is not finite. The message names the first layer that has one."""


def clip(parameters: Iterable[tuple[str, nn.Parameter]], limit: float) -> float:
    """Scales all gradients so that their common length is at most `limit`. Returns the length before.

    Call it after the backward pass. The gradients are then the same on all ranks, so all ranks clip or raise without
    communication. Tables that the backward pass updates have no gradient here. Their kernels limit single elements
    (`gradient_clipping`, `max_gradient`)."""
    named = [(name, p) for name, p in parameters if p.grad is not None]
    gradients = [p.grad for _, p in named if p.grad is not None]
    length = float(nn.utils.get_total_norm(gradients))
    if not math.isfinite(length):
        bad = next(
            (
                name
                for name, p in named
                if p.grad is not None and not bool(torch.isfinite(p.grad).all())
            ),
            None,
        )
        raise GradientError(
            f"the gradient of {bad!r} is not finite"
            if bad
            else f"the gradients' length is {length}, though each element is finite"
        )
    if length > limit:
        for g in gradients:
            g.mul_(limit / length)
    return length
