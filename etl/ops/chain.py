"""The steps of a chain: the kind after an operator (`follow`), its application to a column (`step`; `step_of` names
the column and the value at which it fails), and the operators that may meet unreadable values (`reading`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import LISTS, Arrays, Fitted, Operator, as_number, as_text, plain
from sluice.etl.ops.lists import flat, relisted

ELEMENTS = {plural: single for single, plural in LISTS.items()}
SHOWN = 100
"""The most characters of a value in a message."""


class FeatureError(RuntimeError):
    """An operator failed. The message needs no traceback."""


def follow(op: Operator, kind: str) -> str | None:
    """Returns the kind that `op` gives for a column of that kind, or None if it cannot take it."""
    if kind in op.takes:
        return op.kind(kind)
    if kind in ELEMENTS and not op.needs:
        given = follow(op, ELEMENTS[kind])
        return LISTS.get(given or "")
    return op.kind("text") if "text" in op.takes and kind in ("number", "id") else None


def prepare_column(op: Operator, values: pa.Array, extras: Arrays) -> pa.Array:
    """Returns the column as the operator needs it: text or number, together with `op.needs`."""
    t, kind = pa.types, values.type
    is_stored = t.is_integer(kind) or t.is_binary(kind) or t.is_large_binary(kind)
    if not (
        t.is_struct(kind)
        or t.is_list(kind)
        or op.name == "python"
        or (op.takes_stored and is_stored)
    ):
        values = as_number(values) if op.takes[0] == "number" else as_text(values)
    if op.needs:
        values = pa.StructArray.from_arrays(
            [values, *(extras[n] for n in op.needs)], ["value", *op.needs]
        )
    return values


def lifted(op: Operator, values: pa.Array) -> bool:
    """Returns whether an operator on single values is applied to a column of lists."""
    return pa.types.is_list(values.type) and not set(op.takes) & ELEMENTS.keys()


def step(op: Operator, values: pa.Array, state: Any, extras: Arrays) -> pa.Array:
    if lifted(op, values):
        elements, lengths = flat(values)
        return relisted(step(op, elements, state, extras), lengths)
    # Numbers that are too large become infinite, and infinite less infinite becomes NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        return op.apply(prepare_column(op, values, extras), state)


def step_of(column: str, op: Operator, values: pa.Array, state: Any, extras: Arrays) -> pa.Array:
    """Applies `step` to a column's values. Raises a FeatureError if the operator fails."""
    try:
        return step(op, values, state, extras)
    except (MemoryError, OSError):
        raise
    except OperatorError as error:  # the cause is not a single value
        raise FeatureError(f"column {column!r}: {error}") from error
    except Exception as error:

        def fails(start: int, count: int) -> bool:
            try:
                step(
                    op,
                    values.slice(start, count),
                    state,
                    {name: v.slice(start, count) for name, v in extras.items()},
                )
            except Exception:
                return True
            return False

        # The operator may fail at one value by itself, or only on several together.
        start, count = 0, len(values)
        while count > 1:
            half = count // 2
            start, count = (start, half) if fails(start, half) else (start + half, count - half)
        alone = count and fails(start, 1)
        at = f" at {str(values[start].as_py())[:SHOWN]!r}" if alone else ""
        what = " ".join(str(error).split())
        raise FeatureError(
            f"column {column!r}: {getattr(op, 'function', op.name)} fails{at}: "
            f"{type(error).__name__}{f': {what}' if what else ''}"
        ) from error


def applied(ops: Iterable[Operator], values: pa.Array) -> pa.Array:
    """Applies operators that learn nothing, one after the other."""
    for op in ops:
        values = step(op, values, None, {})
    return values


def make_labels(ops: Iterable[Operator], values: pa.Array) -> pa.Array:
    """Returns the labels that operators make. A missing value stays missing, except in an operator that is meant to
    replace it. So `one_hot` does not make a negative of a row without a label."""
    values = plain(values)
    for op in ops:
        made = step(op, values, None, {})
        missing = pc.is_null(values, nan_is_null=pa.types.is_floating(values.type))
        values = (
            made if op.replaces_missing else pc.if_else(missing, pa.scalar(None, made.type), made)
        )
    return values


def reading(ops: Sequence[Operator]) -> int:
    """Returns the number of operators up to the last one that reads values. Returns 0 if there is none, or if it needs
    what another operator learns."""
    upto = max((number for number, op in enumerate(ops, 1) if op.reads), default=0)
    return 0 if any(isinstance(op, Fitted) for op in ops[:upto]) else upto


def lacks(values: pa.Array) -> pa.Array:
    """Returns where a value, or an element of a list, is missing."""
    missing = pc.is_null(values, nan_is_null=pa.types.is_floating(values.type))
    if not pa.types.is_list(values.type):
        return missing
    parents = pc.list_parent_indices(values).filter(pc.is_null(pc.list_flatten(values)))
    return pc.or_(missing, pc.is_in(pa.array(np.arange(len(values))), parents.cast(pa.int64())))
