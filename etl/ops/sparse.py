"""Operators that give ids: categorify (a fitted vocabulary) and hash.

Ids: 0 padding, 1 null, then the buckets for values out of the vocabulary, then values by falling count, ties by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.ops.base import FIRST, MAX_ID, NULL, Fitted, Operator, OperatorError
from etl.ops.hashing import hash_texts
from etl.ops.lookup import Lookup

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MAX_VALUES = 20_000_000  # what a driver of a few GiB collects; more distinct values than that are better hashed
_BUCKET_SALT = 0x0F0F


@dataclass(frozen=True, kw_only=True)
class Hash(Operator):
    """Spreads values over `size` ids by our hash; needs no vocabulary. Nulls have id 1."""

    name: ClassVar[str] = "hash"
    takes: ClassVar[str] = "text"
    gives: ClassVar[str] = "id"
    size: int
    salt: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_ID - FIRST:
            raise OperatorError(f"size = {self.size}: must be from 1 to {MAX_ID - FIRST}")

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        ids = (hash_texts(column, self.salt) % np.uint64(self.size)).astype(np.int32) + np.int32(FIRST)
        return _with_nulls(ids, column)

    def cardinality(self, _state: pa.Table | None) -> int:
        return FIRST + self.size


@dataclass(frozen=True, kw_only=True)
class Categorify(Fitted):
    """Gives each value that occurs at least `min_count` times, the `max_size` most frequent at most, an id of its own;
    the others share `oov` buckets by hash."""

    name: ClassVar[str] = "categorify"
    takes: ClassVar[str] = "text"
    gives: ClassVar[str] = "id"
    min_count: int = 1
    max_size: int = _MAX_VALUES
    oov: int = 1

    def __post_init__(self) -> None:
        for key, low, high in (("min_count", 1, 2**62), ("max_size", 1, _MAX_VALUES), ("oov", 1, 2**24)):
            if not low <= getattr(self, key) <= high:
                raise OperatorError(f"{key} = {getattr(self, key)}: must be from {low} to {high}")

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        counted = pc.value_counts(column.drop_null())
        return counted.field("values"), counted.field("counts")

    def fit(self, counts: DataFrame) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as sql

        place = sql.row_number().over(Window.partitionBy("key").orderBy(sql.desc("count"), "value"))
        return counts.where(sql.col("count") >= self.min_count).withColumn("place", place).where(
            sql.col("place") <= self.max_size)

    def learn(self, kept: pa.Table) -> pa.Table:
        return kept.sort_by("place").select(["value", "count"]).combine_chunks()

    def prepare(self, state: pa.Table) -> Lookup:
        return Lookup.of(state["value"].combine_chunks() if state.num_rows else pa.array([], pa.string()))

    def apply(self, column: pa.Array, state: Lookup) -> pa.Array:
        hashes = hash_texts(column)
        places = state.places(hashes)
        ids = places + np.int32(FIRST + self.oov)
        unknown = np.flatnonzero(places < 0)
        if len(unknown):
            if self.oov == 1:
                ids[unknown] = FIRST
            else:
                bucket = hash_texts(column.take(pa.array(unknown)), _BUCKET_SALT) % np.uint64(self.oov)
                ids[unknown] = bucket.astype(np.int32) + np.int32(FIRST)
        return _with_nulls(ids, column)

    def cardinality(self, state: pa.Table | None) -> int:
        return FIRST + self.oov + (state.num_rows if state is not None else 0)


def _with_nulls(ids: np.ndarray, column: pa.Array) -> pa.Array:
    if column.null_count:
        ids[pc.is_null(column).to_numpy(zero_copy_only=False)] = NULL
    return pa.array(ids, pa.int32())
