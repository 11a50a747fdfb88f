"""Operators on numbers that learn a few numbers: fill_mean, fill_median, standardise, quantiles."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa

from sluice.etl.ops.base import FIRST, Fitted, between, finite_of
from sluice.etl.ops.exact_sums import (
    count_moments,
    deviation,
    distribution,
    quantiles,
    quotient,
    read_moments,
    undecided,
)
from sluice.etl.ops.hashing import Floats
from sluice.etl.ops.numeric import NumberMap, bucketed, filled


def _named(names: list[str], counts: list[int]) -> tuple[pa.Array, pa.Array]:
    return pa.array(names, pa.string()), pa.array(counts, pa.int64())


class _Distribution(Fitted):
    """Learns quantiles of the finite values."""

    learned: ClassVar[str]
    """The name of the state's column. It is another one if ranges were divided for it, which 0.3.0 did not do."""

    @property
    @abstractmethod
    def shares(self) -> list[float]:
        """The share of the values below each quantile."""

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return _named(*distribution(finite_of(column)))

    def undecided(self, counted: pa.Table) -> pa.Table | None:
        return undecided(counted, self.shares)

    def count_within(self, column: pa.Array, ranges: pa.Table) -> tuple[pa.Array, pa.Array]:
        return _named(*distribution(finite_of(column), ranges))

    def learn(self, counted: pa.Table) -> pa.Table:
        ends, is_close = quantiles(counted, self.shares)
        name = f"close {self.learned}" if is_close else self.learned
        return pa.table({name: pa.array(sorted(set(ends)), pa.float64())})

    def is_close(self, state: pa.Table) -> bool:
        return self.learned not in state.column_names


@dataclass(frozen=True, kw_only=True)
class _Fill(Fitted):
    """Puts the one learned value in place of missing ones."""

    may_be_null = False
    indicator: bool = False

    def prepare(self, state: pa.Table) -> float:
        return float(state[0][0].as_py())

    def apply(self, column: pa.Array, state: float) -> pa.Array:
        return filled(column, state)


@dataclass(frozen=True, kw_only=True)
class FillMean(_Fill):
    """Puts the mean of the column's finite values in place of missing ones."""

    name = "fill_mean"

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return _named(*count_moments(finite_of(column), 1))

    def learn(self, counted: pa.Table) -> pa.Table:
        digits, (rows, first, _) = read_moments(counted)
        return pa.table({"mean": [quotient(first, rows << digits)]})


@dataclass(frozen=True, kw_only=True)
class FillMedian(_Fill, _Distribution):
    """Puts the (lower) median of the column's finite values in place of missing ones."""

    name = "fill_median"
    learned = "median"

    @property
    def shares(self) -> list[float]:
        return [0.5]


@dataclass(frozen=True, kw_only=True)
class Standardise(NumberMap, Fitted):
    """(x - mean) / standard deviation; a column with only one value becomes 0. Nulls stay."""

    name = "standardise"
    online_too = True

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return _named(*count_moments(finite_of(column), 2))

    def learn(self, counted: pa.Table) -> pa.Table:
        digits, (rows, first, second) = read_moments(counted)
        spread = deviation(digits, rows, first, second)
        return pa.table({"mean": [quotient(first, rows << digits)], "spread": [spread]})

    def prepare(self, state: pa.Table) -> list[float]:
        return [float(column[0].as_py()) for column in state.columns]

    def map(self, values: Floats, state: list[float]) -> Floats:
        mean, spread = state
        return (values - mean) / (spread or 1.0)


@dataclass(frozen=True, kw_only=True)
class Quantiles(_Distribution):
    """Gives the ids, from 2 on, of `buckets` ranges with about equal numbers of rows; nulls and NaN have id 1."""

    name = "quantiles"
    learned = "boundary"
    gives = "id"
    online_too = True
    buckets: Annotated[int, between(2, 100_000)]

    @property
    def shares(self) -> list[float]:
        return [i / self.buckets for i in range(1, self.buckets)]

    def prepare(self, state: pa.Table) -> Any:
        return state[0].to_numpy()

    def apply(self, column: pa.Array, state: np.ndarray) -> pa.Array:
        return bucketed(column, state)

    def cardinality(self, _state: pa.Table | None) -> int:
        return FIRST + self.buckets
