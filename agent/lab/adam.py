"""Adam's update, written out here because torch's own imports its compiler: `Adam`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Adam:
    """Moves weights against their gradients."""

    def __init__(self, weights: list[Any], rate: float) -> None:
        self.weights = weights
        self.rate = rate
        self.count = 0
        self.means, self.squares = ([w.detach() * 0 for w in weights] for _ in range(2))

    def step(self, gradients: Iterable[Any]) -> None:
        self.count += 1
        for weight, gradient, mean, square in zip(
            self.weights, gradients, self.means, self.squares, strict=True
        ):
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient * gradient, 0.001)
            rate = self.rate * (1 - 0.999**self.count) ** 0.5 / (1 - 0.9**self.count)
            weight.sub_(rate * mean / (square.sqrt() + 1e-8))
