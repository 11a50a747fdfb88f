"""Defines the dense part of each model, a *tower*. It turns dense features and pooled embeddings into one logit a
sample.

A tower is a class that derives from `Tower`, and a line in `MODELS` of `sluice.dlrm.options`. The class says which
inputs it takes, and which features its weights belong to.

`build(ModelConfig(…), dense=D, columns=F)` makes a tower. Its `inputs` are some of these, in this order:

- `dense` [B, D] and `pooled` [B, F, W];
- `wide` [B, F, n]: one weight for each id, from a second table of each column. Fused kernels take widths in fours, so
  such a table is WIDE wide, and a weight is the mean over its n columns. With row-wise Adagrad, that mean takes the
  same steps as Adagrad on a single column;
- `history` [B, T, W], `lengths` [B], `target` [B, W]: embedded items of a history (padded at the end, with any finite
  values), how many are real, and the item in question.

All return logits [B].
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib import import_module
from itertools import combinations
from math import comb
from typing import ClassVar

import torch
from torch import Tensor, nn

from sluice.dlrm.model.interactions import (
    CrossLayers,
    Dots,
    InterestEvolution,
    NamedLabels,
    Names,
    mlp,
    second_order,
)
from sluice.dlrm.options import MODELS, ConfigError, ModelConfig

WIDE = 4
_TOWER = "the dense features' own vector"  # the label of this vector; no column has this name


class Tower(nn.Module):
    """The base class of towers. The last layers are called `over`, because `first_bias` sets their last bias."""

    inputs: ClassVar[tuple[str, ...]] = ("dense", "pooled")
    over: nn.Sequential

    def last(self, *parts: Tensor) -> Tensor:
        """Returns the logits of the last layers, over these parts side by side."""
        logits: Tensor = self.over(torch.cat(parts, 1))
        return logits.squeeze(1)

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        """Returns the labels of each parameter that depends on the features."""
        raise NotImplementedError


def last_layers(config: ModelConfig, inputs: int) -> nn.Sequential:
    """Makes the layers after the interaction. The last one gives the logit, without a ReLU."""
    sizes = [inputs, *config.over_layers]
    return nn.Sequential(*mlp(sizes), nn.Linear(sizes[-1], 1))


def tower_of(kind: str) -> type[Tower]:
    """Returns the class of a tower by its name."""
    module, _, name = MODELS[kind].partition(":")
    tower: type[Tower] = getattr(import_module(module), name)
    return tower


def build(config: ModelConfig, *, dense: int, columns: int) -> Tower:
    """Makes the tower for `dense` dense features, which may be 0, and `columns` pooled embeddings."""
    if columns < 1:
        raise ConfigError("a model needs a sparse column or more")
    return tower_of(config.kind)(config, dense, columns)


def parameters_of(config: ModelConfig, *, dense: int, columns: int) -> int:
    """Counts the parameters of a tower, on tensors without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(config, dense=dense, columns=columns).parameters())


def vector_labels(config: ModelConfig, *names: str) -> list[Hashable]:
    """Returns the labels of these columns' vectors, one after the other."""
    return [(name, i) for name in names for i in range(config.width)]


class Dlrm(Tower):
    """DLRM: one network makes a vector of the dense features. The dot products of all pairs of vectors go into a second
    network."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.dense = mlp([dense, *config.dense_layers, config.width])
        self.dots = Dots(columns + 1)
        self.over = last_layers(config, config.width + comb(columns + 1, 2))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        dense = self.dense(dense)
        dots = self.dots(torch.cat([dense.unsqueeze(1), pooled], 1))
        return self.last(dense, dots)

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        pairs: list[Hashable] = [frozenset(pair) for pair in combinations([_TOWER, *columns], 2)]
        return {
            "dense.0.weight": (None, dense),
            "over.0.weight": (None, [*vector_labels(config, _TOWER), *pairs]),
        }


class Dcn(Tower):
    """DCN-v2: like DLRM, with cross layers over all vectors instead of dot products."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        width = config.width * (columns + 1)
        self.dense = mlp([dense, *config.dense_layers, config.width])
        self.cross = CrossLayers(width, config.cross_layers, config.cross_rank)
        self.over = last_layers(config, width)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.last(self.cross(torch.cat([self.dense(dense), pooled.flatten(1)], 1)))

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        wide = vector_labels(config, _TOWER, *columns)
        cross = CrossLayers.labels(wide, config.cross_layers, config.cross_rank)
        return {
            "dense.0.weight": (None, dense),
            "over.0.weight": (None, wide),
            **{f"cross.{name}": labels for name, labels in cross.items()},
        }


class Dnn(Tower):
    """A plain deep network over all vectors and dense features, concatenated: the baseline of the other towers."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.over = last_layers(config, dense + columns * config.width)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.last(dense, pooled.flatten(1))

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        return {"over.0.weight": (None, [*dense, *vector_labels(config, *columns)])}


class WideDeep(Tower):
    """Wide & Deep: a linear model over ids and dense features, plus a deep one over embeddings and dense features."""

    inputs = ("dense", "pooled", "wide")

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dense, 1, bias=False)  # the deep part's bias is the model's
        self.over = last_layers(config, dense + columns * config.width)

    def forward(self, dense: Tensor, pooled: Tensor, wide: Tensor) -> Tensor:
        linear: Tensor = self.linear(dense)
        return self.last(dense, pooled.flatten(1)) + linear.squeeze(1) + wide.mean(2).sum(1)

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        return {
            "linear.weight": (None, dense),
            **Dnn.labels(config, dense, columns),
        }


class DeepFm(WideDeep):
    """DeepFM: Wide & Deep, plus a factorisation machine over the same embeddings."""

    def forward(self, dense: Tensor, pooled: Tensor, wide: Tensor) -> Tensor:
        return super().forward(dense, pooled, wide) + second_order(pooled)


class Dien(Tower):
    """DIEN, the deep interest evolution network: it reads a history with attention to the target item, then a network
    takes all vectors."""

    inputs = ("dense", "pooled", "history", "lengths", "target")

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.interests = InterestEvolution(config.width)
        self.over = last_layers(config, dense + (columns + 2) * config.width)

    def forward(
        self,
        dense: Tensor,
        pooled: Tensor,
        history: Tensor,
        lengths: Tensor,
        target: Tensor,
    ) -> Tensor:
        interest = self.interests(history, lengths, target)
        return self.last(dense, pooled.flatten(1), target, interest)

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        vectors = vector_labels(config, *columns, "the target", "the interest")
        return {"over.0.weight": (None, [*dense, *vectors])}
