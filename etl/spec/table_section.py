"""The [table] section of a spec: `TableSpec`, how rows are placed in splits and files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sluice.etl.spec.toml_keys import (
    ONE_VALUE,
    SpecError,
    check_keys,
    read_column_name,
    read_column_names,
    read_value,
)

LAYOUTS = ("speed", "size")
DEFAULT_SPLIT = {"train": 0.8, "validation": 0.1, "test": 0.1}
_SPLIT_NAME = r"[A-Za-z0-9_-]+"
_COLUMN_KEYS = {
    "split_column": None,
    "order": ("number",),
    "then": ("number",),
    "together": None,
    "split_time": ("number",),
    "partition": ONE_VALUE,
}
"""The keys that name one input column, each with the kinds of values that it allows."""
_EXCLUSIVE = (
    ("split_by", "split_column"),
    ("split_by", "split_time"),
    ("split_column", "split_time"),
    ("together", "order"),
    ("partition", "order"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """How rows are placed in splits and files."""

    seed: int = 0
    key: tuple[str, ...] = ()
    """Input columns that identify a row. Default: all input columns of the table's first version."""
    row_group_rows: int = 32_768
    file_rows: int = 524_288
    split: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_SPLIT))
    """Each split's share of the rows. The hash of a row decides its split."""
    split_by: tuple[str, ...] = ()
    """Columns whose hash decides the split instead. Rows that agree in them stay in one split."""
    split_column: str | None = None
    """A text column that holds the split's name instead."""
    split_time: str | None = None
    """A number column that decides instead: each split begins at its bound in `split_from`."""
    split_from: tuple[float, ...] = ()
    unlabelled: str | None = None
    """The last split, for all rows without a label. Without it these rows are rejected."""
    order: str | None = None
    """A number column by which rows are sorted, over files and within them, instead of by hash."""
    then: str | None = None
    """A number column by which rows with one value of `order` are sorted."""
    order_step: float = 3600.0
    """Files are cut at multiples of this step of `order`."""
    partition: str | None = None
    """A column whose values name the folders of files. Delta's readers can skip files by it."""
    together: str | None = None
    """A column by which rows are grouped: rows with equal values are next to each other."""
    plain_lists: bool = False
    """Whether bags are stored as Parquet lists, for readers other than Sluice's, instead of packed bytes."""

    layout: str | None = None
    """How numbers are stored: `speed`, so that loaders read them fastest, or `size`, compressed. None: as the files
    that the table has, and `speed` in a new table."""

    @property
    def training(self) -> str:
        """The training split: `train`, or the first split if none has that name."""
        return "train" if "train" in self.split else next(iter(self.split))


def read_table(
    raw: dict[str, Any], kinds: Mapping[str, str], inputs: Mapping[str, str]
) -> TableSpec:
    check_keys(raw, {f.name for f in fields(TableSpec)} - {"split_from"}, "table")
    for first, second in _EXCLUSIVE:
        if first in raw and second in raw:
            raise SpecError(f"table.{second}: cannot be combined with {first}")
    if "then" in raw and "order" not in raw:
        raise SpecError("table.then: sorts rows within one value of order; give order as well")
    given: dict[str, Any] = {
        key: read_column_name(raw, key, kinds, "table", allowed)
        for key, allowed in _COLUMN_KEYS.items()
        if key in raw
    }
    for key in ("seed", "row_group_rows", "file_rows"):
        if key in raw:
            given[key] = read_value(raw, key, int, None, "table")
    given["order_step"] = float(read_value(raw, "order_step", (int, float), 3600.0, "table"))
    for key in ("row_group_rows", "file_rows", "order_step"):
        if not given.get(key, 1) > 0:
            raise SpecError(f"table.{key} = {given[key]:g}: must be above 0")
    names = read_column_names(raw, "key", inputs, "table")
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"table.key = {name!r}: is there twice")
    layout = read_value(raw, "layout", str, None, "table")
    if layout not in (None, *LAYOUTS):
        raise SpecError(f"table.layout = {layout!r}: must be one of {', '.join(LAYOUTS)}")
    return replace(
        _read_splits(raw),
        key=names,
        split_by=read_column_names(raw, "split_by", kinds, "table", ONE_VALUE),
        plain_lists=read_value(raw, "plain_lists", bool, False, "table"),
        layout=layout,
        **given,
    )


def _read_splits(raw: dict[str, Any]) -> TableSpec:
    """Returns a table with these splits, and with defaults for everything else."""
    split = read_value(raw, "split", dict, DEFAULT_SPLIT, "table")
    for name, share in split.items():
        if not re.fullmatch(_SPLIT_NAME, name):
            raise SpecError(f"table.split.{name}: a split's name is letters, digits, - and _")
        if not isinstance(share, (int, float)) or isinstance(share, bool):
            raise SpecError(f"table.split.{name} = {share!r}: must be a number")
        if "split_time" not in raw and not 0 < share <= 1:
            raise SpecError(f"table.split.{name} = {share!r}: must be a share above 0, at most 1")
    bounds: tuple[float, ...] = ()
    if "split_time" in raw:
        bounds = tuple(map(float, split.values()))
        if "split" not in raw or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise SpecError(
                "table.split: with split_time, it holds the value from which each split begins, and these "
                "values must rise"
            )
        split = dict.fromkeys(split, 1 / len(split))
    elif abs(sum(split.values()) - 1) > 1e-9:
        raise SpecError(f"table.split: the shares add up to {sum(split.values()):g}, not 1")
    unlabelled = read_value(raw, "unlabelled", str, None, "table")
    if unlabelled is not None:
        if unlabelled in split or not re.fullmatch(_SPLIT_NAME, unlabelled):
            raise SpecError(
                f"table.unlabelled = {unlabelled!r}: must be the name of one more split, of letters, digits, "
                "- and _"
            )
        split = {**split, unlabelled: 0.0}
    return TableSpec(split=split, split_from=bounds, unlabelled=unlabelled)
