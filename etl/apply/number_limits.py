"""Finds rows that a table cannot hold, because one of their numbers would be published as NaN, as infinite or as
another number.

Operators compute in float64, as IEEE 754 says. A number is published as the nearest float32 (`time`: unchanged). A row
is rejected if a number becomes infinite by this, or is NaN. Without operators that learn, this is known when rows are
parsed. Otherwise it is known only after all operators have learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops import Fitted, Operator
from sluice.etl.ops.base import Arrays, as_number, as_one_column, plain
from sluice.etl.ops.chain import applied, step
from sluice.etl.ops.hashing import Flags
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.columns import ROLE_KINDS, ColumnSpec

NUMBERS = ("dense", "weight", "time")
"""The roles of columns that are published as numbers."""
_SAFE = 1e38
"""A number up to this size is finite in float32, even after an operator has rounded it."""
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
    if len(column.sources) == 1 and has_safe_ends(values, column):
        return _NO_ROWS
    return unfit_after(column, lambda ops: applied(ops, values))


def unfit_after(column: ColumnSpec, run: Callable[[Sequence[Operator]], pa.Array]) -> Flags:
    """Returns which rows are not fit. `run` returns the column after some of its operators."""
    flags = [
        bad for ops, kind in forms(column) if len(bad := unfit(as_stored(run(ops), kind), column))
    ]
    return np.any(flags, axis=0) if flags else _NO_ROWS


def has_safe_ends(values: pa.Array, column: ColumnSpec) -> bool:
    """Returns whether the least and the largest value, a missing value and NaN show that all numbers of the column may
    be published. This saves the check of all rows.

    It needs operators that keep the order of numbers. No number may become infinite on the way, because a later
    operator may take an infinite number for a missing one."""
    number = pa.types.is_floating(values.type) or pa.types.is_integer(values.type)
    if not number or not column.ops or not all(op.keeps_order for op in column.ops):
        return False
    ends = [end for end in pc.min_max(values).as_py().values() if end is not None]
    probes = pa.array([None, math.nan, *map(float, ends)], pa.float64())
    kinds = {len(ops): kind for ops, kind in forms(column)}
    for number_of_ops, op in enumerate((None, *column.ops)):
        probes = probes if op is None else step(op, probes, None, {})
        if not np.isfinite(np.asarray(probes[2:])).all():
            return False
        if number_of_ops in kinds:
            numbers = as_stored(probes, kinds[number_of_ops])
            if len(unfit(numbers, column)) or np.abs(numbers).max() > _SAFE:
                return False
    return True
