"""Moves a tower's weights when features come and go: each place of them belongs to a feature, or to none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sluice.dlrm.config import ModelConfig
from sluice.dlrm.model.towers import Labels, tower_of


def labels_of(config: ModelConfig, dense: Sequence[str], columns: Sequence[str]) -> Mapping[str, Labels]:
    """The labels for the tower of these features, as its class gives them. Parameters that it does not name do not
    depend on the features at all."""
    return tower_of(config.kind).labels(config, dense, columns)


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
