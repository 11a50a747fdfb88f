"""`RowRules`: what a spec does to rows before columns are made, with filters, samples, joins and histories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.suggest import nearest
from sluice.etl.ops.base import LISTS, MAX_VALUES, Arrays, Operator, between, plain, values_of
from sluice.etl.ops.hashing import Hashes, Whole, mix
from sluice.etl.ops.ids import Categorify
from sluice.etl.ops.numeric import COMPARISONS
from sluice.etl.ops.timestamps import ParseTime
from sluice.etl.spec.input_section import read_time
from sluice.etl.spec.table_section import SHARE
from sluice.etl.spec.toml_keys import (
    ONE_VALUE,
    Column,
    Columns,
    InputColumn,
    NumberColumn,
    SpecError,
    ValueColumn,
    check_keys,
    read_encoding,
    read_into,
    read_section,
    read_sections,
    read_value,
)

RowsBack = Annotated[int, between(1, 10_000)]
_OF_CSV = ("delimiter", "encoding", "decimal", "fields")
_SAMPLE, _DRAW = np.uint64(0x5A3B1E0000000001), np.uint64(0xD4A3000000000001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Keeps the rows in which a comparison with an input column's value holds. It never holds for a missing value."""

    column: Column
    op: Literal["==", "!=", "<=", "<", ">=", ">", "in", "not in", "present", "missing"]
    value: Any = None

    def keeps(self, columns: Arrays) -> pa.Array:
        values = plain(columns[self.column])
        if self.op in ("present", "missing"):
            return pc.is_valid(values) if self.op == "present" else pc.is_null(values)
        if self.op in ("in", "not in"):
            listed = pc.is_in(values, pa.array(self.value, values.type))
            return listed if self.op == "in" else pc.and_(pc.is_valid(values), pc.invert(listed))
        return pc.fill_null(COMPARISONS[self.op](values, pa.scalar(self.value, values.type)), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Keeps a share of the rows with label 0, chosen by their keys. `weight` names the column that compensates for the
    dropped rows."""

    negatives: Annotated[float, SHARE]
    weight: str | None = None

    def keeps(self, label: pa.Array, keys: Hashes) -> pa.Array:
        share = (mix(keys ^ _SAMPLE) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return pc.or_(pc.equal(label, pa.scalar(1, label.type)), pa.array(share < self.negatives))


@dataclass(frozen=True, kw_only=True)
class InverseShare(Operator):
    """The weight of a row of a sample that keeps a `share` of label 0: 1 for label 1, 1 / share for label 0."""

    name = "inverse_share"
    share: float

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values, _ = values_of(column)
        return pa.array(np.where(values > 0, 1.0, 1.0 / self.share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Negatives:
    """For each row with label 1, adds `each` rows of label 0 with another value of `column`. The values are drawn from
    those of the training split, in proportion to their count or evenly (`by`)."""

    column: ValueColumn
    each: Annotated[int, between(1, 100)] = 1
    by: Literal["count", "value"] = "count"

    @property
    def learns(self) -> Categorify:
        """The operator that learns the values to draw from."""
        return Categorify(min_count=1, max_size=MAX_VALUES)

    def drawn(
        self,
        columns: Arrays,
        label: str,
        keys: Hashes,
        state: pa.Table,
    ) -> tuple[dict[str, pa.Array], Whole]:
        """Returns all rows, then the drawn ones, and the number of the row from which each was made."""
        positive = np.flatnonzero(
            np.asarray(pc.equal(columns[label], pa.scalar(1, columns[label].type)))
        )
        if not len(positive) or state.num_rows < 2:
            return dict(columns), np.arange(len(columns[label]))
        from_row = np.repeat(positive, self.each)
        turn = np.tile(np.arange(self.each, dtype=np.uint64), len(positive))
        bits = mix(keys[from_row] ^ _DRAW ^ mix(turn + np.uint64(1)))
        if self.by == "count":
            ends = np.cumsum(state["count"].to_numpy())
            drawn = np.searchsorted(
                ends, (bits % np.uint64(ends[-1])).astype(np.int64), side="right"
            )
        else:
            drawn = (bits % np.uint64(state.num_rows)).astype(np.int64)
        values = state["value"].combine_chunks()
        own = (
            pc.index_in(columns[self.column].cast(pa.string()), values)
            .fill_null(-1)
            .to_numpy()[from_row]
        )
        drawn = np.where(drawn == own, (drawn + 1) % state.num_rows, drawn)
        made = {name: values.take(pa.array(from_row)) for name, values in columns.items()}
        others, kind = values.take(pa.array(drawn)), columns[self.column].type
        is_coded = pa.types.is_dictionary(kind)
        made[self.column] = others.dictionary_encode() if is_coded else others.cast(kind)
        made[label] = pa.array(np.zeros(len(from_row), np.int8)).cast(columns[label].type)
        origin = np.concatenate([np.arange(len(columns[label])), from_row])
        return {name: pa.concat_arrays([columns[name], made[name]]) for name in columns}, origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Dedup:
    """Keeps one of the rows with equal values in `by` (in all columns, if empty): the first or last in `order`
    (`keep`)."""

    by: Columns = ()
    order: ValueColumn | None = None
    keep: Literal["first", "last"] = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Adds columns of a side table, by key. With `time` and `their_time`, takes its latest row that is not later."""

    path: str
    format: Literal["parquet", "delta", "iceberg", "csv", "json"] = "parquet"
    on: Annotated[tuple[str, ...], InputColumn(ONE_VALUE)]
    columns: Mapping[str, str]
    their_on: tuple[str, ...] = ()
    """The side table's names of the columns `on`, if they differ."""
    time: NumberColumn | None = None
    their_time: str | None = None
    their_format: ParseTime | None = None
    """Reads the texts of `their_time`, if they are no numbers. In a spec: `their_time = {name = …, format = …}`."""
    delimiter: str = ","
    encoding: str = "utf-8"
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers in a csv file."""
    fields: tuple[str, ...] = ()
    """The names of a csv file's columns in order, if the file has no header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySpec:
    """Collects the last `length` values of a column in earlier rows of the same `by`, in `order`, oldest first.

    With `lag` n it is only the value n rows ago. With `difference` it is the present value less that one."""

    name: str
    of: ValueColumn
    by: Column
    order: ValueColumn
    length: RowsBack
    lag: int = 0
    difference: bool = False
    positive: bool = False
    """Whether only rows with label 1 enter the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """All rules on rows. They are applied in this order: dedup, joins, histories, filters, samples."""

    dedup: Dedup | None = None
    joins: tuple[Join, ...] = ()
    histories: tuple[HistorySpec, ...] = ()
    filters: tuple[Filter, ...] = ()
    sample: Sample | None = None
    negatives: Negatives | None = None

    @property
    def relational(self) -> bool:
        """Whether rows are combined with other rows. Spark SQL does this directly after parsing."""
        return bool(self.dedup or self.joins or self.histories)

    @property
    def looks_back(self) -> bool:
        """Whether columns come from other rows, so that serving needs some of these rows."""
        return bool(self.joins or self.histories)

    @property
    def population(self) -> Literal["all", "sampled"]:
        """The rows whose share of label 1 a model learns: all rows, also of a sample whose weights make up for the rows
        that it leaves out, or only those of the sample and the drawn ones."""
        sample = self.sample
        is_whole = sample is None or sample.weight is not None or sample.negatives == 1
        return "all" if is_whole and self.negatives is None else "sampled"

    def sources_of(self, columns: Iterable[str]) -> set[str]:
        """Returns these columns, and all that joins and histories need to make them."""
        needed = set(columns)
        for history in reversed(self.histories):  # it may be of an earlier one
            if history.name in needed:
                needed |= {history.by, history.order, *([history.of] * history.difference)}
        for join in reversed(self.joins):
            if needed & join.columns.keys():
                needed |= {*join.on, *filter(None, [join.time])}
        return needed


SECTIONS = ("dedup", "join", "history", "lag", "filter", "sample", "negatives")


def read_rows(raw: Mapping[str, Any], kinds: dict[str, str], types: Mapping[str, str]) -> RowRules:
    """Reads the sections on rows. Adds the columns of joins and histories to `kinds`, for the [[column]] entries."""
    singles: dict[str, Any] = {
        key: read_into(kind, read_section(raw, key), key, kinds)
        for key, kind in (("dedup", Dedup), ("sample", Sample))
        if key in raw
    }
    joins = tuple(
        _read_join(entry, path, kinds, types) for path, entry in read_sections(raw, "join")
    )
    histories = tuple(
        _read_history(entry, path, kinds, is_lag=key == "lag")
        for key in ("history", "lag")
        for path, entry in read_sections(raw, key)
    )
    filters = tuple(
        _read_filter(entry, path, kinds) for path, entry in read_sections(raw, "filter")
    )
    if "negatives" in raw:
        section = read_section(raw, "negatives")
        singles["negatives"] = read_into(Negatives, section, "negatives", kinds)
    return RowRules(joins=joins, histories=histories, filters=filters, **singles)


def _read_join(
    raw: dict[str, Any], path: str, kinds: dict[str, str], types: Mapping[str, str]
) -> Join:
    added = {}
    for entry in read_value(raw.pop("columns", []), tuple[str, ...], f"{path}.columns"):
        name, _, kind = entry.rpartition(":")
        if kind not in types:
            raise SpecError(f"{path}.columns = {entry!r}: write name:type{nearest(kind, types)}")
        if name in kinds or name.startswith("_"):
            raise SpecError(
                f"{path}.columns = {name!r}: there is a column of this name already, or it is the table's own"
            )
        added[name] = kind
    if not added:
        raise SpecError(f'{path}.columns: name what to take, for instance ["age:int"]')
    reader = None
    if isinstance(about := raw.get("their_time"), dict):
        check_keys(about, ("name", "format", "zone"), f"{path}.their_time")
        reader = read_time(about, "float", f"{path}.their_time")
        raw["their_time"] = about.get("name")
    join = read_into(Join, raw, path, kinds, columns=added, their_format=reader)
    if not join.on:
        raise SpecError(f"{path}.on: must name the columns to join by")
    if join.their_on and len(join.their_on) != len(join.on):
        raise SpecError(
            f"{path}.their_on = {list(join.their_on)}: must name one column of the side table for each of "
            f"{path}.on = {list(join.on)}"
        )
    if join.format != "csv" and (key := next((key for key in _OF_CSV if key in raw), None)):
        raise SpecError(f"{path}.{key}: needs {path}.format csv, and it is {join.format!r}")
    if (join.time is None) != (join.their_time is None):
        raise SpecError(f"{path}: give both time and their_time, or neither")
    needed = [*(join.their_on or join.on), *added, join.their_time]
    for name in filter(None, needed) if join.fields else ():
        if name not in join.fields:
            raise SpecError(f"{path}.fields: {name!r} is none of them{nearest(name, join.fields)}")
    kinds.update({name: types[kind] for name, kind in added.items()})
    return replace(join, encoding=read_encoding(join.encoding, path, join.delimiter))


def _read_history(
    raw: dict[str, Any], path: str, kinds: dict[str, str], *, is_lag: bool
) -> HistorySpec:
    given: dict[str, Any] = {"lag": 0, "difference": False}
    if is_lag:
        rows = read_value(raw.pop("rows", 1), RowsBack, f"{path}.rows")
        given = {"lag": rows, "length": 0, "positive": False}
    history = read_into(HistorySpec, raw, path, kinds, **given)
    name = history.name
    if name in kinds or not name or name.startswith("_"):
        raise SpecError(
            f"{path}.name = {name!r}: there is a column of this name already, or it is the table's own"
        )
    if history.difference:
        read_value(history.of, NumberColumn, f"{path}.of", kinds)
    kinds[name] = kinds[history.of] if is_lag else LISTS[kinds[history.of]]
    return history


def _read_filter(raw: dict[str, Any], path: str, kinds: Mapping[str, str]) -> Filter:
    rule = read_into(Filter, raw, path, kinds)
    given, op = rule.value, rule.op
    if op in ("present", "missing"):
        if "value" in raw:
            raise SpecError(f"{path}: {op} takes no value")
        return rule
    if "value" not in raw:
        raise SpecError(f"{path}: {op} needs a value")
    is_listed = op in ("in", "not in")
    if is_listed and not isinstance(given, list):
        raise SpecError(f"{path}.value = {given!r}: must be a list")
    kind = kinds[rule.column]
    right: tuple[type, ...] = {"number": (int, float), "text": (str,)}.get(kind, ())
    for item in given if is_listed else [given]:
        if not isinstance(item, right) or isinstance(item, bool):
            raise SpecError(f"{path}.value = {given!r}: column {rule.column!r} holds {kind}")
    return rule
