"""Compresses embedding tables, for each column: an id becomes a row of a smaller, *ordinary* table.

Compressed tables are sharded, updated, saved and resumed as all others. `Compressor` lists them, and turns a batch's
ids into their rows before the model. The kinds:

- `full`: not compressed.
- `spread`: not smaller, but neighbouring ids are far apart. If frequent ids come first and a table is cut by rows,
  nearly all lookups go to the first rank. With `spread`, they go to all ranks.
- `modulo`: id mod rows. Several ids share a vector. Published forms that give each id vectors of its own were no better
  at the same size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sluice.dlrm.lookup_frequencies import spread_runs
from sluice.dlrm.options import ConfigError, Table
from sluice.ingest.knobs import nearest

KINDS = ("full", "spread", "modulo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compression of one table."""

    kind: str = "full"
    rows: int = 0
    """The rows of the smaller table."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"compression {self.kind!r}{nearest(self.kind, KINDS)}")
        if self.kind == "modulo" and self.rows < 2:
            raise ConfigError(
                f"compression modulo: rows is {self.rows!r}, not a whole number from 2 on"
            )

    @classmethod
    def read(cls, text: str) -> Compression:
        """Reads `full`, `spread` or `modulo:ROWS`."""
        kind, colon, rows = text.partition(":")
        if kind in KINDS and (bool(colon) != (kind == "modulo") or bool(colon) != rows.isdecimal()):
            raise ConfigError(f"compression {text!r}: write full, spread or modulo:ROWS")
        return cls(kind=kind, rows=int(rows) if kind == "modulo" else 0)


_MODULE_ATTRIBUTES = frozenset(vars(nn.ModuleDict()))


def table_name(column: str) -> str:
    """Returns the name of a column's table: the column's name, unless torch's modules have an attribute of this name,
    such as `type` or `items`."""
    return (
        f"{column}@ids"
        if hasattr(nn.ModuleDict, column) or column in _MODULE_ATTRIBUTES
        else column
    )


def compressed(table: Table, compression: Compression) -> Table:
    """Returns the ordinary table into which a column's table is compressed."""
    named = replace(table, name=table_name(table.name))
    if compression.kind == "full":
        return named
    if compression.kind == "spread":
        return replace(named, use=spread_runs(table.top, table.rows, _stride(table.rows)))
    if compression.rows > table.rows:
        raise ConfigError(
            f"table {table.name!r}: {compression.rows} rows to stand for {table.rows} are no compression"
        )
    # Rows are used evenly.
    return replace(named, rows=compression.rows, use=(), top=())


def rows_of(ids: Tensor, table: Table, compression: Compression) -> Tensor:
    """Returns the row of each id in the compressed table."""
    if compression.kind == "full":
        return ids
    if compression.kind == "modulo":
        return ids % compression.rows
    # In two steps, because the product of an id and a stride of 32 bits each does not fit int64.
    stride, high = _stride(table.rows), (ids >> 16).long()
    found = ((high * stride % table.rows << 16) + (ids & 0xFFFF).long() * stride) % table.rows
    return found.to(ids.dtype)


def _stride(rows: int) -> int:
    """Returns the distance between two neighbouring ids: near rows / golden ratio, so that any range of ids is spread
    evenly, and coprime to rows, so that each id has its own row."""
    near = max(1, round(rows * (math.sqrt(5) - 1) / 2))
    return next(n for n in range(near, 0, -1) if math.gcd(n, rows) == 1)


class Compressor:
    """Lists the ordinary tables of all columns, and turns a batch's ids into rows of these tables."""

    def __init__(self, tables: Sequence[Table], choices: Mapping[str, Compression]) -> None:
        names = [t.name for t in tables]
        for name in choices:
            if name not in names:
                raise ConfigError(f"compression: no column {name!r}{nearest(name, names)}")
        self.columns = tuple(tables)
        self.choices = tuple(choices.get(t.name, Compression()) for t in tables)
        self.tables = tuple(map(compressed, self.columns, self.choices))
        """The tables of the model's EmbeddingBagCollection, one for each column."""
        if len({t.name for t in self.tables}) < len(self.tables):
            raise ConfigError(
                "compression: two tables have one name; rename the columns that have an @ in theirs"
            )

    @property
    def starts(self) -> dict[str, float]:
        """The largest first weight of each table: as small as in the full table, 1 / √rows."""
        return {
            table.name: 1 / math.sqrt(column.rows)
            for table, column in zip(self.tables, self.columns, strict=True)
        }

    def rows(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Turns a batch's ids into rows of the tables. Ids must be within their columns' rows."""
        ends = lengths.view(len(self.columns), -1).sum(1, dtype=torch.int64).tolist()
        bags = torch.split(values, ends)
        return torch.cat(list(map(rows_of, bags, self.columns, self.choices)))
