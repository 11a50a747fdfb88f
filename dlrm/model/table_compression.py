"""Compresses embedding tables, for each column: an id becomes a few codes, and each code is a row of an *ordinary*
table.

A compressed table is several EmbeddingBag tables, which are sharded, updated, saved and resumed as all others.
`Compressor` lists them, and turns a batch's ids into codes before the model. `CombineCodes` makes one vector of a
column's parts after the lookup. The kinds:

- `full`: not compressed.
- `spread`: not smaller, but neighbouring ids are far apart. If frequent ids come first and a table is cut by rows,
  nearly all lookups go to the first rank. With `spread`, they go to all ranks.
- `modulo`: id mod rows. `hash`: a hash of the id, mod rows. In both, several ids share a vector.
- `quotient`: id = q · rows + r. One table has the rows for q, another those for r. The two vectors are multiplied,
  added or concatenated. No two ids have the same pair. Multiplication needs one id a row. Bags need `add` or `concat`.
- `product`: `parts` tables of `rows` vectors. Each vector is a slice of the embedding, as the centroids of a product
  quantiser. Codes are not learned. The id's digits to the base `rows` (a prime) are the first number of a sequence, its
  first difference, and so on. Code k is the number at k. That is a polynomial. So two ids of t digits agree in at most
  t − 1 parts, and no two ids have the same vector.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sluice.dlrm.lookup_frequencies import spread_runs
from sluice.dlrm.options import ConfigError, Table
from sluice.ingest.knobs import nearest

KINDS = ("full", "spread", "modulo", "hash", "quotient", "product")
_SIZELESS = ("full", "spread")
COMBINES = ("multiply", "add", "concat")
_PRIME = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compression of one table."""

    kind: str = "full"
    rows: int = 0
    """The rows of the smaller table. For `quotient`: of the table of remainders. For `product`: of each part, the
    largest prime up to `rows`."""
    combine: str = "multiply"
    """How `quotient` joins its two vectors: `multiply`, `add` or `concat`."""
    parts: int = 4
    """The number of tables that `product` has."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"compression {self.kind!r}{nearest(self.kind, KINDS)}")
        if self.combine not in COMBINES:
            raise ConfigError(
                f"compression: combine {self.combine!r}{nearest(self.combine, COMBINES)}"
            )
        if self.kind in _SIZELESS:
            return
        for name, least in (("rows", 2), ("parts", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"compression {self.kind}: {name} is {value!r}, not a whole number from {least} on"
                )
        if self.kind == "product":
            object.__setattr__(self, "rows", _prime_up_to(self.rows))

    @classmethod
    def read(cls, text: str) -> Compression:
        """Reads `full`, `spread`, `modulo:ROWS`, `hash:ROWS`, `quotient:ROWS[:add|concat]` or
        `product:ROWS[:PARTS]`."""
        kind, *rest = text.split(":")
        try:
            values: dict[str, Any] = {"kind": kind}
            if rest:
                values["rows"] = int(rest[0])
            if len(rest) == 2:
                values |= {"parts": int(rest[1])} if kind == "product" else {"combine": rest[1]}
            if (
                len(rest) > 2
                or (len(rest) == 2 and kind not in ("quotient", "product"))
                or bool(rest) == (kind in _SIZELESS)
            ):
                raise ValueError(kind)
        except ValueError:
            raise ConfigError(
                f"compression {text!r}: write full, spread, modulo:ROWS, hash:ROWS, "
                "quotient:ROWS[:add|concat] or product:ROWS[:PARTS]"
            ) from None
        return cls(**values)


_MODULE_ATTRIBUTES = frozenset(vars(nn.ModuleDict()))


def largest_within(
    kind: str, table: Table, budget: int, *, combine: str = "multiply", parts: int = 4
) -> Compression:
    """Returns the largest compression of a kind whose float32 weights take at most `budget` bytes."""
    rows = budget // (4 * table.width)
    if kind == "quotient":
        # Remainders r and quotients ⌈n / r⌉ share the rows. If concatenated, each is half as wide.
        room = rows * 2 if combine == "concat" else rows
        rows = max(
            (r for r in range(2, min(room, table.rows) + 1) if r + -(-table.rows // r) <= room),
            default=0,
        )
    if rows < 2:
        raise ConfigError(
            f"table {table.name!r}: no {kind} compression of {table.rows} rows × {table.width} takes "
            f"{budget} bytes or less"
        )
    return Compression(kind=kind, rows=min(rows, table.rows), combine=combine, parts=parts)


def _prime_up_to(limit: int) -> int:
    return next(n for n in range(limit, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))


def table_name(column: str) -> str:
    """Returns the name of a column's table: the column's name, unless torch's modules have an attribute of this name,
    such as `type` or `items`."""
    return (
        f"{column}@ids"
        if hasattr(nn.ModuleDict, column) or column in _MODULE_ATTRIBUTES
        else column
    )


def part_tables(table: Table, compression: Compression) -> tuple[Table, ...]:
    """Returns the ordinary tables into which one table is compressed."""
    column = table
    table = replace(table, name=table_name(table.name))
    if compression.kind == "full":
        return (table,)
    if compression.kind == "spread":
        return (replace(table, use=spread_runs(table.top, table.rows, _stride(table.rows))),)
    table = replace(table, use=(), top=())  # codes are used evenly
    if compression.rows > table.rows:
        raise ConfigError(
            f"table {table.name!r}: {compression.rows} rows to stand for {table.rows} are no compression"
        )
    if compression.kind in ("modulo", "hash"):
        return (replace(table, rows=compression.rows),)
    sizes: tuple[int, ...]
    if compression.kind == "quotient":
        if compression.combine == "multiply" and table.lookups > 1:
            raise ConfigError(
                f"table {table.name!r}: a product is of one id, and a row has {table.lookups:g} on "
                "average; write quotient:ROWS:add or quotient:ROWS:concat"
            )
        pieces = 2 if compression.combine == "concat" else 1
        sizes = -(-table.rows // compression.rows), compression.rows
    else:
        pieces = compression.parts
        sizes = (compression.rows,) * pieces
        digits = _digits(table.rows, compression.rows)
        if compression.parts < digits or compression.parts > compression.rows:
            raise ConfigError(
                f"table {table.name!r}: {table.rows} ids need {digits} parts of {compression.rows} rows "
                f"or more to differ (and at most {compression.rows} parts), not {compression.parts}"
            )
    if table.width % pieces or (table.width // pieces) % 4:
        raise ConfigError(
            f"table {table.name!r}: width {table.width} cannot be cut into {pieces} parts whose widths "
            "are multiples of 4, which the fused kernels need"
        )
    names = ("q", "r") if compression.kind == "quotient" else range(compression.parts)
    return tuple(
        replace(table, name=f"{column.name}@{n}", rows=rows, width=table.width // pieces)
        for n, rows in zip(names, sizes, strict=True)
    )


def _digits(count: int, base: int) -> int:
    """Returns how many digits the ids below `count` have."""
    digits = 1
    while base**digits < count:
        digits += 1
    return digits


def codes(ids: Tensor, table: Table, compression: Compression) -> tuple[Tensor, ...]:
    """Returns the row of each id, for each part of the table."""
    if compression.kind == "full":
        return (ids,)
    if compression.kind == "spread":
        # In two steps, because the product of an id and a stride of 32 bits each does not fit int64.
        high = (ids >> 16).long()
        stride = _stride(table.rows)
        return (
            (((high * stride % table.rows << 16) + (ids & 0xFFFF).long() * stride) % table.rows).to(
                ids.dtype
            ),
        )
    if compression.kind == "modulo":
        return (ids % compression.rows,)
    if compression.kind == "hash":
        factor, shift = _mix(table.name)
        return (((ids.long() * factor + shift) % _PRIME % compression.rows).to(ids.dtype),)
    if compression.kind == "quotient":
        return ids // compression.rows, ids % compression.rows
    left = ids
    digits = []
    for _ in range(_digits(table.rows, compression.rows)):
        digits.append(left % compression.rows)
        left = left // compression.rows
    found = [digits[0]]
    for _ in range(compression.parts - 1):
        for i in range(len(digits) - 1):
            digits[i] = (digits[i] + digits[i + 1]) % compression.rows
        found.append(digits[0])
    return tuple(found)


def _stride(rows: int) -> int:
    """Returns the distance between two neighbouring ids: near rows / golden ratio, so that any range of ids is spread
    evenly, and coprime to rows, so that each id has its own row."""
    near = max(1, round(rows * (math.sqrt(5) - 1) / 2))
    return next(n for n in range(near, 0, -1) if math.gcd(n, rows) == 1)


def _mix(name: str) -> tuple[int, int]:
    """Returns two numbers from a column's name. They are the same in each run. Two columns have different
    collisions."""
    digest = hashlib.sha256(name.encode()).digest()
    return (
        1 + int.from_bytes(digest[:8], "little") % (_PRIME - 1),
        int.from_bytes(digest[8:16], "little") % _PRIME,
    )


class Compressor:
    """Lists the ordinary tables of all columns, and turns a batch's ids into rows of these tables."""

    def __init__(self, tables: Sequence[Table], choices: Mapping[str, Compression]) -> None:
        names = [t.name for t in tables]
        for name in choices:
            if name not in names:
                raise ConfigError(f"compression: no column {name!r}{nearest(name, names)}")
        self.columns = tuple(tables)
        self.choices = tuple(choices.get(t.name, Compression()) for t in tables)
        self.parts = tuple(
            part_tables(t, choice) for t, choice in zip(self.columns, self.choices, strict=True)
        )
        self.tables = tuple(part for parts in self.parts for part in parts)
        """The tables of the model's EmbeddingBagCollection, in the order of `expand`'s keys."""
        if len({t.name for t in self.tables}) < len(self.tables):
            raise ConfigError(
                "compression: two tables have one name; rename the columns that have an @ in theirs"
            )

    @property
    def starts(self) -> dict[str, tuple[float, float]]:
        """The range of each table's first weights. A vector starts as small as in the full table, ±1 / √rows."""
        found: dict[str, tuple[float, float]] = {}
        for column, choice, parts in zip(self.columns, self.choices, self.parts, strict=True):
            bound = 1 / math.sqrt(column.rows)
            found |= dict.fromkeys((p.name for p in parts), (-bound, bound))
            if choice.kind == "quotient" and choice.combine == "multiply":
                # The second factor is near 1, because the product of two small factors would be almost 0.
                found[parts[1].name] = (0.5, 1.5)
        return found

    def expand(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Turns a batch's bags of columns into bags of tables. Ids must be within their columns' rows."""
        per_column = lengths.view(len(self.columns), -1)
        ends = per_column.sum(1, dtype=torch.int64).tolist()
        bags = torch.split(values, ends)
        bag_weights = torch.split(weights, ends) if weights is not None else [None] * len(bags)
        new_values: list[Tensor] = []
        new_lengths: list[Tensor] = []
        new_weights: list[Tensor] = []
        for column, choice, ids, counts, weight in zip(
            self.columns, self.choices, bags, per_column, bag_weights, strict=True
        ):
            product = choice.kind == "quotient" and choice.combine == "multiply"
            if product and len(counts) and int(counts.max()) > 1:
                raise ConfigError(
                    f"column {column.name!r}: a row has {int(counts.max())} ids, and a product is of "
                    "one; write quotient:ROWS:add or quotient:ROWS:concat"
                )
            for i, rows in enumerate(codes(ids, column, choice)):
                new_values.append(rows)
                new_lengths.append(counts)
                if weight is not None:  # of two factors, only one is weighted
                    new_weights.append(torch.ones_like(weight) if product and i else weight)
        return (
            torch.cat(new_values),
            torch.cat(new_lengths),
            torch.cat(new_weights) if weights is not None else None,
        )


class CombineCodes(nn.Module):
    """Makes one vector of each column's pooled parts after the lookup: [B, F, W], columns in order."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        widths = {t.width for t in compressor.columns}
        if len(widths) != 1:
            raise ConfigError(
                f"columns of widths {sorted(widths)} cannot be stacked; one width for all is needed"
            )
        self._columns = [
            ([p.name for p in parts], choice.combine if choice.kind == "quotient" else "concat")
            for parts, choice in zip(compressor.parts, compressor.choices, strict=True)
        ]

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        """`pooled` has a tensor [B, width] for each table."""
        found = []
        for names, combine in self._columns:
            parts = [pooled[name] for name in names]
            if len(parts) == 1:
                found.append(parts[0])
            elif combine == "multiply":
                found.append(parts[0] * parts[1])
            elif combine == "add":
                found.append(parts[0] + parts[1])
            else:
                found.append(torch.cat(parts, 1))
        return torch.stack(found, 1)
