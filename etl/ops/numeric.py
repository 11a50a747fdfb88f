"""Operators on single numbers that learn nothing: fill, missing, clip, scale, log, compare, bucketize, one_hot."""

from __future__ import annotations

import itertools
import math
import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import (
    DIFFERENT,
    FINITE,
    FIRST,
    NULL,
    POSITIVE,
    Limit,
    Operator,
    values_of,
)
from sluice.etl.ops.hashing import Floats

COMPARISONS = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<=": pc.less_equal,
    "<": pc.less,
    ">=": pc.greater_equal,
    ">": pc.greater,
}
_RISING = Limit(
    lambda numbers: numbers and all(a < b for a, b in itertools.pairwise(numbers)),
    "must be numbers that rise",
)


@dataclass(frozen=True, kw_only=True)
class Fill(Operator):
    """Puts `value` in place of nulls, NaN and infinities. `indicator` adds a dense column that says where."""

    name = "fill"
    may_be_null = False
    replaces_missing = True
    value: Annotated[float, FINITE] = 0.0
    indicator: bool = False

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return filled(column, self.value)


def filled(column: pa.Array, value: float) -> pa.Array:
    values = np.asarray(pc.fill_null(column, math.nan))
    return pa.array(np.where(np.isfinite(values), values, value))


@dataclass(frozen=True, kw_only=True)
class Missing(Operator):
    """1 where there is no finite number, else 0."""

    name = "missing"
    may_be_null = False
    replaces_missing = True

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values = np.asarray(pc.fill_null(column, math.nan))
        return pa.array((~np.isfinite(values)).astype(np.float64))


class NumberMap(Operator):
    """Maps each number by itself. Nulls stay."""

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        values, nulls = values_of(column)
        with np.errstate(over="ignore"):
            return pa.array(self.map(values, state), mask=nulls)

    @abstractmethod
    def map(self, values: Floats, state: Any) -> Floats: ...


@dataclass(frozen=True, kw_only=True)
class Clip(NumberMap):
    """Keeps values within `low` and `high`; nulls stay."""

    name = "clip"
    online_too = True
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise OperatorError("low or high: at least one must be given")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise OperatorError(f"low = {self.low}: must not be above high = {self.high}")

    def map(self, values: Floats, _state: Any) -> Floats:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return np.clip(values, low, high)


@dataclass(frozen=True, kw_only=True)
class Scale(NumberMap):
    """(x - `minus`) / `by`, for instance to convert milliseconds to seconds; nulls stay."""

    name = "scale"
    by: Annotated[float, FINITE, Limit(bool, "must not be 0")]
    minus: Annotated[float, FINITE] = 0.0

    def map(self, values: Floats, _state: Any) -> Floats:
        return (values - self.minus) / self.by


@dataclass(frozen=True, kw_only=True)
class Log(NumberMap):
    """Natural logarithm of x + `shift`, with anything below `floor` taken as `floor`; nulls stay."""

    name = "log"
    online_too = True
    shift: Annotated[float, FINITE] = 1.0
    floor: Annotated[float, POSITIVE] = 1e-6

    def map(self, values: Floats, _state: Any) -> Floats:
        return np.log(np.maximum(values + self.shift, self.floor))


@dataclass(frozen=True, kw_only=True)
class Compare(Operator):
    """1 if the comparison `to`, for instance ">= 4", holds for the number, else 0; nulls stay, and NaN becomes null."""

    name = "compare"
    to: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts()

    def _parts(self) -> tuple[str, float]:
        match = re.fullmatch(rf"\s*({'|'.join(COMPARISONS)})\s*(\S+)\s*", self.to)
        try:
            return ("", float("")) if match is None else (match[1], float(match[2]))
        except ValueError:
            raise OperatorError(
                f"to = {self.to!r}: must be one of {' '.join(COMPARISONS)} and a number, for instance "
                ">= 4"
            ) from None

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        sign, number = self._parts()
        there = pc.invert(pc.is_null(column, nan_is_null=True))
        holds = COMPARISONS[sign](column.cast(pa.float64(), safe=False), number).cast(pa.float64())
        return pc.if_else(there, holds, pa.scalar(None, pa.float64()))


@dataclass(frozen=True, kw_only=True)
class Bucketize(Operator):
    """The number of boundaries at or below a value, as an id from 2 on; nulls and NaN have id 1."""

    name = "bucketize"
    gives = "id"
    online_too = True
    boundaries: Annotated[tuple[float, ...], _RISING]

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return bucketed(column, np.array(self.boundaries))

    def cardinality(self, _state: pa.Table | None) -> int:
        return FIRST + len(self.boundaries) + 1


def bucketed(column: pa.Array, boundaries: np.ndarray) -> pa.Array:
    values, nulls = values_of(column)
    ids = np.searchsorted(boundaries, values, side="right").astype(np.int32) + np.int32(FIRST)
    ids[np.isnan(values) if nulls is None else np.isnan(values) | nulls] = NULL
    return pa.array(ids, pa.int32())


@dataclass(frozen=True, kw_only=True)
class OneHot(Operator):
    """A column `name=value` for each of `values`: 1 where the text is that value, else 0."""

    name = "one_hot"
    may_be_null = False
    takes = ("text",)
    values: Annotated[tuple[str, ...], DIFFERENT]

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        """Gives 1 where the text is any of the values: the spec gives each of its columns an operator of one value."""
        return pc.is_in(column, pa.array(self.values)).cast(pa.float64())
