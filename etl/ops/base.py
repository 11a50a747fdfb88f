"""`Operator`: a frozen description with one `apply` for Spark, loader and serving alike.

Between the operators of a chain a column is of one of these kinds: `text` (strings), `number` (float64), `id` (int32
without nulls, int64 if there are more than `NARROW_IDS`), or a list of them in each row: `texts`, `numbers`, `ids`.
`row` is a struct of several input columns. Only the first operator of a chain can take it. An operator on single values
also takes lists, element by element.

An operator that learns from data is `Fitted`. Workers count batch by batch, the engine adds the counts up, and the
operator learns from the sums. So the result does not depend on the distribution of rows over workers.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.common.suggest import nearest
from sluice.etl.ops.hashing import AnyArray, Flags, Floats, Hashes, codes_of

SCALARS = ("text", "number", "id")
LISTS = {"text": "texts", "number": "numbers", "id": "ids"}
KINDS = (*SCALARS, *LISTS.values(), "row")
PADDING = 0
NULL = 1
FIRST = 2
"""The ids that every sparse column shares: 0 pads a bag, 1 is a missing value, and other ids begin at 2."""
MAX_ID = 2**32 - 1
NARROW_IDS = 2**31
"""A column of more ids is stored as int64, and a loader gives its ids as unsigned words of 32 bits."""
NO_NUMBER = -(2**63)
"""The value of a missing number in a column of stored whole numbers."""
MAX_VALUES = 20_000_000
"""The number of values that all fitted states of a job may hold together. A driver of a few GiB can collect them."""

Arrays = Mapping[str, pa.Array]
"""The columns of some rows, by name."""
Columns = dict[str, pa.Array]
"""Columns to which others may be added."""
BETWEEN = "\x1f"
"""The character between the parts of a key. No keyboard types it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of a parameter, in the hint of its field: `Annotated[int, between(1, 8)]`."""

    holds: Callable[[Any], Any]
    text: str


def between(low: float, high: float) -> Limit:
    return Limit(lambda value: low <= value <= high, f"must be from {low} to {high}")


FINITE = Limit(math.isfinite, "must be a finite number")
POSITIVE = Limit(lambda value: 0 < value < math.inf, "must be above 0")
DIFFERENT = Limit(
    lambda values: 0 < len(set(values)) == len(values), "must be one or more different texts"
)


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Returns the hints of a dataclass's fields, with their limits."""
    return get_type_hints(kind, include_extras=True)


def problem(value: Any, hint: Any) -> str:
    """Returns what is wrong with a value, by the limits and the choices in its hint. Empty: nothing."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return "" if value in parts else f"unknown value{nearest(value, [*filter(None, parts)])}"
    if kind is Annotated:
        for limit in hint.__metadata__:
            if isinstance(limit, Limit) and not limit.holds(value):
                return limit.text
    if kind is tuple and isinstance(value, tuple):
        return next(filter(None, (problem(item, parts[0]) for item in value)), "")
    # A union has its limits in its first part.
    return problem(value, parts[0]) if parts and value is not None else ""


@dataclass(frozen=True, kw_only=True)
class Operator(ABC):
    """A feature operator. The dataclass's fields are its parameters and the keys in a spec."""

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ("number",)
    """The kinds that it takes, best first. A column of another kind is converted to the first, if possible."""
    takes_stored: ClassVar[bool] = False
    """Whether it also takes whole numbers and bytes as they are stored, with the results that their texts have."""
    gives: ClassVar[str] = "number"
    needs: ClassVar[tuple[str, ...]] = ()
    """What it needs of a row besides the column: `label`, `key`. It then gets a struct (value, *needs).

    Rows that were not learned from, as in serving, have no key."""
    may_be_null: ClassVar[bool] = True
    """Whether its result may have nulls."""
    replaces_missing: ClassVar[bool] = False
    """Whether it is meant to make a value of a missing one, also in a label."""
    reads: ClassVar[bool] = False
    """Whether it makes null of a value that it cannot read. Each job counts these values: see
    `sluice.etl.apply.counts.unread`."""
    online_too: ClassVar[bool] = False
    """Whether it only needs numbers of a fixed size without nulls. A sparse column whose operators are left to the
    loader from this one on is then stored as such numbers."""
    left_as: ClassVar[str] = "double"
    """The type of such a stored column: `double`, with NaN for a missing value, or `int64`, from `whole_numbers`."""

    def __post_init__(self) -> None:
        """Raises OperatorError if a parameter is beyond the limits of its hint."""
        for f in dataclasses.fields(self):
            if wrong := problem(value := getattr(self, f.name), hints_of(type(self))[f.name]):
                raise OperatorError(f"{f.name} = {value!r}: {wrong}")

    @property
    def described(self) -> dict[str, Any]:
        """The operator's name and parameters, as plain values."""
        return {"op": self.name, **dataclasses.asdict(self)}

    @abstractmethod
    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        """Returns the new values of a column, one for each old one. `state` is the result of `prepare`, or None if
        nothing is fitted."""

    def whole_numbers(self, column: pa.Array) -> pa.Array:
        """Returns the whole numbers to store if `left_as` is int64. `apply` takes them too."""
        raise NotImplementedError

    def cardinality(self, _state: pa.Table | None) -> int | None:
        """Returns the number of rows that an embedding of the result needs. Only for operators that give ids."""
        return None

    def kind(self, _taken: str) -> str:
        """Returns the kind of its result for a column of that kind."""
        return self.gives


@dataclass(frozen=True, kw_only=True)
class Fitted(Operator):
    """An operator that learns a table. A version keeps the table."""

    of_all_splits: ClassVar[bool] = False
    """Whether it counts the rows of all splits. Only an operator that places rows, and makes no column, may do so."""
    may_be_stored: ClassVar[bool] = False
    """Whether the table is (value, count) by falling count, ties by value. It may then be in files, too large for a
    driver, and be joined to rows."""

    @abstractmethod
    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Counts one batch. Returns names (strings) and whole numbers, which are added up by name over all batches."""

    @property
    def least(self) -> int:
        """The least sum that is kept. With 1 all sums are kept, also negative sums of numbers."""
        return 1

    @abstractmethod
    def learn(self, counted: pa.Table) -> pa.Table:
        """Makes the state from the kept sums: columns (value, count) in any order of rows."""

    def undecided(self, counted: pa.Table) -> pa.Table | None:
        """Returns the sums that are too coarse to learn from. Their values are then counted again, by `count_within`,
        and the new sums replace them. None: all sums can be used."""
        return None

    def count_within(self, column: pa.Array, ranges: pa.Table) -> tuple[pa.Array, pa.Array]:
        """Counts only the values of these sums, which `undecided` returned."""
        raise NotImplementedError

    def is_close(self, _state: pa.Table) -> bool:
        """Whether values were counted again to learn the state."""
        return False

    @abstractmethod
    def prepare(self, state: pa.Table) -> Any:
        """Returns the structure in which `apply` looks values up. Each worker makes it once."""

    def names_of(self, values: pa.Array) -> pa.Array:
        """Returns the names under which the state has these values."""
        return values

    def update(self, old: pa.Table, _new: pa.Table) -> pa.Table:
        """Returns the state after more data. It is `old`, unless the operator can add to it without changing earlier
        results."""
        return old


def plain(column: pa.Array) -> pa.Array:
    """Returns a column without a dictionary."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def on_distinct(function: Callable[[pa.Array], pa.Array], column: pa.Array) -> pa.Array:
    """Returns what a function makes of each value of a column. If a dictionary has fewer values than the column has
    rows, the function gets the distinct values, and null."""
    if not pa.types.is_dictionary(column.type) or len(column.dictionary) >= len(column):
        return function(plain(column))
    distinct = pa.concat_arrays([column.dictionary, pa.nulls(1, column.dictionary.type)])
    return function(distinct).take(pa.array(codes_of(column)))


def as_text(column: pa.Array) -> pa.Array:
    """Returns a column as text. Numbers become their shortest decimal form."""
    if pa.types.is_string(column.type):
        return column
    return pc.cast(column, pa.string())


def key_texts(columns: Sequence[pa.Array]) -> pa.Array:
    """Returns the key of each row in one or more columns, as text. Rows with equal values have equal keys, and a key
    with a null is null. Columns of one type have the same keys in a job, in a table and in a server."""
    # Adding 0.0 makes 0.0 of -0.0.
    texts = [
        as_text(pc.add(column, 0.0) if pa.types.is_floating(column.type) else column)
        for column in columns
    ]
    if len(texts) == 1:
        return texts[0]
    return pc.binary_join_element_wise(*(escaped(part) for part in texts), BETWEEN)


def escaped(texts: pa.Array, *marks: str) -> pa.Array:
    """Returns texts in which `BETWEEN` and other marks are escaped, so that no two keys become equal."""
    for number, character in enumerate(("\x1b", BETWEEN, *marks)):
        texts = pc.replace_substring(texts, character, f"\x1b{number}")
    return texts


def as_number(column: pa.Array) -> pa.Array:
    return column if pa.types.is_float64(column.type) else pc.cast(column, pa.float64(), safe=False)


def as_one_column(columns: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """Returns the only column, or a struct of several."""
    if len(columns) == 1:
        return columns[0]
    return pa.StructArray.from_arrays([plain(column) for column in columns], list(names))


def value_counts(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Returns the distinct values of a column, and how often each occurs."""
    if not pa.types.is_dictionary(column.type):
        counted = pc.value_counts(column)
        return counted.field("values"), counted.field("counts")
    counts = np.bincount(column.indices, minlength=len(column.dictionary))
    there = np.flatnonzero(counts)
    return column.dictionary.take(pa.array(there)), pa.array(counts[there])


def values_of(column: pa.Array) -> tuple[Floats, Flags | None]:
    """Returns the column's numbers as numpy, with 0 for nulls, and a mask of the nulls."""
    if not column.null_count:
        return np.asarray(column), None
    return (
        np.asarray(pc.fill_null(column, 0.0)),
        np.asarray(pc.is_null(column)),
    )


def finite_of(column: pa.Array) -> Floats:
    """Returns the finite numbers of a column."""
    values, nulls = values_of(column)
    return values[np.isfinite(values) if nulls is None else np.isfinite(values) & ~nulls]


def is_wide(cardinality: int | None) -> bool:
    """Returns whether so many ids do not fit int32."""
    return cardinality is not None and cardinality > NARROW_IDS


def id_kind(cardinality: int | None) -> type[np.int32 | np.uint32]:
    """Returns a loader's type for a column of so many ids."""
    return np.uint32 if is_wide(cardinality) else np.int32


def spread(keys: Hashes, size: int) -> AnyArray:
    """Returns ids from FIRST on, below FIRST + `size`, from the remainders of hashes."""
    ids: AnyArray = (keys % np.uint64(size)).astype(np.int64 if is_wide(FIRST + size) else np.int32)
    ids += FIRST
    return ids


def ids_of(ids: AnyArray, column: pa.Array) -> pa.Array:
    """Returns ids as they are stored, with NULL where the column has nulls."""
    if column.null_count:
        ids[np.asarray(pc.is_null(column))] = NULL
    return pa.array(ids)
