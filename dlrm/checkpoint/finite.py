"""Looks for NaN and infinity in the tensors of a checkpoint, which make it useless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_NAMED = 3
"""How many of the tensors a message names."""


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Says of each tensor with such numbers how many it has."""
    found = []
    for name, values in tensors:
        if values.is_floating_point() and values.numel() and not _is_finite(values):
            found.append(f"{name} ({int((~torch.isfinite(values)).sum()):,} of {values.numel():,})")
    return found


def in_words(found: Sequence[str]) -> str:
    """The first of these texts, and how many more there are."""
    more = f" and {len(found) - _NAMED} more tensors" if len(found) > _NAMED else ""
    return f"numbers that are not finite: {', '.join(found[:_NAMED])}{more}"


def _is_finite(values: Tensor) -> bool:
    """One pass over the numbers, which needs no memory: NaN is the least and the largest of all."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(values.detach()))).all())
