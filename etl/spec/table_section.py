"""The [table] section of a spec: `TableSpec`, how rows are placed in splits and files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from sluice.etl.ops.base import POSITIVE, Limit
from sluice.etl.spec.toml_keys import (
    ONE_VALUE,
    Column,
    Columns,
    InputColumn,
    NumberColumn,
    SpecError,
    read_into,
    read_value,
)

DEFAULT_SPLIT = {"train": 0.8, "validation": 0.1, "test": 0.1}
SHARE = Limit(lambda share: 0 < share <= 1, "must be a share above 0, at most 1")
_SPLIT_NAME = Limit(re.compile("[A-Za-z0-9_-]+").fullmatch, "must be letters, digits, - and _")
_EXCLUSIVE = (
    ("split_by", "split_column"),
    ("split_by", "split_time"),
    ("split_column", "split_time"),
    ("together", "order"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """How rows are placed in splits and files."""

    seed: int = 0
    key: Columns = ()
    """Input columns that identify a row. Default: all input columns of the table's first version."""
    row_group_rows: Annotated[int, POSITIVE] = 32_768
    file_rows: Annotated[int, POSITIVE] = 524_288
    split: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_SPLIT))
    """Each split's share of the rows. The hash of a row decides its split."""
    split_by: Annotated[tuple[str, ...], InputColumn(ONE_VALUE)] = ()
    """Columns whose hash decides the split instead. Rows that agree in them stay in one split."""
    split_column: Column | None = None
    """A text column that holds the split's name instead."""
    split_time: NumberColumn | None = None
    """A number column that decides instead: each split begins at its bound in `split_from`."""
    split_from: tuple[float, ...] = ()
    unlabelled: Annotated[str, _SPLIT_NAME] | None = None
    """The last split, for all rows without a label. Without it these rows are rejected."""
    order: NumberColumn | None = None
    """A number column by which rows are sorted, over files and within them, instead of by hash."""
    then: NumberColumn | None = None
    """A number column by which rows with one value of `order` are sorted."""
    order_step: Annotated[float, POSITIVE] = 3600.0
    """Files are cut at multiples of this step of `order`."""
    together: Column | None = None
    """A column by which rows are grouped: rows with equal values are next to each other."""
    plain_lists: bool = False
    """Whether bags are stored as Parquet lists, for readers other than Sluice's, instead of packed bytes."""

    layout: Literal["speed", "size"] | None = None
    """How numbers are stored: `speed`, so that loaders read them fastest, or `size`, compressed. None: as the files
    that the table has, and `speed` in a new table."""

    @property
    def training(self) -> str:
        """The training split: `train`, or the first split if none has that name."""
        return "train" if "train" in self.split else next(iter(self.split))


def read_table(
    raw: dict[str, Any], kinds: Mapping[str, str], inputs: Mapping[str, str]
) -> TableSpec:
    for first, second in _EXCLUSIVE:
        if first in raw and second in raw:
            raise SpecError(f"table.{second}: cannot be combined with {first}")
    if "then" in raw and "order" not in raw:
        raise SpecError("table.then: sorts rows within one value of order; give order as well")
    split, bounds = _read_splits(raw)
    table = read_into(TableSpec, raw, "table", kinds, split=split, split_from=bounds)
    for name in table.key:
        if name not in inputs or table.key.count(name) > 1:
            raise SpecError(f"table.key = {name!r}: must be a column of input.columns, named once")
    if (rest := table.unlabelled) is None:
        return table
    if rest in split:
        raise SpecError(f"table.unlabelled = {rest!r}: must be the name of one more split")
    return replace(table, split={**split, rest: 0.0})


def _read_splits(raw: dict[str, Any]) -> tuple[dict[str, float], tuple[float, ...]]:
    """Takes the splits out of the section. Returns their shares and, for splits by time, the values from which they
    begin."""
    by_time, is_given = "split_time" in raw, "split" in raw
    hint = float if by_time else Annotated[float, SHARE]
    split = read_value(raw.pop("split", DEFAULT_SPLIT), Mapping[str, hint], "table.split")  # type: ignore[valid-type]
    for name in split:
        read_value(name, Annotated[str, _SPLIT_NAME], f"table.split.{name}: the name")
    if not by_time:
        if abs(sum(split.values()) - 1) > 1e-9:
            raise SpecError(f"table.split: the shares add up to {sum(split.values()):g}, not 1")
        return split, ()
    bounds = tuple(split.values())
    if not is_given or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise SpecError(
            "table.split: with split_time, it holds the value from which each split begins, and these values must rise"
        )
    return dict.fromkeys(split, 1 / len(split)), bounds


def empty_splits(table: TableSpec, rows: Mapping[str, int]) -> list[str]:
    """Returns one line for each split without rows, with its likely cause and what to do. `rows` holds the number of
    rows of the other splits."""
    names = list(table.split)
    fullest = max(rows, key=rows.__getitem__, default=None)
    there = (
        f"{rows[fullest]:,} of {sum(rows.values()):,} rows lie in {fullest!r}"
        if fullest
        else "there are no rows"
    )
    problems = []
    for number, name in enumerate(names):
        if rows.get(name):
            continue
        if name == table.unlabelled:
            why = "every row has its label; leave out table.unlabelled, or hand in rows without one"
        elif table.split_time is not None:
            end = (
                f" to below {table.split_from[number + 1]:.15g}"
                if number + 1 < len(table.split_from)
                else " on"
            )
            why = (
                f"no row's {table.split_time!r} is from {table.split_from[number]:.15g}{end}; set table.split to "
                "values that lie within the data, or hand in the rows of that time, too"
            )
        elif table.split_column is not None:
            why = f"no row's {table.split_column!r} is {name!r}; look for how that column spells it"
        elif table.split_by:
            why = (
                f"too few different values of {', '.join(table.split_by)} for a share of {table.split[name]:g}; "
                "take a larger share, or more rows"
            )
        else:
            why = f"too few rows for a share of {table.split[name]:g}; take a larger share, or more rows"
        problems.append(f"split {name!r} is empty ({there}): {why}")
    return problems
