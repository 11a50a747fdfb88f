"""Spreads the rows of a large table, so that its ids lie in another order than in the vocabulary: `spread_rows`.

Frequent ids come first. If a table is cut by rows, nearly all lookups go to the first rank. In a spread table,
neighbouring ids are far apart, so the lookups go to all ranks."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor, nn

from sluice.dlrm.options import Table

_MODULE_ATTRIBUTES = frozenset(vars(nn.ModuleDict()))


def table_name(column: str) -> str:
    """Returns the name of a column's table: the column's name, unless torch's modules have an attribute of this name,
    such as `type` or `items`."""
    return (
        f"{column}@ids"
        if hasattr(nn.ModuleDict, column) or column in _MODULE_ATTRIBUTES
        else column
    )


def table_of(column: Table, *, spread: bool) -> Table:
    """Returns the table of a column, with its name in the model and the use of its rows."""
    # The rows of a spread table are used evenly.
    return replace(column, name=table_name(column.name), use=() if spread else column.use)


def spread_rows(ids: Tensor, rows: int) -> Tensor:
    """Returns the row of each id in a spread table of so many rows."""
    # Two neighbouring ids are rows / golden ratio apart, so that any range of ids is spread evenly. A stride that is
    # coprime to rows gives each id its own row.
    near = max(1, round(rows * (math.sqrt(5) - 1) / 2))
    stride = next(n for n in range(near, 0, -1) if math.gcd(n, rows) == 1)
    # In two steps, because the product of an id and a stride of 32 bits each does not fit int64.
    high = (ids >> 16).long()
    places = ((high * stride % rows << 16) + (ids & 0xFFFF).long() * stride) % rows
    return places.to(ids.dtype)
