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
from typing import Any

from sluice.common.suggest import nearest
from sluice.etl.spec.columns import ColumnSpec, leave_to_loader
from sluice.etl.spec.toml_keys import SpecError, read_texts

SECTION = "placement"


def read_placement(
    section: Mapping[str, Any], columns: tuple[ColumnSpec, ...], kinds: Mapping[str, str]
) -> tuple[ColumnSpec, ...]:
    """Returns the columns with the placement of the section."""
    names = [column.name for column in columns]
    for name in section:
        if name not in names:
            raise SpecError(f"{SECTION}.{name}: there is no such column{nearest(name, names)}")
    return tuple(
        leave_to_loader(
            column,
            _find_first(column, read_texts(section, column.name, (), SECTION)),
            kinds,
            f"{SECTION}.{column.name}",
        )
        if column.name in section
        else column
        for column in columns
    )


def _find_first(column: ColumnSpec, names: tuple[str, ...]) -> int | None:
    """Returns the number of the first operator that is left to the loader, from the names of the last ones."""
    chain = [op.name for op in column.ops]
    if names and tuple(chain[-len(names) :]) != names:
        raise SpecError(
            f"{SECTION}.{column.name} = {list(names)}: must be the last of its operators, which are "
            f"{chain}"
        )
    return len(chain) - len(names) if names else None


def placement_of(text: str) -> dict[str, list[str]]:
    """Reads the section alone from a spec's text. Returns an empty dict if there is none."""
    return dict(tomllib.loads(text).get(SECTION, {})) if text else {}


def with_placement(
    text: str, left: Mapping[str, Sequence[str]], reasons: Mapping[str, str] | None = None
) -> str:
    """Adds the section to a spec's text that has none. The reasons become comments."""
    lines = [
        f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(list(ops))}"
        + (f"  # {reasons[name]}" if reasons and name in reasons else "")
        for name, ops in left.items()
    ]
    return "\n".join([text.rstrip(), "", f"[{SECTION}]", *lines, ""])
