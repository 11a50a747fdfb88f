"""Defines AutoInt+: layers in which every feature attends to all others with several heads, plus a deep network."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from sluice.dlrm.model.interactions import NamedLabels, Names
from sluice.dlrm.model.towers import Dnn
from sluice.dlrm.options import ModelConfig


class FieldAttention(nn.Module):
    """x ← relu(concatenated heads + R x). A head is softmax(Q x · K x) V x over the features, without scaling, as in
    the publication. [B, n, before] → [B, n, heads · width]"""

    def __init__(self, before: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.rest = (
            nn.Linear(before, heads * width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = torch.matmul(torch.matmul(query, key.transpose(2, 3)).softmax(3), value)
        both: Tensor = attended.transpose(1, 2).flatten(2) + self.rest(x)
        return both.relu()


class AutoInt(Dnn):
    """A dense feature's vector is its value times a learned vector. If a run follows a table, a new feature takes part
    in the attention at once. In other towers it has no effect until it is trained."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__(config, dense, columns)
        width, heads = config.width, config.attention_heads
        self.vectors = nn.Parameter(torch.empty(dense, width))
        nn.init.normal_(self.vectors, std=width**-0.5)
        self.attention = nn.Sequential(
            *(
                FieldAttention(heads * width if n else width, width, heads)
                for n in range(config.attention_layers)
            )
        )
        self.found = nn.Linear((dense + columns) * heads * width, 1, bias=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        logits: Tensor = super().forward(dense, pooled)
        fields = torch.cat([dense.unsqueeze(2) * self.vectors, pooled], 1)
        interactions: Tensor = self.found(self.attention(fields).flatten(1))
        return logits + interactions.squeeze(1)

    @staticmethod
    def labels(config: ModelConfig, dense: Names, columns: Names) -> NamedLabels:
        after = config.attention_heads * config.width
        places: list[Hashable] = [(name, i) for name in (*dense, *columns) for i in range(after)]
        return {
            **Dnn.labels(config, dense, columns),
            "vectors": (dense, None),
            "found.weight": (None, places),
        }
