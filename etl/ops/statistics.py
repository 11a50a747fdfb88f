"""Operators that replace a value by a statistic of the rows that have it: `count`, `target` and `group`.

With `past = true` a row of the training split only gets what was known before it: see `sluice.etl.ops.past_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import (
    FINITE,
    POSITIVE,
    Fitted,
    Limit,
    as_number,
    as_text,
    between,
    ends_of,
    value_counts,
    values_of,
)
from sluice.etl.ops.exact_sums import count_moments, deviation, quotient, read_moments
from sluice.etl.ops.hashing import Lookup, Whole, hash_texts, mix
from sluice.etl.ops.past_values import (
    Timeline,
    add_moments,
    add_running_sums,
    moments_of,
    split_moments,
)

T = TypeVar("T")
_FOLD = np.uint64(0xF01DF01D00000001)
_NULL_TEXT = "n"
_VALUE = "v"


def _keys(column: pa.Array) -> pa.Array:
    """Returns the column as texts, with a null as a value of its own."""
    return pc.fill_null(pc.binary_join_element_wise(_VALUE, column, ""), _NULL_TEXT)


@dataclass(frozen=True, kw_only=True)
class _Encoded(Fitted):
    """The parameters of all operators here."""

    past: bool = False
    """Whether a training row gets only what was known before it."""
    past_step: Annotated[
        float, FINITE, Limit(lambda x: x >= 0, "must be 0 (exact times) or above")
    ] = 0.0
    """The length of a moment. With longer moments the state holds fewer of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.past_step and not self.past:
            raise OperatorError(f"past_step = {self.past_step:g}: is for past = true alone")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("time",) if self.past else ()

    @property
    def described(self) -> dict[str, Any]:
        """The description of the operator. Its hash identifies fitted states, so parameters of `past` are left out if
        `past` is false."""
        whole = super().described
        return (
            whole
            if self.past
            else {name: given for name, given in whole.items() if name not in ("past", "past_step")}
        )

    def _stamped(self, keys: pa.Array, column: pa.Array) -> pa.Array:
        """Returns the keys, with `past` together with the moments of the rows."""
        return add_moments(column.flatten()[-1], self.past_step, keys) if self.past else keys

    def _cut(self, stamped: pa.Array) -> dict[str, pa.Array]:
        """Returns the keys and moments of a state. It is the reverse of `_stamped`."""
        return (
            dict(zip(("value", "at"), split_moments(stamped), strict=True))
            if self.past
            else {"value": stamped}
        )

    def _rank(self, known: Timeline, column: pa.Array) -> Whole | int:
        """Returns the number of moments before each row. Without `past`, all are before it."""
        if not self.past:
            return len(known.moments)
        return known.rank(*moments_of(column.flatten()[-1], self.past_step))


@dataclass(frozen=True, kw_only=True)
class Count(_Encoded):
    """The number of rows in which the value occurs; with `share = true` its share of the rows with any value. Unseen
    values have 0, nulls stay."""

    name = "count"
    takes = ("text",)
    share: bool = False

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        return value_counts(self._stamped(self._values(column), column).drop_null())

    def learn(self, counted: pa.Table) -> pa.Table:
        table = pa.table({**self._cut(_one(counted["value"])), "count": _one(counted["count"])})
        if self.past:
            return add_running_sums(table, ("count",))
        return table.sort_by("value").combine_chunks()

    def prepare(self, state: pa.Table) -> Any:
        known, counts = Timeline.of(state), state["count"].to_numpy()
        return known, np.append(counts, 0), known.totals(counts)  # the last count is for place -1

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        known, counts, totals = state
        values, rank = self._values(column), self._rank(known, column)
        found = counts[known.before(hash_texts(values), rank)].astype(np.float64)
        return pa.array(
            found / np.maximum(totals[rank], 1) if self.share else found,
            mask=np.asarray(pc.is_null(values)),
        )

    def _values(self, column: pa.Array) -> pa.Array:
        return column.flatten()[0] if self.past else column


@dataclass(frozen=True, kw_only=True)
class Target(_Encoded):
    """The share of clicks among the rows with the value. It is smoothed as if `smoothing` more rows had the share of
    all rows.

    A training row is encoded from the other `folds` - 1 folds, or with `past = true` from earlier rows. So its own
    label is not in its feature. Other rows and the server use the whole training split. A row's fold depends on its
    key. A null is a value like others."""

    name = "target"
    takes = ("text",)
    may_be_null = False
    folds: Annotated[int, between(2, 100)] = 5
    smoothing: Annotated[float, POSITIVE] = 20.0

    @property
    def needs(self) -> tuple[str, ...]:
        return ("label", "time" if self.past else "key")

    def _folds(self, keys: pa.Array) -> Whole:
        """Returns the fold of each row. A row without a key gets the number `folds`: no row was learned from in that
        fold."""
        raw = np.asarray(keys.fill_null(0)).view(np.uint64)
        fold = (mix(raw ^ _FOLD) % np.uint64(self.folds)).astype(np.int64)
        fold[np.asarray(pc.is_null(keys))] = self.folds
        return fold

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        value, label, keys = column.flatten()
        if self.past:
            stamped = self._stamped(_keys(value), column)
            return value_counts(pc.binary_join_element_wise(label.cast(pa.string()), stamped, ""))
        # The fold and the label in one number, which `learn` takes apart.
        cell = self._folds(keys) * 2 + np.asarray(label.cast(pa.int64()))
        cells = pa.array(np.char.mod("%03d", cell))
        return value_counts(pc.binary_join_element_wise(cells, _keys(value), ""))

    def learn(self, counted: pa.Table) -> pa.Table:
        names, counts = _one(counted["value"]), counted["count"].to_numpy()
        if self.past:
            by = "at"
            values, places = split_moments(pc.utf8_slice_codeunits(names, 1))
            clicked = np.asarray(pc.starts_with(names, "1"))
        else:
            by = "fold"
            values = pc.utf8_slice_codeunits(names, 3)
            cell = pc.utf8_slice_codeunits(names, 0, 3).cast(pa.int32())
            places, clicked = np.divmod(np.asarray(cell), 2)
        table = pa.table(
            {"value": values, by: places, "count": counts, "clicks": np.where(clicked, counts, 0)}
        )
        grouped = table.group_by(["value", by]).aggregate([("count", "sum"), ("clicks", "sum")])
        renamed = grouped.rename_columns(["value", by, "count", "clicks"])
        if self.past:
            return add_running_sums(renamed, ("count", "clicks"))
        return renamed.sort_by([("value", "ascending"), ("fold", "ascending")]).combine_chunks()

    def prepare(self, state: pa.Table) -> Any:
        """Returns an array of encodings, with a row for each value and a column for the fold that is left out. The last
        row is for unseen values, the last column for rows without a fold. With `past`, returns what was known at each
        time."""
        if self.past:
            timeline = Timeline.of(state)
            both = [state[name].to_numpy() for name in ("clicks", "count")]
            totals = [timeline.totals(known) for known in both]
            return timeline, [np.append(known, 0) for known in both], totals
        values = pc.unique(_one(state["value"]))
        place = np.asarray(pc.index_in(_one(state["value"]), values))
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

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        value, _, keys = column.flatten()
        if self.past:
            timeline, sums, totals = state
            rank = self._rank(timeline, column)
            clicks, count = (
                known[timeline.before(hash_texts(_keys(value)), rank)] for known in sums
            )
            prior = totals[0][rank] / np.maximum(totals[1][rank], 1.0)
            return pa.array((clicks + self.smoothing * prior) / (count + self.smoothing))
        lookup, encodings = state
        return pa.array(encodings[lookup.places(hash_texts(_keys(value))), self._folds(keys)])


@dataclass(frozen=True, kw_only=True)
class Group(_Encoded):
    """A statistic of the second column's numbers over all rows that have the first column's value. `of` is `mean`,
    `sum`, `std`, `count`, `min` or `max`. The feature is null if these rows have no numbers."""

    name = "group"
    takes = ("row",)
    of: Literal["mean", "sum", "std", "count", "min", "max"] = "mean"

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        keys, numbers = self._pair(column)
        keys = self._stamped(keys, column)
        values, nulls = values_of(numbers)
        finite = np.flatnonzero(
            np.isfinite(values) if nulls is None else np.isfinite(values) & ~nulls
        )
        coded = keys.take(pa.array(finite)).dictionary_encode()
        values, kinds = values[finite], coded.dictionary
        place = np.asarray(coded.indices)
        if self.of not in ("min", "max"):
            return count_moments(values, place, kinds)
        ends = ends_of(self.of, place, values, len(kinds))
        named = pc.binary_join_element_wise(pa.array(ends).cast(pa.string()), kinds, ":")
        return named, pa.array(np.ones(len(kinds), np.int64))

    def learn(self, counted: pa.Table) -> pa.Table:
        if self.of not in ("min", "max"):
            digits, sums = read_moments(counted)
            return self._accumulate(
                sums,
                lambda known, more: [a + b for a, b in zip(known, more, strict=True)],
                lambda sums: {
                    "count": sums[0],
                    "sum": quotient(sums[1], 1 << digits),
                    "std": deviation(digits, *sums),
                },
                {"count": pa.int64(), "sum": pa.float64(), "std": pa.float64()},
            )
        further = min if self.of == "min" else max
        ends: dict[str, float] = {}
        for name in counted["value"].to_pylist():
            number, _, key = name.partition(":")
            ends[key] = further(ends.get(key, float(number)), float(number))
        return self._accumulate(ends, further, lambda end: {"end": end}, {"end": pa.float64()})

    def _accumulate(
        self,
        parts: Mapping[str, T],
        add: Callable[[T, T], T],
        describe: Callable[[T], dict[str, Any]],
        types: Mapping[str, pa.DataType],
    ) -> pa.Table:
        """Returns the state: what is known of each key or, with `past`, of each key up to each moment."""
        cut = self._cut(pa.array(list(parts), pa.string()))
        places = zip(*(names.to_pylist() for names in cut.values()), parts, strict=True)
        rows: list[dict[str, Any]] = []
        known: Any = None
        last = None
        for key, *at, part in sorted(places):
            known = add(known, parts[part]) if key == last else parts[part]
            last = key
            rows.append({"value": key, "at": at and at[0], **describe(known)})
        schema = {name: names.type for name, names in cut.items()}
        return pa.Table.from_pylist(rows, pa.schema({**schema, **types}))

    def prepare(self, state: pa.Table) -> Any:
        if self.of in ("min", "max", "count", "sum", "std"):
            statistic = state["end" if self.of in ("min", "max") else self.of].to_numpy()
        else:
            statistic = state["sum"].to_numpy() / np.maximum(state["count"].to_numpy(), 1)
        return Timeline.of(state), np.append(statistic.astype(np.float64), 0.0)

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        known, statistic = state
        hashes = hash_texts(self._pair(column)[0])
        place = known.before(hashes, self._rank(known, column))
        return pa.array(statistic[place], mask=place < 0)

    def _pair(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        fields = (column.flatten()[0] if self.past else column).flatten()
        if len(fields) != 2:
            raise OperatorError("group takes two columns: what groups, and a number")
        return _keys(as_text(fields[0])), as_number(fields[1])


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
