"""Groups columns that are made by the same operators: `column_groups`.

A server applies the operators once to all values of a group, because for a few rows each call costs more than its
values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.etl.ops import Fitted
from sluice.etl.ops.hash_table import Lookup
from sluice.etl.ops.ids import Categorify
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.columns import ColumnSpec


def column_groups(columns: Iterable[ColumnSpec]) -> list[list[ColumnSpec]]:
    """Returns the columns in groups, in order. All columns of a group have the same operators and stored type. A column
    with an operator that needs more than the column's own values is alone."""
    groups: list[tuple[Any, list[ColumnSpec]]] = []
    for column in columns:
        key = (column.role, column.type, column.raw, column.online, column.ops)
        is_joinable = len(column.sources) == 1 and not any(
            op.needs
            or isinstance(op, Python)
            or (isinstance(op, Fitted) and not isinstance(op, Categorify))
            for op in column.ops
        )
        fitting = (group for other, group in groups if other == key and is_joinable)
        group = next(fitting, None)
        if group is None:
            groups.append((key, [column]))
        else:
            group.append(column)
    return [group for _, group in groups]


@dataclass(frozen=True, slots=True)
class GroupLookup:
    """The vocabularies of a group's columns. It takes the values of all columns, one column after the other."""

    lookups: tuple[Lookup, ...]

    def places(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Returns the place of each value in its column's vocabulary, given its hash, or -1."""
        columns = len(self.lookups)
        of_columns = hashes.reshape(columns, len(hashes) // columns)
        return np.concatenate(
            [lookup.places(part) for lookup, part in zip(self.lookups, of_columns, strict=True)]
        )
