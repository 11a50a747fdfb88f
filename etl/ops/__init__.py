"""Feature operators by their names in specs. This package imports neither Spark nor torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sluice.common.errors import OperatorError
from sluice.etl.ops import (
    ids,
    lists,
    numeric,
    scaling,
    statistics,
    text,
    timestamps,
    user_function,
)
from sluice.etl.ops.base import FIRST, NULL, PADDING, Fitted, Operator, id_kind, on_distinct
from sluice.etl.ops.chain import step
from sluice.etl.ops.hashing import AnyArray

if TYPE_CHECKING:
    from sluice.etl.schema import Field
    from sluice.etl.table.fitted_state import FittedState

OPERATORS: dict[str, type[Operator]] = {
    kind.name: kind
    for family in (numeric, scaling, ids, text, lists, statistics, timestamps, user_function)
    for kind in vars(family).values()
    if isinstance(kind, type) and issubclass(kind, Operator) and "name" in vars(kind)
}

Online = Callable[[AnyArray | pa.Array], AnyArray | pa.Array]

__all__ = [
    "FIRST",
    "NULL",
    "OPERATORS",
    "PADDING",
    "Fitted",
    "Operator",
    "OperatorError",
    "made",
    "online",
]


def made(described: Mapping[str, Any]) -> Operator:
    """Returns the operator that `described` names, with its parameters, as in a spec or a `Field`."""
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in described.items()
        if key not in ("op", "state", "past", "past_step")
    }
    return OPERATORS[described["op"]](**given)


def online(field: Field, state: FittedState | None) -> Online:
    """Returns the operators that this column leaves to the loader, as a pure function of its stored values.

    The function returns a float64 or an id for each value, or lists of ids for lists. The caller checks that a batch
    can hold the numbers. `state` is that of the version (`FeatureTable.state()`). Fitted operators need it."""
    steps: list[tuple[Operator, Any]] = []
    for described in field.online:
        kind = OPERATORS.get(str(described.get("op")))
        # A table is data, so it cannot name a function to call.
        if kind is None or kind is user_function.Python:
            raise OperatorError(
                f"column {field.name!r}: {described.get('op')!r} is no operator for the loader"
            )
        op = made(described)
        learned = None
        if isinstance(op, Fitted):
            if state is None:
                raise OperatorError(
                    f"column {field.name!r}: {op.name} needs the table's fitted state"
                )
            learned = op.prepare(state[described["state"]])
        steps.append((op, learned))
    stored_as = None if field.nullable else np.dtype(steps[0][0].left_as)

    def applied(column: pa.Array) -> pa.Array:
        for number, (op, learned) in enumerate(steps):
            # `whole_numbers` made the stored values, so they need no conversion to text.
            whole = not number and stored_as == np.int64
            column = op.apply(column, learned) if whole else step(op, column, learned, {})
        return column

    def run(values: AnyArray | pa.Array) -> AnyArray | pa.Array:
        if not isinstance(values, pa.Array):
            values = pa.array(values if stored_as is None else values.astype(stored_as, copy=False))
        column = on_distinct(applied, values)
        kind = id_kind(field.cardinality)
        if field.role == "id_list":
            return column.cast(pa.list_(pa.from_numpy_dtype(kind)))
        array = np.asarray(column)
        return np.asarray(array, kind if field.role == "sparse" else np.float64)

    return run
