"""A column of bags that is read as a history: whether its ids are the target's, its items place by place, and for each
of them one that did not come."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sluice.dlrm.options import ConfigError, ModelConfig

if TYPE_CHECKING:
    from sluice.etl.spec.columns import ColumnSpec
    from sluice.etl.table.table import FeatureTable

_FACTORS = (
    0x1E3779B97F4A7C15,
    0x3F58476D1CE4E5B9,
    0x14D049BB133111EB,
)  # large odd numbers, below 2⁶³


def same_ids(table: FeatureTable, one: str, other: str) -> bool | None:
    """Whether two columns give the same value the same id, by the table's spec; None for a table without one."""
    if not table.record.spec:
        return None
    if any(f.transforms for f in table.fields if f.name in (one, other)):
        return False
    columns = {column.name: column for column in table.spec().columns}
    return (
        one in columns and other in columns and _meaning(columns[one]) == _meaning(columns[other])
    )


def _meaning(column: ColumnSpec) -> object:
    """What a column's ids mean: a joint vocabulary and what follows it; or all operators, if they learn nothing."""
    if not column.fitted:
        return column.ops
    key, _, number = column.fitted[0]
    return key, column.ops[number:]


def with_item_table(model: ModelConfig, table: FeatureTable) -> ModelConfig:
    """The model with its items' table chosen, if it reads a history; ConfigError if one was asked for that cannot
    be."""
    if not (model.history and model.target) or model.history_table == "own":
        return model
    same = same_ids(table, model.history, model.target)
    if model.history_table == "auto":
        return replace(model, history_table="target" if same else "own")
    if same is False:
        raise ConfigError(
            f"history table: the ids of {model.history!r} do not mean what those of {model.target!r} "
            'mean; give both a categorify with the same joint = "…" in the spec, or write '
            "--history-table own"
        )
    return model


def places_of(ids: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The ids of bags place by place, and where there are any: [places, B] each, an id being 0 where there is none."""
    first = lengths.cumsum(0) - lengths
    place = torch.arange(longest).unsqueeze(1)
    there = place < lengths
    at = (first + place).clamp(max=max(0, len(ids) - 1))
    return (ids[at] if len(ids) else torch.zeros_like(at, dtype=ids.dtype)) * there, there


def others(places: Tensor, rows: int) -> Tensor:
    """For each item but a history's first an item that is another, each of a table's rows as likely: [places − 1, B].

    They are a function of the row's whole history, so that they depend neither on the number of ranks nor on what else
    is in a batch."""
    factors = torch.full((len(places), 1), _FACTORS[0]).cumprod(
        0
    )  # its powers, as far as 64 bits hold them
    mixed = ((places.long() + 1) * factors).sum(0) + factors[1:]
    for factor in _FACTORS[1:]:
        mixed = (mixed ^ (mixed >> 29 & 0x7FFFFFFFF)) * factor
    drawn = (mixed >> 17 & 0x3FFFFFFFFFFF) % rows
    return torch.where(drawn == places[1:], (drawn + 1) % rows, drawn).to(places.dtype)
