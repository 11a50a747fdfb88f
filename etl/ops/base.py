"""What an operator is: `Operator`, a frozen description with one `apply` for Spark, loader and serving alike.

Between the operators of a chain a column is one of these kinds: `text` (strings), `number` (float64), `id` (int32
without nulls, int64 where there are more than `NARROW_IDS`), or a list of one of them in each row: `texts`, `numbers`,
`ids`; `row` is a struct of several input columns, which only the first operator of a chain can take. An operator on
single values takes lists too, element by element. One that learns from data is `Fitted`: workers count batch by batch,
Spark adds the counts up, and it learns from the sums; so it never sees rows one by one, and what it learns does not
depend on how rows were spread.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import UsageError

SCALARS = ("text", "number", "id")
LISTS = {"text": "texts", "number": "numbers", "id": "ids"}
KINDS = (*SCALARS, *LISTS.values(), "row")
PADDING = 0
NULL = 1
FIRST = 2
"""The ids that every sparse column shares: 0 pads a bag, 1 is a missing value, all others begin at 2."""
MAX_ID = 2**32 - 1
NARROW_IDS = 2**31
"""A column of more ids than these is stored as int64, and its ids are unsigned words of 32 bits in a loader."""
NO_NUMBER = -(2**63)
"""The value that a column of stored whole numbers has where a number is missing."""
MAX_VALUES = 20_000_000
"""The number of values that all of a job's fitted states may hold together: as many as a driver of a few GiB
collects."""


class OperatorError(UsageError):
    """Parameters that cannot be: the message names the parameter and what would do."""


@dataclass(frozen=True, kw_only=True)
class Operator(ABC):
    """A feature operator. Its parameters are the dataclass's fields; a spec's keys are their names."""

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]]
    """The kinds it works on, best first: a column of any other kind is turned into the first, if it can be."""
    gives: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()
    """The kinds of the columns of a `row`, where it takes no others."""
    may_be_null: ClassVar[bool] = True
    """Whether its result may have nulls, unless another operator fills them."""
    reads: ClassVar[bool] = False
    """Whether it turns a value that it cannot read into null: each job counts these values, see
    `sluice.etl.apply.unreadable`."""
    keeps_order: ClassVar[bool] = False
    """Whether of two numbers the larger never gives the smaller result, or never the larger one: then the results of
    the least and the largest value of a batch bound all of its results."""
    online_too: ClassVar[bool] = False
    """Whether numbers of a fixed size, none of them null, are all that it needs: a column of one id a row that is left
    to the loader from it on is stored so."""
    left_as: ClassVar[str] = "double"
    """The type that a column of ids is then stored as: `double`, with NaN where a value is missing, or `int64`, as
    `whole_numbers` makes them."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What it must know about a row besides the column: `label`, `key`, `time`. It then gets a struct (value,
        *needs).

        Rows that were not learned from, as in serving, have no key and no time."""
        return ()

    @property
    def described(self) -> dict[str, Any]:
        """The operator's name and parameters, as plain values."""
        return {"op": self.name, **dataclasses.asdict(self)}

    @abstractmethod
    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        """Returns the new values of a column, one for each old one; `state` is what `prepare` made, None if nothing is
        fitted."""

    def whole_numbers(self, column: pa.Array) -> pa.Array:
        """The whole numbers to store if `left_as` is int64; `apply` takes those as well."""
        raise NotImplementedError

    def cardinality(self, _state: pa.Table | None) -> int | None:
        """The number of rows that an embedding of the result needs; only for operators that give ids."""
        return None

    def kind(self, _taken: str) -> str:
        """The kind of its result when it takes a column of that kind."""
        return self.gives


@dataclass(frozen=True, kw_only=True)
class Fitted(Operator):
    """An operator that learns a table, kept with the version it belongs to."""

    of_all_splits: ClassVar[bool] = False
    """Whether it counts the rows of all splits: only an operator that places rows, and becomes no column, may do so."""
    may_be_stored: ClassVar[bool] = False
    """Whether the table is (value, count) by falling count, ties by value, so that it may lie in files, too large for a
    driver, and be joined to rows."""

    @abstractmethod
    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Counts one batch: returns names (strings) and whole numbers, which are added up name by name over all
        batches."""

    @property
    def least(self) -> int:
        """The least sum that is kept, if it is above 1; sums of numbers, which may be negative, are all kept."""
        return 1

    @abstractmethod
    def learn(self, counted: pa.Table) -> pa.Table:
        """Makes the state from the columns (value, count) that were kept, in any order of rows."""

    @abstractmethod
    def prepare(self, state: pa.Table) -> Any:
        """The structure in which `apply` looks values up; each worker makes it once."""

    def update(self, old: pa.Table, _new: pa.Table) -> pa.Table:
        """The state after more data: `old`, unless the operator can add to it without changing what it gave before."""
        return old


def as_text(column: pa.Array) -> pa.Array:
    """A column as text: text stays, numbers become their shortest decimal form."""
    if pa.types.is_string(column.type):
        return column
    return pc.cast(column, pa.string())


def as_number(column: pa.Array) -> pa.Array:
    return column if pa.types.is_float64(column.type) else pc.cast(column, pa.float64(), safe=False)


def values_of(column: pa.Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_] | None]:
    """The column's numbers as numpy, with 0 in place of nulls, and a mask of the nulls."""
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False), None
    return (
        pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False),
        pc.is_null(column).to_numpy(zero_copy_only=False),
    )


def finite_of(column: pa.Array) -> npt.NDArray[np.float64]:
    """Only the finite numbers of a column."""
    values, nulls = values_of(column)
    return values[np.isfinite(values) if nulls is None else np.isfinite(values) & ~nulls]


def is_wide(cardinality: int | None) -> bool:
    """Whether a column of so many ids does not fit int32."""
    return cardinality is not None and cardinality > NARROW_IDS


def id_kind(cardinality: int | None) -> type[np.int32 | np.uint32]:
    """The type in which a loader has ids of a column of so many."""
    return np.uint32 if is_wide(cardinality) else np.int32


def spread(keys: npt.NDArray[np.uint64], size: int) -> npt.NDArray[Any]:
    """Ids from FIRST on, `size` of them, by the remainders of hashes."""
    ids: npt.NDArray[Any] = (keys % np.uint64(size)).astype(
        np.int64 if is_wide(FIRST + size) else np.int32
    )
    ids += FIRST
    return ids


def ids_of(ids: npt.NDArray[Any], column: pa.Array) -> pa.Array:
    """Ids as stored, with NULL where the column has nulls."""
    if column.null_count:
        ids[pc.is_null(column).to_numpy(zero_copy_only=False)] = NULL
    return pa.array(ids)


def within(op: Operator, **bounds: tuple[float, float]) -> None:
    """Refuses, by its name, a parameter outside its bounds."""
    for key, (low, high) in bounds.items():
        if not low <= getattr(op, key) <= high:
            raise OperatorError(
                f"{key} = {getattr(op, key)}: must be from {low:,} to {high:,}".replace(",", "")
            )
