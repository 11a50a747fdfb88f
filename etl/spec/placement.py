"""Where each column's operators are applied, in the ETL or in the loader: the `[placement]` section of a spec.

    [placement]
    I1 = ["clip", "log"]   # the loader applies its last two operators
    C3 = []                # the ETL applies all

For its columns it replaces `online` at the operators. `sluice etl --place auto` writes the section into the spec that
the table's record keeps. You may also write it yourself.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sluice.common.suggest import nearest
from sluice.etl.ops.chain import follow
from sluice.etl.spec.columns import ColumnSpec, fits_its_role, left_as, may_be_left
from sluice.etl.spec.toml_keys import SpecError, texts

SECTION = "placement"


def left_from(column: ColumnSpec, number: int | None, kinds: Mapping[str, str]) -> ColumnSpec:
    """The column with its operators from that one on left to the loader, or with none; SpecError if they cannot be."""
    path = f"{SECTION}.{column.name}"
    kind, before = kinds[column.sources[0]] if len(column.sources) == 1 else "row", []
    for op in column.ops:
        before.append(kind)
        kind = follow(op, kind) or ""
    stored_as, raw = "", False
    if number is not None:
        for op, taken in list(zip(column.ops, before, strict=True))[number:]:
            may_be_left(op, column.role, taken, column.sources, path)
        stored_as, raw = left_as(column.role, before[number], column.ops, number)
    fits_its_role(column.name, column.role, kind, column.ops if raw else column.ops[:number], path)
    return replace(column, online=number, left_as=stored_as, raw=raw)


def read_placement(
    section: Mapping[str, Any], columns: tuple[ColumnSpec, ...], kinds: Mapping[str, str]
) -> tuple[ColumnSpec, ...]:
    """The columns as the section has them."""
    names = [column.name for column in columns]
    for name in section:
        if name not in names:
            raise SpecError(f"{SECTION}.{name}: there is no such column{nearest(name, names)}")
    return tuple(
        left_from(column, _first(column, texts(section, column.name, (), SECTION)), kinds)
        if column.name in section
        else column
        for column in columns
    )


def _first(column: ColumnSpec, names: tuple[str, ...]) -> int | None:
    """The number of the first of the operators that are left to the loader, by their names."""
    chain = [op.name for op in column.ops]
    if names and tuple(chain[-len(names) :]) != names:
        raise SpecError(
            f"{SECTION}.{column.name} = {list(names)}: must be the last of its operators, which are "
            f"{chain}"
        )
    return len(chain) - len(names) if names else None


def placement_of(text: str) -> dict[str, list[str]]:
    """What a spec's text says of it, whatever else is in the text; empty if it says nothing."""
    return dict(tomllib.loads(text).get(SECTION, {})) if text else {}


def with_placement(
    text: str, left: Mapping[str, Sequence[str]], reasons: Mapping[str, str] | None = None
) -> str:
    """A spec's text, which has no such section yet, with one; the reasons are comments in it."""
    lines = [
        f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(list(ops))}"
        + (f"  # {reasons[name]}" if reasons and name in reasons else "")
        for name, ops in left.items()
    ]
    return "\n".join([text.rstrip(), "", f"[{SECTION}]", *lines, ""])
