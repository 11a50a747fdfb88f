"""Makes the optimisers of the tables and of the dense layers. The backward pass updates most tables."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from sluice.dlrm.optim.copied_tables import EPS, CopiedTables
from sluice.dlrm.options import OptimConfig

_TABLES = {
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": EPS},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": EPS},
    "adam": {"optimizer": EmbOptimType.ADAM, "eps": EPS},
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
}
_DENSE = {
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def fused_optimiser(config: OptimConfig) -> dict[str, Any]:
    """Returns TorchRec's settings for tables whose rows the backward pass updates, without storing gradients.

    Row-wise Adagrad's state is one number a row: V += mean(g²), and the row moves by lr · g / (√V + eps)."""
    return {**_TABLES[config.table_optimiser], "learning_rate": config.lr}


def dense_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Returns every parameter of a sharded model that belongs to no table."""
    # The sharding plan lists all tables. Tables of other ranks are parameters of this rank too, without rows.
    tables = _kinds(model)
    return {name: p for name, p in model.named_parameters() if name not in tables}


def copied_tables(model: Any, config: OptimConfig) -> CopiedTables:
    """Makes the optimiser of the tables that every rank has a copy of. Call it after sharding."""
    kinds = _kinds(model)
    return CopiedTables(
        {name: p for name, p in model.named_parameters() if kinds.get(name) == "data_parallel"},
        config,
    )


def _kinds(model: Any) -> dict[str, str]:
    """Returns for each table's weight in a sharded model TorchRec's name of its sharding."""
    return {
        f"{path}.embedding_bags.{name}.weight": table.sharding_type
        for path, tables in model.plan.plan.items()
        for name, table in tables.items()
    }


def dense_optimiser(model: Any, config: OptimConfig) -> KeyedOptimizerWrapper:
    """Makes the dense layers' optimiser. Call it after sharding. Its state is keyed by the names of the parameters."""
    kind: Any = _DENSE[config.dense_optimiser]
    return KeyedOptimizerWrapper(
        dense_parameters(model),
        lambda params: kind(params, lr=config.dense_lr, weight_decay=config.dense_decay),
    )
