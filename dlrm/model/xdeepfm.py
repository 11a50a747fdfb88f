"""Defines xDeepFM: Wide & Deep with a compressed interaction network (CIN). The CIN multiplies vectors, and each layer
raises the order of the products by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from sluice.dlrm.model.interactions import NamedLabels, Names
from sluice.dlrm.model.towers import WideDeep
from sluice.dlrm.options import ModelConfig


class Cin(nn.Module):
    """x⁰ are the embeddings [B, F, W]. Layer k makes the maps xᵏₕ = Σᵢⱼ Kᵏₕᵢⱼ xᵏ⁻¹ᵢ ⊙ x⁰ⱼ. Each map is summed over its
    elements. There is no activation, as in the publication. [B, F, W] → [B, maps of all layers]"""

    def __init__(self, columns: int, maps: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.empty(after, before, columns))
            for before, after in pairwise([columns, *maps])
        )
        for kernel in self.layers:
            # Xavier's bound. The inputs of a map are all its pairs.
            bound = (6 / (kernel[0].numel() + len(kernel))) ** 0.5
            nn.init.uniform_(kernel, -bound, bound)

    def forward(self, vectors: Tensor) -> Tensor:
        x = vectors
        sums = []
        for kernel in self.layers:
            pairs = (x.unsqueeze(2) * vectors.unsqueeze(1)).flatten(1, 2)
            x = torch.matmul(kernel.flatten(1), pairs)
            sums.append(x.sum(2))
        return torch.cat(sums, 1)


class XDeepFm(WideDeep):
    """Wide & Deep, plus a linear layer over the maps of the CIN."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__(config, dense, columns)
        self.cin = Cin(columns, config.cin_layers)
        # The deep part has the model's bias.
        self.found = nn.Linear(sum(config.cin_layers), 1, bias=False)

    def forward(self, dense: Tensor, pooled: Tensor, wide: Tensor) -> Tensor:
        logits: Tensor = super().forward(dense, pooled, wide)
        interactions: Tensor = self.found(self.cin(pooled))
        return logits + interactions.squeeze(1)

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        return {
            **WideDeep.labels(config, dense, columns),
            "cin.layers.0": (None, columns, columns),
            **{f"cin.layers.{n}": (None, None, columns) for n in range(1, len(config.cin_layers))},
        }
