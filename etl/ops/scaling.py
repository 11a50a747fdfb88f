"""Operators on numbers that learn a few numbers: fill_mean, fill_median, standardise, min_max, quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.etl.ops.base import FIRST, Fitted, finite_of, values_of, within
from sluice.etl.ops.exact_sums import distribution, parts, quantiles, root, total
from sluice.etl.ops.numeric import bucketed, filled


def _named(names: list[str], counts: list[int]) -> tuple[pa.Array, pa.Array]:
    return pa.array(names, pa.string()), pa.array(counts, pa.int64())


def _moments(column: pa.Array, powers: tuple[int, ...]) -> tuple[pa.Array, pa.Array]:
    """Returns the number of finite values, and the sums of their powers in parts."""
    values = finite_of(column)
    if not len(values):
        return _named([], [])
    names, counts = ["n"], [len(values)]
    for power in powers:
        for scale, whole in parts(values, power).items():
            names.append(f"{power}:{scale}")
            counts.append(int(whole.astype(np.int64).sum()))
    return _named(names, counts)


def _sums(kept: pa.Table, *powers: int) -> list[Any]:
    """Returns the number of values, or 1 if there are none, and the sum of each power."""
    found = dict(zip(kept["value"].to_pylist(), kept["count"].to_pylist(), strict=True))
    return [
        max(1, found.get("n", 0)),
        *(
            total(
                (int(name.split(":")[1]), count)
                for name, count in found.items()
                if name.startswith(f"{power}:")
            )
            for power in powers
        ),
    ]


class _Distribution(Fitted):
    """Counts each finite value."""

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return _named(*distribution(finite_of(column)))


@dataclass(frozen=True, kw_only=True)
class _Fill(Fitted):
    """Puts the one learned value in place of missing ones."""

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
        return _moments(column, (1,))

    def learn(self, counted: pa.Table) -> pa.Table:
        rows, first = _sums(counted, 1)
        return pa.table({"mean": [float(first / rows)]})


@dataclass(frozen=True, kw_only=True)
class FillMedian(_Fill, _Distribution):
    """Puts the (lower) median of the column's finite values in place of missing ones."""

    name = "fill_median"

    def learn(self, counted: pa.Table) -> pa.Table:
        return pa.table({"median": quantiles(counted, [0.5])})


class _Scaled(Fitted):
    """Scales numbers by two that are learned."""

    online_too = True

    def prepare(self, state: pa.Table) -> list[float]:
        return [float(column[0].as_py()) for column in state.columns]


@dataclass(frozen=True, kw_only=True)
class Standardise(_Scaled):
    """(x - mean) / standard deviation; a column with only one value becomes 0. Nulls stay."""

    name = "standardise"

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return _moments(column, (1, 2))

    def learn(self, counted: pa.Table) -> pa.Table:
        rows, first, second = _sums(counted, 1, 2)
        mean = first / rows
        variance = second / rows - mean**2
        return pa.table(
            {"mean": [float(mean)], "spread": [root(variance.numerator, variance.denominator)]}
        )

    def apply(self, column: pa.Array, state: Sequence[float]) -> pa.Array:
        values, nulls = values_of(column)
        mean, spread = state
        with np.errstate(over="ignore"):
            return pa.array((values - mean) / (spread or 1.0), mask=nulls)


@dataclass(frozen=True, kw_only=True)
class MinMax(_Scaled):
    """(x - least) / (largest - least), kept within 0 and 1; 0 for a column with only one value. Nulls stay."""

    name = "min_max"

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        values = finite_of(column)
        ends = {values.min() + 0.0, values.max() + 0.0} if len(values) else ()
        return _named([repr(float(end)) for end in ends], [1] * len(ends))

    def learn(self, counted: pa.Table) -> pa.Table:
        ends = [float(v) for v in counted["value"].to_pylist()] or [0.0]
        return pa.table({"least": [min(ends)], "largest": [max(ends)]})

    def apply(self, column: pa.Array, state: Sequence[float]) -> pa.Array:
        values, nulls = values_of(column)
        low, high = state
        return pa.array(
            np.clip((values / 2 - low / 2) / ((high / 2 - low / 2) or 1.0), 0.0, 1.0), mask=nulls
        )


@dataclass(frozen=True, kw_only=True)
class Quantiles(_Distribution):
    """Gives the ids, from 2 on, of `buckets` ranges with about equal numbers of rows; nulls and NaN have id 1."""

    name = "quantiles"
    gives = "id"
    online_too = True
    buckets: int

    def __post_init__(self) -> None:
        within(self, buckets=(2, 100_000))

    def learn(self, counted: pa.Table) -> pa.Table:
        ends = quantiles(counted, [i / self.buckets for i in range(1, self.buckets)])
        return pa.table({"boundary": pa.array(sorted(set(ends)), pa.float64())})

    def prepare(self, state: pa.Table) -> Any:
        return state["boundary"].to_numpy()

    def apply(self, column: pa.Array, state: np.ndarray) -> pa.Array:
        return bucketed(column, state)

    def cardinality(self, _state: pa.Table | None) -> int:
        return FIRST + self.buckets
