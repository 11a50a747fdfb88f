"""Implements LAMB, for large batches: Adam's direction, with each layer's step in proportion to its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sluice.dlrm.options import ConfigError


class Lamb(Optimizer):
    """r = m̂ / (√v̂ + eps) + decay · w;  w ← w − lr · ‖w‖ / ‖r‖ · r. Where either length is 0, the ratio is 1."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value, is_valid in (
            ("lr", lr, lr > 0),
            ("eps", eps, eps > 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("betas", betas, all(0 <= b < 1 for b in betas)),
        ):
            if not is_valid:
                raise ConfigError(f"LAMB: {name} of {value!r} is out of range")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            # Also the step is a tensor, so that a checkpoint loads it in place.
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        state["step"] += 1
        first, second = group["betas"]
        count = float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - first) / (1 - first**count)
        square = state["exp_avg_sq"].lerp_(gradient * gradient, 1 - second) / (1 - second**count)
        direction = mean / (square.sqrt() + group["eps"])
        if group["weight_decay"]:
            direction += group["weight_decay"] * p
        size, length = p.norm(), direction.norm()
        ratio = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
        p -= group["lr"] * ratio * direction
