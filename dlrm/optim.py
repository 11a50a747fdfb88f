"""Two optimisers: row-wise Adagrad inside the backward pass for tables, one of its own for the dense layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm.config import OptimConfig


def fuse_tables(tables: nn.Module, config: OptimConfig) -> None:
    """Before sharding: from then on a backward pass updates the rows it saw and keeps no gradient of a table.

    The state is one number a row: V += mean(g²), and the row moves by lr · g / (√V + eps)."""
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": config.lr, "eps": 1e-8})


def dense_optimiser(model: Any, config: OptimConfig) -> KeyedOptimizerWrapper:
    """After sharding: over every parameter that is not a table's. Its state is keyed by the parameters' names."""
    # By the plan, not by what is fused here: tables of other ranks are parameters of this rank, too, of no rows.
    tables = {f"{path}.embedding_bags.{name}.weight" for path, tables in model.plan.plan.items() for name in tables}
    own = {name: p for name, p in model.named_parameters() if name not in tables}
    kind: Any = torch.optim.Adagrad if config.dense_optimiser == "adagrad" else torch.optim.Adam
    return KeyedOptimizerWrapper(own, lambda params: kind(params, lr=config.dense_lr))
