"""Operators that replace a value by a statistic of the rows that have it: `count` and `target`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import POSITIVE, Fitted, between, value_counts
from sluice.etl.ops.hashing import Lookup, Whole, hash_texts, mix

_FOLD = np.uint64(0xF01DF01D00000001)
_NULL_TEXT = "n"
_VALUE = "v"


def _keys(column: pa.Array) -> pa.Array:
    """Returns the column as texts, with a null as a value of its own."""
    return pc.fill_null(pc.binary_join_element_wise(_VALUE, column, ""), _NULL_TEXT)


@dataclass(frozen=True, kw_only=True)
class Count(Fitted):
    """The number of rows in which the value occurs; with `share = true` its share of the rows with any value. Unseen
    values have 0, nulls stay."""

    name = "count"
    takes = ("text",)
    share: bool = False

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return value_counts(column.drop_null())

    def learn(self, counted: pa.Table) -> pa.Table:
        columns = {name: counted[name].combine_chunks() for name in ("value", "count")}
        return pa.table(columns).sort_by("value").combine_chunks()

    def prepare(self, state: pa.Table) -> Any:
        counts = state["count"].to_numpy()
        # The last count is for place -1.
        return Lookup.of(state["value"].combine_chunks()), np.append(counts, 0), counts.sum()

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        lookup, counts, total = state
        seen = counts[lookup.places(hash_texts(column))].astype(np.float64)
        return pa.array(
            seen / np.maximum(total, 1) if self.share else seen,
            mask=np.asarray(pc.is_null(column)),
        )


@dataclass(frozen=True, kw_only=True)
class Target(Fitted):
    """The share of clicks among the rows with the value. It is smoothed as if `smoothing` more rows had the share of
    all rows.

    A training row is encoded from the other `folds` - 1 folds. So its own label is not in its feature. Other rows and
    the server use the whole training split. A row's fold depends on its key. A null is a value like others."""

    name = "target"
    takes = ("text",)
    needs = ("label", "key")
    may_be_null = False
    folds: Annotated[int, between(2, 100)] = 5
    smoothing: Annotated[float, POSITIVE] = 20.0

    def _folds(self, keys: pa.Array) -> Whole:
        """Returns the fold of each row. A row without a key gets the number `folds`: no row was learned from in that
        fold."""
        raw = np.asarray(keys.fill_null(0)).view(np.uint64)
        fold = (mix(raw ^ _FOLD) % np.uint64(self.folds)).astype(np.int64)
        fold[np.asarray(pc.is_null(keys))] = self.folds
        return fold

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        value, label, keys = column.flatten()
        # The fold and the label in one number, which `learn` takes apart.
        cell = self._folds(keys) * 2 + np.asarray(label.cast(pa.int64()))
        cells = pa.array(np.char.mod("%03d", cell))
        return value_counts(pc.binary_join_element_wise(cells, _keys(value), ""))

    def learn(self, counted: pa.Table) -> pa.Table:
        names, counts = counted["value"].combine_chunks(), counted["count"].to_numpy()
        cell = pc.utf8_slice_codeunits(names, 0, 3).cast(pa.int32())
        folds, clicked = np.divmod(np.asarray(cell), 2)
        table = pa.table(
            {
                "value": pc.utf8_slice_codeunits(names, 3),
                "fold": folds,
                "count": counts,
                "clicks": np.where(clicked, counts, 0),
            }
        )
        grouped = table.group_by(["value", "fold"]).aggregate([("count", "sum"), ("clicks", "sum")])
        renamed = grouped.rename_columns(["value", "fold", "count", "clicks"])
        return renamed.sort_by([("value", "ascending"), ("fold", "ascending")]).combine_chunks()

    def prepare(self, state: pa.Table) -> Any:
        """Returns an array of encodings, with a row for each value and a column for the fold that is left out. The last
        row is for unseen values, the last column for rows without a fold."""
        column = state["value"].combine_chunks()
        values = pc.unique(column)
        place = np.asarray(pc.index_in(column, values))
        sums = np.zeros((2, len(values) + 1, self.folds + 1))
        for number, name in enumerate(("clicks", "count")):
            np.add.at(sums[number], (place, state["fold"].to_numpy()), state[name].to_numpy())
        # The sums without a fold: the sums over all folds, less the fold's own.
        without = sums.sum(axis=2, keepdims=True) - sums
        whole = without[:, :-1].sum(axis=1)
        prior = whole[0] / np.maximum(whole[1], 1.0)
        return Lookup.of(values), (without[0] + self.smoothing * prior) / (
            without[1] + self.smoothing
        )

    def names_of(self, values: pa.Array) -> pa.Array:
        return _keys(values)

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        value, _, keys = column.flatten()
        lookup, encodings = state
        return pa.array(encodings[lookup.places(hash_texts(_keys(value))), self._folds(keys)])
