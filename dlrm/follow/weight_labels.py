"""Which feature each place of a tower's weights belongs to, so that weights can move when features come and go.

`labels_of(…)` gives, for each parameter that depends on the features, a label for each place of each dimension; None
stands for a dimension that does not. Parameters that it does not name do not depend on the features at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from sluice.dlrm.config import ModelConfig

Labels = tuple[Sequence[Hashable] | None, ...]
_TOWER = "the dense features' own vector"  # no column has this name


def labels_of(config: ModelConfig, dense: Sequence[str], columns: Sequence[str]) -> dict[str, Labels]:
    """The labels for the tower of these features, as `sluice.dlrm.model.towers.build` makes it."""

    def vector(name: str) -> list[Hashable]:
        return [(name, i) for i in range(config.width)]

    pooled = [label for name in columns for label in vector(name)]
    if config.kind == "dlrm":
        pairs: list[Hashable] = [frozenset(pair) for pair in combinations([_TOWER, *columns], 2)]
        return {"dense.0.weight": (None, dense), "over.0.weight": (None, [*vector(_TOWER), *pairs])}
    if config.kind == "dcn":
        wide = [*vector(_TOWER), *pooled]
        return {"dense.0.weight": (None, dense), "over.0.weight": (None, wide), **_cross(config, wide)}
    if config.kind == "dien":
        return {"over.0.weight": (None, [*dense, *pooled, *vector("the target"), *vector("the interest")])}
    return {"linear.weight": (None, dense), "over.0.weight": (None, [*dense, *pooled])}


def _cross(config: ModelConfig, wide: Sequence[Hashable]) -> dict[str, Labels]:
    found: dict[str, Labels] = {}
    for n in range(config.cross_layers):
        if not config.cross_rank:
            found |= {f"cross.layers.{n}.weight": (wide, wide), f"cross.layers.{n}.bias": (wide,)}
        elif config.cross_experts == 1:
            found |= {f"cross.down.{n}.weight": (None, wide), f"cross.up.{n}.weight": (wide, None),
                      f"cross.up.{n}.bias": (wide,)}
        else:
            found |= {f"cross.down.{n}": (None, None, wide), f"cross.up.{n}": (None, wide, None),
                      f"cross.bias.{n}": (wide,), "cross.gate.weight": (None, wide)}
    return found


def moved(old: Tensor, before: Labels, after: Labels) -> Tensor:
    """A weight, or an optimiser's state of its shape, with each value where its feature is now. What belongs to a new
    feature is 0: until it has learned, the model answers as it did without it."""
    for dimension, (was, now) in enumerate(zip(before, after, strict=True)):
        if was is None or now is None or list(was) == list(now):
            continue
        at = {label: place for place, label in enumerate(was)}
        kept = [(place, at[label]) for place, label in enumerate(now) if label in at]
        into, source = (torch.tensor([pair[i] for pair in kept], dtype=torch.int64) for i in (0, 1))
        new = old.new_zeros([*old.shape[:dimension], len(now), *old.shape[dimension + 1:]])
        old = new.index_copy_(dimension, into, old.index_select(dimension, source))
    return old
