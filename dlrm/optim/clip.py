"""Limits the length of the dense layers' gradients: `clip`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def clip(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scales all gradients so that their common length is at most `limit`. The host does not wait for a device.

    Call it after the backward pass. The gradients are then the same on all ranks, so all ranks clip without
    communication. Tables that the backward pass updates have no gradient here. Their kernels limit single elements
    (`gradient_clipping`, `max_gradient`)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    # A factor of 1 changes no bit. The division is in float64, as on the host.
    torch._foreach_mul_(gradients, (limit / length.double()).clamp(max=1.0).to(length))
