"""What an operator is: `Operator`, a frozen description with one `apply` for Spark, loader and serving alike.

Between the operators of a chain a column is one of three kinds: `text` (string array), `number` (float64 array) or
`id` (int32 array without nulls). An operator that learns from data is `Fitted`: its `fit` is Spark SQL over counts
that the workers take per batch, so it never sees rows one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KINDS = ("text", "number", "id")
PADDING, NULL, FIRST = 0, 1, 2
"""The ids every sparse column shares: 0 pads a bag, 1 is a missing value, the rest begins at 2."""
MAX_ID = 2**31 - 1


class OperatorError(ValueError):
    """Parameters that cannot be: the message names the parameter and what would do."""


@dataclass(frozen=True, kw_only=True)
class Operator(ABC):
    """Parameters are the dataclass's fields; a spec's keys are their names."""

    name: ClassVar[str]
    takes: ClassVar[str]
    gives: ClassVar[str]

    @abstractmethod
    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        """New values of a column, one for each; `state` is what `prepare` made, None if nothing is fitted."""

    def cardinality(self, _state: pa.Table | None) -> int | None:
        """Rows that an embedding of the result needs; only for operators that give ids."""
        return None


@dataclass(frozen=True, kw_only=True)
class Fitted(Operator):
    """An operator that learns a table, kept with the version it belongs to."""

    @abstractmethod
    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Of one batch: distinct values (strings) and how often each occurs."""

    @abstractmethod
    def fit(self, counts: DataFrame) -> DataFrame:
        """From the sums over all batches, columns (value, count), what is to be kept: columns (value, count, place)."""

    @abstractmethod
    def learn(self, kept: pa.Table) -> pa.Table:
        """The state, from what `fit` kept, in any order of rows."""

    @abstractmethod
    def prepare(self, state: pa.Table) -> Any:
        """What `apply` looks values up in; made once a worker."""


def as_text(column: pa.Array) -> pa.Array:
    """Text stays, numbers become their shortest decimal form."""
    if pa.types.is_string(column.type):
        return column
    return pc.cast(column, pa.string())


def as_number(column: pa.Array) -> pa.Array:
    return column if pa.types.is_float64(column.type) else pc.cast(column, pa.float64(), safe=False)
