"""`FeatureError`: the error of an operator or of a user's function, with the column and a value."""

from __future__ import annotations

from collections.abc import Mapping
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

        # The operator may fail at one value by itself, or only on several together.
        start, count = 0, len(values)
        while count > 1:
            half = count // 2
            start, count = (start, half) if fails(start, half) else (start + half, count - half)
        alone = count and fails(start, 1)
        at = f" at {str(values[start].as_py())[:_SHOWN]!r}" if alone else ""
        what = " ".join(str(error).split())
        raise FeatureError(
            f"column {column!r}: {getattr(op, 'function', op.name)} fails{at}: "
            f"{type(error).__name__}{f': {what}' if what else ''}"
        ) from error
