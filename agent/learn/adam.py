"""Adam's update, written out here because torch's own imports its compiler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Adam:
    def __init__(self, weights: list[Any], rate: float) -> None:
        self.weights, self._rate, self._count = weights, rate, 0
        self._mean, self._square = ([w.detach() * 0 for w in weights] for _ in range(2))

    def step(self, gradients: Iterable[Any], slower: float = 1.0) -> None:
        """Makes one step; `slower` is the share of the rate at which it is made."""
        self._count += 1
        for weight, gradient, mean, square in zip(self.weights, gradients, self._mean, self._square, strict=True):
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient * gradient, 0.001)
            rate = slower * self._rate * (1 - 0.999 ** self._count) ** 0.5 / (1 - 0.9 ** self._count)
            weight.sub_(rate * mean / (square.sqrt() + 1e-8))
