"""How many parameters a model's dense side has, and how many operations a sample costs forwards. Needs no torch.

An operation is a multiplication or an addition of a matrix product: two for each weight that a sample meets. Biases,
activations, and sums over single elements are left out, as published tables do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlrm.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Count:
    """Of one layer, or of many: counts add."""

    parameters: int = 0
    flops: int = 0
    """For one sample, forwards. Backwards costs about twice as many again."""

    def __add__(self, other: Count) -> Count:
        return Count(self.parameters + other.parameters, self.flops + other.flops)


def linear(before: int, after: int, *, bias: bool = True) -> Count:
    return Count(before * after + bias * after, 2 * before * after)


def mlp(sizes: Sequence[int]) -> Count:
    return sum((linear(a, b) for a, b in pairwise(sizes)), Count())


def dots(vectors: int, width: int) -> Count:
    """All pairs, each once; the fused product does both triangles."""
    return Count(0, 2 * comb(vectors, 2) * width)


def cross(width: int, layers: int, rank: int = 0, experts: int = 1) -> Count:
    """DCN-v2's layers: full, low-rank, or a mixture with gates that the layers share."""
    if not rank:
        one = linear(width, width)
    elif experts == 1:
        one = linear(width, rank, bias=False) + linear(rank, width)
    else:
        each = 2 * width * rank + rank * rank
        gates = width * experts
        return Count(layers * (experts * each + width) + gates, 2 * layers * (experts * each + gates))
    return Count(layers * one.parameters, layers * one.flops)


def second_order(columns: int, width: int) -> Count:
    """A factorisation machine in its linear form."""
    return Count(0, 4 * columns * width)


def interests(width: int, steps: int) -> Count:
    """DIEN's two GRUs and its attention, over a history of so many items."""
    gru = Count(6 * width * width + 6 * width, 12 * width * width * steps)
    return gru + gru + Count(width * width, 2 * width * width + 2 * width * steps)


def count(config: ModelConfig, *, dense: int, columns: int, history: int = 0) -> dict[str, Count]:
    """Part → its count, for a tower as `dlrm.towers.build` makes it; `total` last. Embedding tables are not in it."""
    width, over = config.width, [*config.over_layers, 1]
    everything = dense + columns * width
    bottom = mlp([dense, *config.dense_layers, width])
    parts: dict[str, Count]
    if config.kind == "dlrm":
        parts = {"dense": bottom, "interaction": dots(columns + 1, width),
                 "over": mlp([width + comb(columns + 1, 2), *over])}
    elif config.kind == "dcn":
        wide = width * (columns + 1)
        parts = {"dense": bottom, "interaction": cross(wide, config.cross_layers, config.cross_rank,
                                                       config.cross_experts), "over": mlp([wide, *over])}
    elif config.kind == "dien":
        parts = {"interaction": interests(width, history), "over": mlp([everything + 2 * width, *over])}
    else:
        parts = {"wide": linear(dense, 1, bias=False), "over": mlp([everything, *over])}
        if config.kind == "deepfm":
            parts["interaction"] = second_order(columns, width)
    return {**parts, "total": sum(parts.values(), Count())}
