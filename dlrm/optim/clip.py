"""Limits the length of the dense layers' gradients: `clip`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip(parameters: Iterable[tuple[str, nn.Parameter]], limit: float) -> dict[str, Tensor]:
    """Scales all gradients so that their common length is at most `limit`. Returns the lengths before, one for each
    parameter and the common one as "". They stay on the device, so the host does not wait for them.

    Call it after the backward pass. The gradients are then the same on all ranks, so all ranks clip without
    communication. Tables that the backward pass updates have no gradient here. Their kernels limit single elements
    (`gradient_clipping`, `max_gradient`)."""
    named = {name: p.grad for name, p in parameters if p.grad is not None}
    gradients = list(named.values())
    lengths = torch._foreach_norm(gradients)
    length = torch.linalg.vector_norm(torch.stack(lengths))
    # A factor of 1 changes no bit. The division is in float64, as on the host.
    torch._foreach_mul_(gradients, (limit / length.double()).clamp(max=1.0).to(length))
    return {**dict(zip(named, lengths, strict=True)), "": length}
