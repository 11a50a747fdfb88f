"""Defines the layers between embeddings and a logit. Pooled embeddings have the shape [B, F, W].

All layers are plain torch, and torch.fx can trace them. `attention_gru` is one node of such a trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Labels = tuple[Sequence[Hashable] | None, ...]
"""For each dimension of a parameter, the feature that each index belongs to. None: a dimension without features."""
NamedLabels = Mapping[str, Labels]
Names = Sequence[str]


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Makes linear layers from sizes[0] to sizes[-1] with a ReLU after each."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


class Dots(nn.Module):
    """The dot product of each pair of n vectors: [B, n, W] → [B, n (n − 1) / 2], pairs (0, 1), (0, 2), … (1, 2), …"""

    pairs: Tensor

    def __init__(self, vectors: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        # Indices into the flattened products: one gather costs half as much as indexing with two lists.
        self.register_buffer("pairs", first * vectors + second, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.flatten(1).index_select(1, self.pairs)


class CrossLayers(nn.Module):
    """DCN-v2: x ← x₀ ⊙ (W x + b) + x. With a rank, W is the product of two narrow matrices, `up` and `down`."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        if rank:
            self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
            self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        else:
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_normal_(parameter)

    def forward(self, start: Tensor) -> Tensor:
        x = start
        for layers in zip(*self.children(), strict=True):
            product = x
            for layer in layers:
                product = layer(product)
            x = start * product + x
        return x

    @staticmethod
    def labels(wide: Sequence[Hashable], layers: int, rank: int) -> dict[str, Labels]:
        """Parameter → which feature each place belongs to, for vectors that `wide` names place by place."""
        of_layer: dict[str, Labels] = (
            {"down.{}.weight": (None, wide), "up.{}.weight": (wide, None), "up.{}.bias": (wide,)}
            if rank
            else {"layers.{}.weight": (wide, wide), "layers.{}.bias": (wide,)}
        )
        return {name.format(n): owners for n in range(layers) for name, owners in of_layer.items()}


def second_order(vectors: Tensor) -> Tensor:
    """Returns a factorisation machine's Σ_{i<j} ⟨vᵢ, vⱼ⟩: [B, F, W] → [B], in F · W steps instead of F² · W."""
    return ((vectors.sum(1) ** 2).sum(1) - (vectors**2).sum((1, 2))) / 2


class InterestEvolution(nn.Module):
    """Turns a history into one vector, as in DIEN: a GRU, attention of its states to the target, and a second GRU whose
    update gate is scaled by the attention. [B, T, W], [B], [B, W] → [B, W]. An empty history gives zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.extract = nn.GRU(width, width, batch_first=True)
        self.match = nn.Linear(width, width, bias=False)
        self.enter = nn.Linear(width, 3 * width)
        self.keep = nn.Linear(width, 3 * width)

    def forward(self, history: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        # One more step, with no attention, so that a batch of empty histories is not a special case.
        states, _ = self.extract(nn.functional.pad(history, (0, 0, 0, 1)))
        weights = attention(states, self.match(target), lengths)
        return attention_gru(self.enter(states), weights, self.keep.weight, self.keep.bias)


def attention(states: Tensor, query: Tensor, lengths: Tensor) -> Tensor:
    """Returns the softmax of ⟨state, query⟩ over a history's real steps: [B, T]. An empty history gets zeros."""
    real = torch.ones_like(states[..., 0]).cumsum(1) <= lengths.unsqueeze(1)
    scores = torch.einsum("btw,bw->bt", states, query)
    # A large finite number, because minus infinity would make the weights of an empty history and all gradients NaN.
    return scores.masked_fill(~real, torch.finfo(torch.float32).min / 2).softmax(1) * real


@torch.fx.wrap
def attention_gru(entered: Tensor, weights: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Returns the last state of h ← (1 − a u) h + a u n. `entered` is the input's part of the three gates, [B, T, 3W].

    A step of weight 0 does not change the state, so padding needs no mask."""
    state = entered.new_zeros(entered.shape[0], entered.shape[2] // 3)
    for step in range(entered.shape[1]):
        reset, update, new = entered[:, step].chunk(3, 1)
        kept_reset, kept_update, kept_new = nn.functional.linear(state, kernel, bias).chunk(3, 1)
        change = weights[:, step, None] * torch.sigmoid(update + kept_update)
        candidate = torch.tanh(new + torch.sigmoid(reset + kept_reset) * kept_new)
        state = state + change * (candidate - state)
    return state
