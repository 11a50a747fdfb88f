"""xDeepFM: Wide & Deep with a compressed interaction network (CIN), whose products are of whole vectors, of an order
that each layer makes one higher."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from sluice.dlrm.model import flops
from sluice.dlrm.model.flops import LayerCost
from sluice.dlrm.model.towers import Labels, WideDeep
from sluice.dlrm.options import ModelConfig


class Cin(nn.Module):
    """x⁰ are the embeddings [B, F, W], and layer k makes maps xᵏₕ = Σᵢⱼ Kᵏₕᵢⱼ xᵏ⁻¹ᵢ ⊙ x⁰ⱼ of them; every map is summed
    up over its places. There is no activation, as in the publication. [B, F, W] → [B, maps of all layers]"""

    def __init__(self, columns: int, maps: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.empty(after, before, columns))
            for before, after in pairwise([columns, *maps])
        )
        for kernel in self.layers:
            bound = (
                6 / (kernel[0].numel() + len(kernel))
            ) ** 0.5  # Xavier's, a map's inputs being all its pairs
            nn.init.uniform_(kernel, -bound, bound)

    def forward(self, vectors: Tensor) -> Tensor:
        x, found = vectors, []
        for kernel in self.layers:
            pairs = (x.unsqueeze(2) * vectors.unsqueeze(1)).flatten(1, 2)
            x = torch.matmul(kernel.flatten(1), pairs)
            found.append(x.sum(2))
        return torch.cat(found, 1)


class XDeepFm(WideDeep):
    """Wide & Deep, and a linear layer over what the CIN found."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__(config, dense, columns)
        self.cin = Cin(columns, config.cin_layers)
        self.found = nn.Linear(
            sum(config.cin_layers), 1, bias=False
        )  # the deep part's bias is the model's

    def forward(self, dense: Tensor, pooled: Tensor, wide: Tensor) -> Tensor:
        logits: Tensor = super().forward(dense, pooled, wide)
        interactions: Tensor = self.found(self.cin(pooled))
        return logits + interactions.squeeze(1)

    @staticmethod
    def cost(
        config: ModelConfig, *, dense: int, columns: int, history: int
    ) -> dict[str, LayerCost]:
        kernels = sum(
            before * columns * after for before, after in pairwise([columns, *config.cin_layers])
        )
        return {
            **WideDeep.cost(config, dense=dense, columns=columns, history=history),
            "interaction": LayerCost(kernels, 2 * kernels * config.width)
            + flops.linear(sum(config.cin_layers), 1, bias=False),
        }

    @staticmethod
    def labels(
        config: ModelConfig, dense: Sequence[str], columns: Sequence[str]
    ) -> dict[str, Labels]:
        return {
            **WideDeep.labels(config, dense, columns),
            "cin.layers.0": (None, columns, columns),
            **{f"cin.layers.{n}": (None, None, columns) for n in range(1, len(config.cin_layers))},
        }
