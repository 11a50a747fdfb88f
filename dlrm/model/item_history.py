"""Prepares a column of bags that a model reads as a history of items: the items by position. Also finds whether the
history and the target can share a table."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sluice.dlrm.options import ConfigError, ModelConfig
from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.table.table import FeatureTable


def _id_meaning(column: ColumnSpec) -> object:
    """Returns what defines a column's ids: a joint vocabulary and the later operators, or all operators if none
    learns."""
    if not column.fitted:
        return column.ops
    key, _, number = column.fitted[0]
    return key, column.ops[number:]


def with_item_table(model: ModelConfig, table: FeatureTable) -> ModelConfig:
    """Returns the model settings with the history's table chosen. Raises ConfigError if the history cannot share the
    target's table, and the user asked for that."""
    if not (model.history and model.target) or model.history_table == "own":
        return model
    # Whether both columns give the same value the same id, by the table's spec. None: the table has no spec.
    same: bool | None = None
    if model.events:
        same = model.target in model.events.columns
    elif table.record.spec:
        both = (model.history, model.target)
        meanings = [_id_meaning(column) for column in table.spec().columns if column.name in both]
        transformed = any(f.transforms for f in table.fields if f.name in both)
        same = not transformed and len(meanings) == 2 and meanings[0] == meanings[1]
    if model.history_table == "auto":
        return replace(model, history_table="target" if same else "own")
    if same is False:
        raise ConfigError(
            f"history table: the ids of {model.history!r} do not mean what those of {model.target!r} "
            'mean; give both a categorify with the same joint = "…" in the spec, or write '
            "--history-table own"
        )
    return model


def items_by_position(ids: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Returns the ids of bags by position, and whether there is one: [positions, B] each. A missing id is 0."""
    first = lengths.cumsum(0) - lengths
    position = torch.arange(longest).unsqueeze(1)
    exists = position < lengths
    at = (first + position).clamp(max=max(0, len(ids) - 1))
    return (ids[at] if len(ids) else torch.zeros_like(at, dtype=ids.dtype)) * exists, exists
