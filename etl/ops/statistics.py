"""Operators that replace a value by a statistic of the rows that have it: `count`, `target` and `group`.

With `past = true` a row of the training split only gets what was known before it: see `sluice.etl.ops.past_values`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import Fitted, as_number, as_text, value_counts, values_of, within
from sluice.etl.ops.exact_sums import parts, quotient, root
from sluice.etl.ops.hash_table import Lookup
from sluice.etl.ops.hashing import hash_texts, mix
from sluice.etl.ops.past_values import (
    Timeline,
    add_moments,
    add_running_sums,
    check_step,
    index_values,
    moments_of,
    split_moments,
)

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
    past_step: float = 0.0
    """The length of a moment. With longer moments the state holds fewer of them."""

    def __post_init__(self) -> None:
        check_step(self.past, self.past_step)

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


@dataclass(frozen=True, kw_only=True)
class Count(_Encoded):
    """The number of rows in which the value occurs; with `share = true` its share of the rows with any value. Unseen
    values have 0, nulls stay."""

    name = "count"
    takes = ("text",)
    share: bool = False

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        if self.past:
            value, time = column.flatten()
            column = add_moments(time, self.past_step, value)
        return value_counts(column.drop_null())

    def learn(self, counted: pa.Table) -> pa.Table:
        if self.past:
            values, at = split_moments(_one(counted["value"]))
            return add_running_sums(
                pa.table({"value": values, "at": at, "count": _one(counted["count"])}), ("count",)
            )
        return counted.select(["value", "count"]).sort_by("value").combine_chunks()

    def prepare(self, state: pa.Table) -> Any:
        if self.past:
            timeline, counts = Timeline.of(state), state["count"].to_numpy()
            return timeline, np.append(counts, 0), timeline.totals(counts)
        counts = state["count"].to_numpy().astype(np.float64)
        if self.share:
            counts = counts / max(1.0, float(counts.sum()))
        # The last count is for place -1.
        return Lookup.of(_one(state["value"])), np.append(counts, 0.0)

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        if self.past:
            timeline, counts, totals = state
            value, time = column.flatten()
            rank = timeline.rank(*moments_of(time, self.past_step))
            found = counts[timeline.before(hash_texts(value), rank)].astype(np.float64)
            return pa.array(
                found / np.maximum(totals[rank], 1) if self.share else found,
                mask=pc.is_null(value).to_numpy(zero_copy_only=False),
            )
        lookup, counts = state
        nulls = pc.is_null(column).to_numpy(zero_copy_only=False)
        return pa.array(counts[lookup.places(hash_texts(column))], mask=nulls)


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
    folds: int = 5
    smoothing: float = 20.0

    @property
    def needs(self) -> tuple[str, ...]:
        return ("label", "time" if self.past else "key")

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, folds=(2, 100))
        if not (self.smoothing > 0 and math.isfinite(self.smoothing)):
            raise OperatorError(f"smoothing = {self.smoothing}: must be a number above 0")

    def _folds(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """Returns the fold of each row. A row without a key gets the number `folds`: no row was learned from in that
        fold."""
        raw = keys.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
        fold = (mix(raw ^ _FOLD) % np.uint64(self.folds)).astype(np.int64)
        fold[pc.is_null(keys).to_numpy(zero_copy_only=False)] = self.folds
        return fold

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        value, label, keys = column.flatten()
        if self.past:
            stamp = add_moments(keys, self.past_step, _keys(value))
            return value_counts(pc.binary_join_element_wise(label.cast(pa.string()), stamp, ""))
        # The fold and the label in one number, which `learn` takes apart.
        cell = self._folds(keys) * 2 + label.cast(pa.int64()).to_numpy(zero_copy_only=False)
        cells = pa.array(np.char.mod("%03d", cell))
        return value_counts(pc.binary_join_element_wise(cells, _keys(value), ""))

    def learn(self, counted: pa.Table) -> pa.Table:
        names, counts = _one(counted["value"]), counted["count"].to_numpy()
        if self.past:
            by = "at"
            values, places = split_moments(pc.utf8_slice_codeunits(names, 1))
            clicked = pc.starts_with(names, "1").to_numpy(zero_copy_only=False)
        else:
            by = "fold"
            values = pc.utf8_slice_codeunits(names, 3)
            cell = pc.utf8_slice_codeunits(names, 0, 3).cast(pa.int32())
            places, clicked = np.divmod(cell.to_numpy(zero_copy_only=False), 2)
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
        place = pc.index_in(_one(state["value"]), values).to_numpy(zero_copy_only=False)
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
            rank = timeline.rank(*moments_of(keys, self.past_step))
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
    of: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of not in ("mean", "sum", "std", "count", "min", "max"):
            raise OperatorError(f"of = {self.of!r}: must be mean, sum, std, count, min or max")

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        keys, numbers = self._pair(column)
        if self.past:
            keys = add_moments(column.flatten()[-1], self.past_step, keys)
        values, nulls = values_of(numbers)
        finite = np.flatnonzero(
            np.isfinite(values) if nulls is None else np.isfinite(values) & ~nulls
        )
        coded = keys.take(pa.array(finite)).dictionary_encode()
        values = values[finite]
        place = coded.indices.to_numpy(zero_copy_only=False)
        kinds = coded.dictionary
        if self.of in ("min", "max"):
            ends = np.full(len(kinds), math.inf if self.of == "min" else -math.inf)
            (np.minimum if self.of == "min" else np.maximum).at(ends, place, values)
            named = pc.binary_join_element_wise(pa.array(ends).cast(pa.string()), kinds, ":")
            return named, pa.array(np.ones(len(kinds), np.int64))
        names, sums = (
            [pc.binary_join_element_wise("n:", kinds, "")],
            [np.bincount(place, minlength=len(kinds))],
        )
        for power in (1, 2):
            for scale, whole in parts(values, power).items():
                group_sums = np.zeros(len(kinds), np.int64)
                np.add.at(group_sums, place, whole.astype(np.int64))
                names.append(pc.binary_join_element_wise(f"{power},{scale}:", kinds, ""))
                sums.append(group_sums)
        return pa.concat_arrays(names), pa.array(np.concatenate(sums).astype(np.int64))

    def learn(self, counted: pa.Table) -> pa.Table:
        return self._extremes(counted) if self.of in ("min", "max") else self._moments(counted)

    def _extremes(self, kept: pa.Table) -> pa.Table:
        """Returns the least or the largest number of each key, from the least or largest numbers of all batches."""
        cut = pc.extract_regex(_one(kept["value"]), "(?s)^(?P<number>[^:]*):(?P<key>.*)$")
        found = pa.table({"value": cut.field("key"), "end": cut.field("number").cast(pa.float64())})
        ends = (
            found.group_by("value").aggregate([("end", self.of)]).rename_columns(["value", "end"])
        )
        if not self.past:
            return ends.sort_by("value").combine_chunks()
        values, at = split_moments(_one(ends["value"]))
        ordered = add_running_sums(
            pa.table({"value": values, "at": at, "end": _one(ends["end"])}), ()
        )
        _, place = index_values(ordered)
        further = np.minimum if self.of == "min" else np.maximum
        whole = [
            further.accumulate(part)
            for part in np.split(ordered["end"].to_numpy(), np.flatnonzero(np.diff(place)) + 1)
        ]
        return ordered.set_column(2, "end", pa.array(np.concatenate(whole), pa.float64()))

    def _moments(self, kept: pa.Table) -> pa.Table:
        """Returns the statistics of each key or, with `past`, of each key and moment, over the rows up to that moment.
        The sums are exact."""
        sums: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for name, count in zip(kept["value"].to_pylist(), kept["count"].to_pylist(), strict=True):
            head, _, key = name.partition(":")
            power, _, scale = head.partition(",")
            sums.setdefault(key, {}).setdefault(power, []).append((int(scale or 0), count))
        stamps = pa.array(list(sums), pa.string())
        names, times = split_moments(stamps) if self.past else (stamps, pa.nulls(len(stamps)))
        table: dict[str, list[Any]] = {name: [] for name in ("value", "at", "count", "sum", "std")}
        scales = (
            scale for found in sums.values() for power in "12" for scale, _ in found.get(power, ())
        )
        finest = max(0, -min(scales, default=0))
        last = None
        rows = 0
        first = 0
        second = 0
        for key, at, stamp in sorted(zip(names.to_pylist(), times.to_pylist(), sums, strict=True)):
            if key != last:
                rows = first = second = 0
            last, found = key, sums[stamp]
            rows += found["n"][0][1]
            first, second = (
                known + sum(count << (scale + finest) for scale, count in found.get(power, ()))
                for known, power in ((first, "1"), (second, "2"))
            )
            deviation = root((second * rows << finest) - first * first, rows * rows << 2 * finest)
            row = (key, at, rows, quotient(first, 1 << finest), deviation)
            for values, value in zip(table.values(), row, strict=True):
                values.append(value)
        if not self.past:
            del table["at"]
        kinds = {"value": pa.string(), "count": pa.int64()}
        return pa.table(
            table, schema=pa.schema([(name, kinds.get(name, pa.float64())) for name in table])
        )

    def prepare(self, state: pa.Table) -> Any:
        known = Timeline.of(state) if self.past else Lookup.of(_one(state["value"]))
        if self.of in ("min", "max"):
            return known, np.append(state["end"].to_numpy(), 0.0)
        counts, sums = state["count"].to_numpy(), state["sum"].to_numpy()
        chosen = {
            "count": counts,
            "sum": sums,
            "mean": sums / np.maximum(counts, 1),
            "std": state["std"].to_numpy(),
        }
        return known, np.append(chosen[self.of].astype(np.float64), 0.0)

    def apply(self, column: pa.Array, state: Any) -> pa.Array:
        known, statistic = state
        hashes = hash_texts(self._pair(column)[0])
        if self.past:
            place = known.before(
                hashes, known.rank(*moments_of(column.flatten()[-1], self.past_step))
            )
        else:
            place = known.places(hashes)
        return pa.array(statistic[place], mask=place < 0)

    def _pair(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        fields = (column.flatten()[0] if self.past else column).flatten()
        if len(fields) != 2:
            raise OperatorError("group takes two columns: what groups, and a number")
        return _keys(as_text(fields[0])), as_number(fields[1])


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
