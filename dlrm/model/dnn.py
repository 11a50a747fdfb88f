"""Defines a plain deep network over dense features and embeddings, the baseline of the other towers."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.dlrm.model.flops import LayerCosts
from sluice.dlrm.model.interactions import NamedLabels, Names, mlp
from sluice.dlrm.model.towers import Tower, over_cost, vector_labels
from sluice.dlrm.options import ModelConfig


class Dnn(Tower):
    """Layers over all vectors and dense features, concatenated."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.over = mlp([dense + columns * config.width, *config.over_layers, 1], last_linear=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        logits: Tensor = self.over(torch.cat([dense, pooled.flatten(1)], 1))
        return logits.squeeze(1)

    @staticmethod
    def cost(config: ModelConfig, *, dense: int, columns: int, history: int) -> LayerCosts:
        return {"over": over_cost(config, dense + columns * config.width)}

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        return {"over.0.weight": (None, [*dense, *vector_labels(config, *columns)])}
