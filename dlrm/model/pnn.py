"""Defines PNN with inner products: a deep network over all vectors and the products of their pairs."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from math import comb

from torch import Tensor

from sluice.dlrm.model.interactions import Dots, NamedLabels, Names
from sluice.dlrm.model.towers import Tower, last_layers, vector_labels
from sluice.dlrm.options import ModelConfig


class Pnn(Tower):
    """A deep network over all vectors and their dot products. Unlike in DLRM, dense features have no vector."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.dots = Dots(columns)
        self.over = last_layers(config, dense + columns * config.width + comb(columns, 2))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.last(dense, pooled.flatten(1), self.dots(pooled))

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        pairs: list[Hashable] = [frozenset(pair) for pair in combinations(columns, 2)]
        return {"over.0.weight": (None, [*dense, *vector_labels(config, *columns), *pairs])}
