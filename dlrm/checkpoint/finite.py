"""Finds NaN and infinity in the tensors of a checkpoint: `not_finite`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_MOST_NAMED = 3
"""The most tensors that a message names."""


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Returns a text for each tensor with NaN or infinity, with their number."""
    found = []
    for name, values in tensors:
        if not (values.is_floating_point() and values.numel()):
            continue
        # `aminmax` needs no memory, and returns NaN if there is one.
        if not torch.isfinite(torch.stack(torch.aminmax(values.detach()))).all():
            found.append(f"{name} ({int((~torch.isfinite(values)).sum()):,} of {values.numel():,})")
    return found


def describe_tensors(found: Sequence[str]) -> str:
    """Joins the first of these texts, with the number of the others."""
    more = f" and {len(found) - _MOST_NAMED} more tensors" if len(found) > _MOST_NAMED else ""
    return f"numbers that are not finite: {', '.join(found[:_MOST_NAMED])}{more}"
