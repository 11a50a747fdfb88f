"""`FeatureError`: the error of an operator or of a user's function, with the column and a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from sluice.common.errors import OperatorError
from sluice.etl.ops import Operator
from sluice.etl.ops.chain import step

_SHOWN = 100
"""The most characters of a value in a message."""


class FeatureError(RuntimeError):
    """An operator failed. The message needs no traceback."""


def step_of(
    column: str, op: Operator, values: pa.Array, state: Any, extras: Mapping[str, pa.Array]
) -> pa.Array:
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

        place, what = _failing_value(fails, len(values)), " ".join(str(error).split())
        at = "" if place is None else f" at {str(values[place].as_py())[:_SHOWN]!r}"
        raise FeatureError(
            f"column {column!r}: {getattr(op, 'function', op.name)} fails{at}: "
            f"{type(error).__name__}{f': {what}' if what else ''}"
        ) from error


def _failing_value(fails: Callable[[int, int], bool], count: int) -> int | None:
    """Returns the number of a value at which the operator fails by itself. None: it fails only on several values
    together."""
    start = 0
    while count > 1:
        half = count // 2
        start, count = (start, half) if fails(start, half) else (start + half, count - half)
    return start if count and fails(start, 1) else None
