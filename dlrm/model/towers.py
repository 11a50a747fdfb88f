"""The dense side of every model: dense features and pooled embeddings in, one logit a sample out.

`build(ModelConfig(…), dense=D, columns=F)` gives a module whose inputs `INPUTS[kind]` names, in this order:

- `dense` [B, D] and `pooled` [B, F, W]: for all kinds;
- `wide` [B, F, n]: for `wide_deep` and `deepfm`, one weight for each id, from a second table of each column. Fused
  kernels take widths in fours, so such a table is WIDE wide and a weight is the mean over its n columns. Under
  row-wise Adagrad that mean takes the very steps of Adagrad on a single column;
- `history` [B, T, W], `lengths` [B], `target` [B, W]: for `dien`, embedded items of a history (padded at the end, with
  any finite values), how many are real, and the item in question. `negatives` [B, T, W], items that did not come,
  are needed for its auxiliary loss alone.

All return logits [B]; `dien` returns (logits, auxiliary loss), 0 without negatives.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor, nn

from sluice.dlrm.config import ConfigError, ModelConfig
from sluice.dlrm.model.interactions import CrossLayers, Dots, Interests, LowRankCross, MixtureCross, mlp, second_order

WIDE = 4
INPUTS = {
    "dlrm": ("dense", "pooled"),
    "dcn": ("dense", "pooled"),
    "wide_deep": ("dense", "pooled", "wide"),
    "deepfm": ("dense", "pooled", "wide"),
    "dien": ("dense", "pooled", "history", "lengths", "target"),
}


def build(config: ModelConfig, *, dense: int, columns: int) -> nn.Module:
    """The tower for `dense` dense features and `columns` pooled embeddings."""
    if dense < 1 or columns < 1:
        raise ConfigError(f"a model needs a dense and a sparse column or more, not {dense} and {columns}")
    kinds: dict[str, type[nn.Module]] = {"dlrm": Dlrm, "dcn": Dcn, "wide_deep": WideDeep, "deepfm": DeepFm,
                                         "dien": Dien}
    return kinds[config.kind](config, dense, columns)


class Dlrm(nn.Module):
    """DLRM: dense features go through one tower; its output and all embeddings are multiplied pair by pair; then a
    second tower follows."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.dense = mlp([dense, *config.dense_layers, config.width])
        self.dots = Dots(columns + 1)
        self.over = mlp([config.width + comb(columns + 1, 2), *config.over_layers, 1], last_linear=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        dense = self.dense(dense)
        dots = self.dots(torch.cat([dense.unsqueeze(1), pooled], 1))
        logits: Tensor = self.over(torch.cat([dense, dots], 1))
        return logits.squeeze(1)


class Dcn(nn.Module):
    """DCN-v2: as DLRM, but cross layers over all vectors take the place of the dot products."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        width = config.width * (columns + 1)
        self.dense = mlp([dense, *config.dense_layers, config.width])
        self.cross: nn.Module
        if not config.cross_rank:
            self.cross = CrossLayers(width, config.cross_layers)
        elif config.cross_experts == 1:
            self.cross = LowRankCross(width, config.cross_layers, config.cross_rank)
        else:
            self.cross = MixtureCross(width, config.cross_layers, config.cross_rank, config.cross_experts)
        self.over = mlp([width, *config.over_layers, 1], last_linear=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        logits: Tensor = self.over(self.cross(torch.cat([self.dense(dense), pooled.flatten(1)], 1)))
        return logits.squeeze(1)


class WideDeep(nn.Module):
    """Wide & Deep: a linear model over ids and dense features, plus a deep one over embeddings and dense features."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dense, 1, bias=False)  # the deep part's bias is the model's
        self.over = mlp([dense + columns * config.width, *config.over_layers, 1], last_linear=True)

    def forward(self, dense: Tensor, pooled: Tensor, wide: Tensor) -> Tensor:
        deep: Tensor = self.over(torch.cat([dense, pooled.flatten(1)], 1))
        linear: Tensor = self.linear(dense)
        return (deep + linear).squeeze(1) + wide.mean(2).sum(1)


class DeepFm(WideDeep):
    """DeepFM: Wide & Deep, plus a factorisation machine over the same embeddings."""

    def forward(self, dense: Tensor, pooled: Tensor, wide: Tensor) -> Tensor:
        logits: Tensor = super().forward(dense, pooled, wide)
        return logits + second_order(pooled)


class Dien(nn.Module):
    """DIEN: interests that evolve. A history is read with attention to the item in question, then a tower takes all
    vectors."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.interests = Interests(config.width)
        self.over = mlp([dense + (columns + 2) * config.width, *config.over_layers, 1], last_linear=True)

    def forward(self, dense: Tensor, pooled: Tensor, history: Tensor, lengths: Tensor, target: Tensor,
                *, negatives: Tensor | None = None) -> tuple[Tensor, Tensor]:
        interest, states = self.interests(history, lengths, target)
        logits = self.over(torch.cat([dense, pooled.flatten(1), target, interest], 1)).squeeze(1)
        if negatives is None:
            return logits, logits.new_zeros(())
        return logits, self.interests.auxiliary(states, history, negatives, lengths)
