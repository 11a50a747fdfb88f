"""`RowRules`: what a spec does to rows before columns are made, with filters, samples, joins and histories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.suggest import nearest
from sluice.etl.ops.base import LISTS, MAX_VALUES, plain
from sluice.etl.ops.hashing import mix
from sluice.etl.ops.ids import Categorify
from sluice.etl.ops.numeric import COMPARISONS
from sluice.etl.spec.input_section import WITH_COLUMNS
from sluice.etl.spec.toml_keys import (
    ONE_VALUE,
    SpecError,
    check_keys,
    read_choice,
    read_column_name,
    read_column_names,
    read_count,
    read_encoding,
    read_required,
    read_section,
    read_sections,
    read_texts,
    read_value,
)

FILTERS = (*COMPARISONS, "in", "not in", "present", "missing")
MAX_ROWS_BACK = 10_000
JOIN_FORMATS = (*WITH_COLUMNS, "csv", "json")
_OF_CSV = ("delimiter", "encoding", "decimal", "fields")
_SAMPLE, _DRAW = np.uint64(0x5A3B1E0000000001), np.uint64(0xD4A3000000000001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Keeps the rows in which a comparison with an input column's value holds. It never holds for a missing value."""

    column: str
    op: str
    value: Any = None

    def keeps(self, columns: Mapping[str, pa.Array]) -> pa.Array:
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

    negatives: float
    weight: str | None = None

    def keeps(self, label: pa.Array, keys: npt.NDArray[np.uint64]) -> pa.Array:
        share = (mix(keys ^ _SAMPLE) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return pc.or_(pc.equal(label, pa.scalar(1, label.type)), pa.array(share < self.negatives))


@dataclass(frozen=True, slots=True, kw_only=True)
class Negatives:
    """For each row with label 1, adds `each` rows of label 0 with another value of `column`. The values are drawn from
    those of the training split, in proportion to their count or evenly (`by`)."""

    column: str
    each: int
    by: str = "count"

    @property
    def learns(self) -> Categorify:
        """The operator that learns the values to draw from."""
        return Categorify(min_count=1, max_size=MAX_VALUES)

    def drawn(
        self,
        columns: Mapping[str, pa.Array],
        label: str,
        keys: npt.NDArray[np.uint64],
        state: pa.Table,
    ) -> tuple[dict[str, pa.Array], npt.NDArray[np.int64]]:
        """Returns all rows, then the drawn ones, and the number of the row from which each was made."""
        positive = np.flatnonzero(
            pc.equal(columns[label], pa.scalar(1, columns[label].type)).to_numpy(
                zero_copy_only=False
            )
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

    by: tuple[str, ...]
    order: str | None
    keep: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Adds columns of a side table, by key. With `time` and `their_time`, takes its latest row that is not later."""

    path: str
    format: str
    on: tuple[str, ...]
    columns: Mapping[str, str]
    their_on: tuple[str, ...] = ()
    """The side table's names of the columns `on`, if they differ."""
    time: str | None = None
    their_time: str | None = None
    delimiter: str = ","
    encoding: str = "utf-8"
    decimal: str = "."
    """The decimal mark of numbers in a csv file."""
    fields: tuple[str, ...] = ()
    """The names of a csv file's columns in order, if the file has no header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySpec:
    """Collects the last `length` values of a column in earlier rows of the same `by`, in `order`, oldest first.

    With `lag` n it is only the value n rows ago. With `difference` it is the present value less that one."""

    name: str
    of: str
    by: str
    order: str
    length: int = 0
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


SECTIONS = ("dedup", "join", "history", "lag", "filter", "sample", "negatives")


def read_rows(raw: Mapping[str, Any], kinds: dict[str, str], types: Mapping[str, str]) -> RowRules:
    """Reads the sections on rows. Adds the columns of joins and histories to `kinds`, for the [[column]] entries."""
    dedup = None
    if "dedup" in raw:
        section = read_section(raw, "dedup")
        check_keys(section, ("by", "order", "keep"), "dedup")
        order = "order" in section or None
        dedup = Dedup(
            by=read_column_names(section, "by", kinds, "dedup"),
            order=order and read_column_name(section, "order", kinds, "dedup", ONE_VALUE),
            keep=read_choice(section, "keep", ("first", "last"), "last", "dedup"),
        )
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
    sample = negatives = None
    if "sample" in raw:
        about = read_section(raw, "sample")
        check_keys(about, ("negatives", "weight"), "sample")
        share = float(read_required(about, "negatives", (int, float), "sample"))
        if not 0 < share <= 1:
            raise SpecError(f"sample.negatives = {share:g}: must be a share above 0, at most 1")
        weight = read_value(about, "weight", str, None, "sample")
        sample = Sample(negatives=share, weight=weight)
    if "negatives" in raw:
        about = read_section(raw, "negatives")
        check_keys(about, ("column", "each", "by"), "negatives")
        negatives = Negatives(
            column=read_column_name(about, "column", kinds, "negatives", ONE_VALUE),
            each=read_count(about, "each", 1, 100, "negatives"),
            by=read_choice(about, "by", ("count", "value"), "count", "negatives"),
        )
    return RowRules(
        dedup=dedup,
        joins=joins,
        histories=histories,
        filters=filters,
        sample=sample,
        negatives=negatives,
    )


def _read_join(
    raw: dict[str, Any], path: str, kinds: dict[str, str], types: Mapping[str, str]
) -> Join:
    keys = ("path", "format", "on", "their_on", "columns", "time", "their_time", *_OF_CSV)
    check_keys(raw, keys, path)
    form = read_choice(raw, "format", JOIN_FORMATS, "parquet", path)
    on = read_column_names(raw, "on", kinds, path, ONE_VALUE)
    if not on:
        raise SpecError(f"{path}.on: must name the columns to join by")
    their_on = read_texts(raw, "their_on", (), path)
    if their_on and len(their_on) != len(on):
        raise SpecError(
            f"{path}.their_on = {list(their_on)}: must name one column of the side table for each of "
            f"{path}.on = {list(on)}"
        )
    if form != "csv" and (key := next((key for key in _OF_CSV if key in raw), None)):
        raise SpecError(f"{path}.{key}: needs {path}.format csv, and it is {form!r}")
    delimiter, fields = (
        read_value(raw, "delimiter", str, ",", path),
        read_texts(raw, "fields", (), path),
    )
    if ("time" in raw) != ("their_time" in raw):
        raise SpecError(f"{path}: give both time and their_time, or neither")
    added = {}
    for entry in read_texts(raw, "columns", (), path):
        name, _, kind = entry.rpartition(":")
        if kind not in types:
            raise SpecError(f"{path}.columns = {entry!r}: write name:type{nearest(kind, types)}")
        if name in kinds:
            raise SpecError(f"{path}.columns = {name!r}: there is a column of this name already")
        added[name] = kind
    for name in (
        (*(their_on or on), *added, read_value(raw, "their_time", str, None, path))
        if fields
        else ()
    ):
        if name is not None and name not in fields:
            raise SpecError(f"{path}.fields: {name!r} is none of them{nearest(name, fields)}")
    if not added:
        raise SpecError(f'{path}.columns: name what to take, for instance ["age:int"]')
    time = read_column_name(raw, "time", kinds, path, ("number",)) if "time" in raw else None
    kinds.update({name: types[kind] for name, kind in added.items()})
    return Join(
        path=str(read_required(raw, "path", str, path)),
        format=form,
        on=on,
        columns=added,
        their_on=their_on,
        decimal=read_choice(raw, "decimal", (".", ","), ".", path),
        time=time,
        their_time=read_value(raw, "their_time", str, None, path),
        delimiter=delimiter,
        fields=fields,
        encoding=read_encoding(raw, path, delimiter),
    )


def _read_history(
    raw: dict[str, Any], path: str, kinds: dict[str, str], *, is_lag: bool
) -> HistorySpec:
    own = ("rows", "difference") if is_lag else ("length", "positive")
    check_keys(raw, ("name", "of", "by", "order", *own), path)
    name = str(read_required(raw, "name", str, path))
    if name in kinds or not name or name.startswith("_"):
        raise SpecError(
            f"{path}.name = {name!r}: there is a column of this name already, or it is the table's own"
        )
    difference = read_value(raw, "difference", bool, False, path)
    of = read_column_name(raw, "of", kinds, path, ("number",) if difference else ONE_VALUE)
    found = HistorySpec(
        name=name,
        of=of,
        by=read_column_name(raw, "by", kinds, path),
        order=read_column_name(raw, "order", kinds, path, ONE_VALUE),
        length=0 if is_lag else read_count(raw, "length", 0, MAX_ROWS_BACK, path),
        lag=read_count(raw, "rows", 1, MAX_ROWS_BACK, path) if is_lag else 0,
        difference=difference,
        positive=read_value(raw, "positive", bool, False, path),
    )
    kinds[name] = kinds[of] if is_lag else LISTS[kinds[of]]
    return found


def _read_filter(raw: dict[str, Any], path: str, kinds: Mapping[str, str]) -> Filter:
    check_keys(raw, ("column", "op", "value"), path)
    name, op = read_column_name(raw, "column", kinds, path), read_required(raw, "op", str, path)
    if op not in FILTERS:
        raise SpecError(f"{path}.op = {op!r}: unknown comparison{nearest(op, FILTERS)}")
    if ("value" in raw) == (op in ("present", "missing")):
        raise SpecError(f"{path}: {op} {'takes no value' if 'value' in raw else 'needs a value'}")
    right: tuple[type, ...] = {"number": (int, float), "text": (str,)}.get(kinds[name], ())
    given = raw.get("value")
    items = []
    if op in ("in", "not in") and isinstance(given, list):
        items = given
    elif "value" in raw:
        items = [given]
    for item in items:
        if not right or not isinstance(item, right) or isinstance(item, bool):
            raise SpecError(f"{path}.value = {given!r}: column {name!r} holds {kinds[name]}")
    if op in ("in", "not in") and not isinstance(given, list):
        raise SpecError(f"{path}.value = {given!r}: must be a list")
    return Filter(column=name, op=op, value=given)
