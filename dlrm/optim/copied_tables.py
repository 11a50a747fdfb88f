"""Trains the tables that every rank has a copy of: `CopiedTables`. TorchRec leaves this to its caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from sluice.dlrm.options import OptimConfig

EPS = 1e-8
"""Added to the root of each state, as in the fused kernels."""


class CopiedTables(KeyedOptimizer):  # type: ignore[misc]
    """Makes the same updates as the fused kernels, from the mean gradient that DDP gives each copy. A row that no rank
    looked up has a gradient of 0 and does not change. The states have the names of fused ones, so that a checkpoint
    fits every kind of sharding."""

    def __init__(self, tables: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        """`tables` maps a weight's name in the model, `….NAME.weight`, to the weight."""
        self._by_row = config.table_optimiser == "rowwise_adagrad"
        state: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for path, weight in tables.items():
            shape = weight.shape[:1] if self._by_row else weight.shape
            name = path.split(".")[-2]
            state[weight] = (
                {}
                if config.table_optimiser == "sgd"
                else {f"{name}.momentum1": torch.zeros(shape, device=weight.device)}
            )
        super().__init__(tables, state, [{"params": list(tables.values()), "lr": config.lr}])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates the tables and clears their gradients. Call it after each backward pass."""
        rate = self.param_groups[0]["lr"]
        for weight, states in self.state.items():
            step = weight.grad
            for seen in states.values():
                squares = step.square()
                seen.add_(squares.mean(1) if self._by_row else squares)
                size = seen.sqrt() + EPS
                step = step / (size.unsqueeze(1) if self._by_row else size)
            weight.sub_(rate * step)
        for weight in self.state:  # tables of one kernel share one gradient
            weight.grad = None
