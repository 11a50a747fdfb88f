"""Operators that give ids: hash, modulus, cross, categorify (a fitted vocabulary) and vocabulary (the user's own).

Ids: 0 padding, 1 null, then the buckets for values outside the vocabulary, then values by falling count, ties by value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import (
    DIFFERENT,
    FIRST,
    MAX_ID,
    MAX_VALUES,
    NO_NUMBER,
    NULL,
    Fitted,
    Operator,
    between,
    ids_of,
    spread,
    value_counts,
)
from sluice.etl.ops.hashing import Lookup, Narrow, hash_digits, hash_rows, hash_texts

_BUCKET_SALT = 0x0F0F
_MOST = 2**63 - 1
_Buckets = Annotated[int, between(1, 2**24)]


@dataclass(frozen=True, kw_only=True)
class _Sized(Operator):
    """An operator that gives `size` ids."""

    gives = "id"
    size: Annotated[int, between(1, MAX_ID - FIRST)]

    def cardinality(self, _state: pa.Table | None) -> int:
        return FIRST + self.size


@dataclass(frozen=True, kw_only=True)
class Hash(_Sized):
    """Spreads values over `size` ids by our hash; needs no vocabulary. Nulls have id 1."""

    name = "hash"
    takes = ("text",)
    takes_stored = True
    salt: int = 0

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        hashes = hash_digits if pa.types.is_integer(column.type) else hash_texts
        return ids_of(spread(hashes(column, self.salt), self.size), column)


@dataclass(frozen=True, kw_only=True)
class Cross(_Sized):
    """Spreads combinations of several columns' values over `size` ids by our hash; a null is a value like others."""

    name = "cross"
    takes = ("row",)
    salt: int = 0

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return pa.array(spread(hash_rows(column.flatten(), self.salt), self.size))


@dataclass(frozen=True, kw_only=True)
class Modulus(_Sized):
    """2 + the whole number modulo `size`, never negative: exact for signed and unsigned 64 bits. A value that is not a
    whole number of 64 bits has id 1, as null has."""

    name = "modulus"
    takes = ("text",)
    online_too = True
    left_as = "int64"

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        numbers = (
            column if pa.types.is_int64(column.type) else self.whole_numbers(column)
        ).to_numpy()
        ids = spread(np.mod(numbers, np.int64(self.size)).view(np.uint64), self.size)
        ids[numbers == NO_NUMBER] = NULL
        return pa.array(ids)

    def whole_numbers(self, column: pa.Array) -> pa.Array:
        """Returns the column's whole numbers. A number that signed 64 bits cannot hold, or that equals NO_NUMBER, is
        replaced by its remainder."""
        whole = pc.match_substring_regex(column, r"^-?[0-9]{1,20}$")
        negative = pc.starts_with(column, "-")
        try:
            signed = pc.if_else(pc.and_(whole, negative), column, "0").cast(pa.int64())
            unsigned = pc.if_else(pc.and_(whole, pc.invert(negative)), column, "0").cast(
                pa.uint64()
            )
        except pa.ArrowInvalid:  # a number of 20 digits may exceed 64 bits
            return pa.array(map(self._stored_number, column.to_pylist()), pa.int64())
        low = np.asarray(signed.fill_null(0))
        high = np.asarray(unsigned.fill_null(0))
        numbers = np.where(high > _MOST, high % np.uint64(self.size), high).astype(np.int64) + low
        numbers[low == NO_NUMBER] = NO_NUMBER % self.size
        numbers[~np.asarray(whole.fill_null(False))] = NO_NUMBER
        return pa.array(numbers)

    def _stored_number(self, text: str | None) -> int:
        if not text or not re.fullmatch("-?[0-9]{1,20}", text):
            return NO_NUMBER
        number = int(text)
        if NO_NUMBER < number <= _MOST:
            return number
        return number % self.size if NO_NUMBER <= number < 2**64 else NO_NUMBER


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Operator):
    """The user's own vocabulary: ids follow the order of `values`; all others share `oov` buckets by hash."""

    name = "vocabulary"
    takes = ("text",)
    gives = "id"
    values: Annotated[tuple[str, ...], DIFFERENT]
    oov: _Buckets = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_lookup", Lookup.of(pa.array(self.values, pa.string())))

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return looked_up(column, getattr(self, "_lookup"), self.oov)  # noqa: B009  no field: it is not a parameter

    def cardinality(self, _state: pa.Table | None) -> int:
        return FIRST + self.oov + len(self.values)


@dataclass(frozen=True, kw_only=True)
class Categorify(Fitted):
    """Gives each value that occurs at least `min_count` times an id of its own, but only to the `max_size` most
    frequent; the others share `oov` buckets by hash. Columns with the same `joint` name share one vocabulary."""

    name = "categorify"
    takes = ("text",)
    gives = "id"
    may_be_stored = True
    min_count: Annotated[int, between(1, 2**62)] = 1
    max_size: Annotated[int, between(1, MAX_VALUES)] = MAX_VALUES
    oov: _Buckets = 1
    joint: str = ""

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return value_counts(column.drop_null())

    @property
    def least(self) -> int:
        return self.min_count

    def learn(self, counted: pa.Table) -> pa.Table:
        ordered = counted.sort_by([("count", "descending"), ("value", "ascending")])
        return ordered.select(["value", "count"]).slice(0, self.max_size).combine_chunks()

    def update(self, old: pa.Table, new: pa.Table) -> pa.Table:
        """Adds values not seen before, up to `max_size` in all; the known ones keep their ids."""
        known = pc.is_in(new["value"], old["value"].combine_chunks())
        added = new.filter(pc.invert(known)).slice(0, max(0, self.max_size - old.num_rows))
        return pa.concat_tables([old, added]).combine_chunks()

    def prepare(self, state: pa.Table) -> Lookup:
        return Lookup.of(state["value"].combine_chunks())

    def apply(self, column: pa.Array, state: Lookup) -> pa.Array:
        return looked_up(column, state, self.oov)

    def cardinality(self, state: pa.Table | None) -> int:
        return FIRST + self.oov + (state.num_rows if state is not None else 0)


def looked_up(column: pa.Array, lookup: Lookup, oov: int) -> pa.Array:
    """Returns the id of each value: from its place in the vocabulary, or of a bucket."""
    hashes = hash_texts(column)
    ids: Narrow = lookup.places(hashes)
    unknown = np.flatnonzero(ids < 0)
    ids = ids + np.int32(FIRST + oov)
    if len(unknown):
        if oov == 1:
            ids[unknown] = FIRST
        else:
            bucket = hash_texts(column.take(pa.array(unknown)), _BUCKET_SALT) % np.uint64(oov)
            ids[unknown] = bucket.astype(np.int32) + np.int32(FIRST)
    return ids_of(ids, column)
