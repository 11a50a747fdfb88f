"""Finds rows that a table cannot hold, because one of their numbers would be published as NaN, as infinite or as
another number.

Operators compute in float64, as IEEE 754 says. A number is published as the nearest float32 (`time`: unchanged). A row
is rejected if a number becomes infinite by this, or is NaN. Without operators that learn, this is known when rows are
parsed. Otherwise it is known only after all operators have learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import Arrays, Fitted, Operator, as_number, as_one_column, plain
from sluice.etl.ops.chain import applied
from sluice.etl.ops.hashing import Flags
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.columns import ROLE_KINDS, ColumnSpec

NUMBERS = ("dense", "weight", "time")
"""The roles of columns that are published as numbers."""
_NO_ROWS: Flags = np.zeros(0, bool)


def is_late(column: ColumnSpec) -> bool:
    """Returns whether the column's numbers are known only when the table is written: an operator learns, or calls a
    user's function."""
    return any(isinstance(op, (Fitted, Python)) for op in column.ops)


def reason(column: ColumnSpec) -> str:
    """Returns why rows with such numbers are rejected."""
    wrong = {"time": "NaN or infinite", "weight": "NaN, below 0, or too large for float32"}
    return f"{column.name}: {wrong.get(column.role, 'NaN, or too large for float32')}"


def as_stored(values: pa.Array, kind: str) -> npt.NDArray[np.floating]:
    """Returns numbers as they are stored. As `float`, a number that is too large becomes infinite. As `double`, a
    missing number becomes 0."""
    if kind == "double":
        return np.asarray(pc.fill_null(as_number(values), 0.0))
    with np.errstate(over="ignore"):
        return np.asarray(as_number(values), np.float32)


def forms(column: ColumnSpec) -> list[tuple[Sequence[Operator], str]]:
    """Returns the chains of operators whose results must be numbers that may be published, each with its type. These
    are all operators and, if some are left to the loader, the operators before those."""
    all_operators = (column.ops, ROLE_KINDS[column.role][1])
    return (
        [all_operators]
        if column.online is None or column.raw
        else [(column.left_to_spark, column.type), all_operators]
    )


def unfit(numbers: npt.NDArray[np.floating], column: ColumnSpec) -> Flags:
    """Returns which of the stored numbers must not be published. No flags: all may."""
    bad = ~np.isfinite(numbers)
    if column.role == "weight":
        bad |= numbers < 0
    return bad if bad.any() else _NO_ROWS


def early_unfit(column: ColumnSpec, columns: Arrays) -> Flags:
    """Returns which rows of a column that is not `is_late` have a number that must not be published. No flags: none."""
    values = plain(as_one_column([columns[name] for name in column.sources], column.sources))
    return unfit_after(column, lambda ops: applied(ops, values))


def unfit_after(column: ColumnSpec, run: Callable[[Sequence[Operator]], pa.Array]) -> Flags:
    """Returns which rows are not fit. `run` returns the column after some of its operators."""
    flags = [
        bad for ops, kind in forms(column) if len(bad := unfit(as_stored(run(ops), kind), column))
    ]
    return np.any(flags, axis=0) if flags else _NO_ROWS
