"""Operators on numbers: fill, clip, log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.ops.base import Operator, OperatorError


@dataclass(frozen=True, kw_only=True)
class Fill(Operator):
    """Puts `value` where there is none: nulls, NaN and infinities."""

    name: ClassVar[str] = "fill"
    takes: ClassVar[str] = "number"
    gives: ClassVar[str] = "number"
    value: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise OperatorError(f"value = {self.value}: must be a finite number")

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values = pc.fill_null(column, math.nan).to_numpy(zero_copy_only=False)
        return pa.array(np.where(np.isfinite(values), values, self.value))


@dataclass(frozen=True, kw_only=True)
class Clip(Operator):
    """Keeps values within `low` and `high`; nulls stay."""

    name: ClassVar[str] = "clip"
    takes: ClassVar[str] = "number"
    gives: ClassVar[str] = "number"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise OperatorError("low or high: at least one must be given")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise OperatorError(f"low = {self.low}: must not be above high = {self.high}")

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values, nulls = _values(column)
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return pa.array(np.clip(values, low, high), mask=nulls)


@dataclass(frozen=True, kw_only=True)
class Log(Operator):
    """Natural logarithm of x + `shift`, with anything below `floor` taken as `floor`; nulls stay."""

    name: ClassVar[str] = "log"
    takes: ClassVar[str] = "number"
    gives: ClassVar[str] = "number"
    shift: float = 1.0
    floor: float = 1e-6

    def __post_init__(self) -> None:
        if not math.isfinite(self.shift):
            raise OperatorError(f"shift = {self.shift}: must be a finite number")
        if not 0 < self.floor < math.inf:
            raise OperatorError(f"floor = {self.floor}: must be above 0")

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values, nulls = _values(column)
        return pa.array(np.log(np.maximum(values + self.shift, self.floor)), mask=nulls)


def _values(column: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Values as numpy, with 0 under nulls, and where the nulls are."""
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False), None
    return (pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False),
            pc.is_null(column).to_numpy(zero_copy_only=False))
