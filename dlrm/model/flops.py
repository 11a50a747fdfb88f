"""Counts the parameters of layers, and the operations of a forward pass for one sample. Needs no torch.

An operation is a multiplication or an addition of a matrix product: two for each weight that a sample uses. Biases,
activations, and sums over single elements do not count, as in published tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The counts of one layer, or the sum over several."""

    parameters: int = 0
    flops: int = 0
    """Operations for one sample in the forward pass. The backward pass takes about twice as many."""

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(self.parameters + other.parameters, self.flops + other.flops)


LayerCosts = dict[str, LayerCost]


def linear(before: int, after: int, *, bias: bool = True) -> LayerCost:
    return LayerCost(before * after + bias * after, 2 * before * after)


def mlp(sizes: Sequence[int]) -> LayerCost:
    return sum((linear(a, b) for a, b in pairwise(sizes)), LayerCost())


def dots(vectors: int, width: int) -> LayerCost:
    """Counts the dot products of all pairs, each once, although the fused product computes both triangles."""
    return LayerCost(0, 2 * comb(vectors, 2) * width)


def cross(width: int, layers: int, rank: int = 0, experts: int = 1) -> LayerCost:
    """Counts DCN-v2's layers: full, low-rank, or a mixture of experts with shared gates."""
    if not rank:
        one = linear(width, width)
    elif experts == 1:
        one = linear(width, rank, bias=False) + linear(rank, width)
    else:
        each = 2 * width * rank + rank * rank
        gates = width * experts
        return LayerCost(
            layers * (experts * each + width) + gates, 2 * layers * (experts * each + gates)
        )
    return LayerCost(layers * one.parameters, layers * one.flops)
