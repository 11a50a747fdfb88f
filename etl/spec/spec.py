"""A feature spec: what the input is, which rows stay, which columns the table gets and how each is made.

`Spec.read` checks all of it at once; errors name the key's path in the file and the nearest right name.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from sluice.common.suggest import nearest
from sluice.etl.ops import Fitted, OperatorError
from sluice.etl.ops.chain import step
from sluice.etl.ops.timestamps import ParseTime
from sluice.etl.ops.user_function import Python
from sluice.etl.schema import Field
from sluice.etl.spec.columns import ColumnSpec, is_the_tables_own, operator, read_columns
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.placement import read_placement
from sluice.etl.spec.row_identity import Identity
from sluice.etl.spec.row_rules import SECTIONS, RowRules, read_rows
from sluice.etl.spec.table_transform import TableTransform, read_transforms
from sluice.etl.spec.time_order import Steps
from sluice.etl.spec.toml_keys import (
    SpecError,
    column,
    encoding,
    known,
    needed,
    section,
    sections,
    texts,
    value,
)

__all__ = ["Input", "Spec", "SpecError", "TableSpec", "is_the_tables_own"]

FORMATS = ("tsv", "csv", "json", "parquet", "delta")
WITH_LISTS = ("json", "parquet", "delta")
INPUT_TYPES = {
    "int": "number",
    "float": "number",
    "text": "text",
    "texts": "texts",
    "floats": "numbers",
}
DEFAULT_SPLIT = {"train": 0.8, "validation": 0.1, "test": 0.1}
DRIFTS = ("psi", "unseen", "nulls")
_SPLIT_NAME = r"[A-Za-z0-9_-]+"
_RANGE = re.compile(r"([A-Za-z_]+)(\d+)\.\.([A-Za-z_]+)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The raw data: its format, and its columns in order with their types."""

    format: str
    columns: Mapping[str, str]
    delimiter: str = "\t"
    header: bool = False
    multiline: bool = False
    """Whether a quoted field may hold a line's end (csv only)."""
    optional: tuple[str, ...] = ()
    """Columns that a file may lack; they are null there. In tsv and csv they are the last, and a line ends before
    them."""
    was: Mapping[str, str] = field(default_factory=dict)
    """The name or the type that a column had in an earlier version of the table."""
    times: Mapping[str, ParseTime] = field(default_factory=dict)
    """How the texts of those number columns are read that are written as times."""
    encoding: str = "utf-8"
    """How lines of text are encoded, by Python's name for it."""
    decimal: str = "."
    """What stands before the fractions of numbers in lines of text: a point, or a comma."""
    marks: tuple[str, ...] = ()
    """Columns that an audit adds to those of a file: they decide no order."""
    place: str | None = None
    """The name of a column that no file has: the share of the input's rows that lie before a row, files by name."""

    @property
    def read_as(self) -> dict[str, str]:
        """The columns with the types that they have in files: times are texts there."""
        return {name: "text" if name in self.times else kind for name, kind in self.columns.items()}

    @property
    def with_place(self) -> dict[str, str]:
        """The columns that a row has before it meets others, with their types."""
        return {**self.columns, **({self.place: "float"} if self.place else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """How rows are placed in splits and files."""

    seed: int = 0
    key: tuple[str, ...] = ()
    """Input columns by which rows are recognised, instead of all that the table's first version has."""
    row_group_rows: int = 32_768
    file_rows: int = 524_288
    split: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_SPLIT))
    """Each split's share of the rows; the hash of a row decides which split it is in."""
    split_by: tuple[str, ...] = ()
    """Columns whose hash decides the split instead, so that rows which agree in them stay in one split."""
    split_column: str | None = None
    """A text column that holds the split's name instead."""
    split_time: str | None = None
    """A number column that decides instead: each split begins at its bound in `split_from`."""
    split_from: tuple[float, ...] = ()
    unlabelled: str | None = None
    """The last split, for all rows without a label. Without it these rows are rejected."""
    order: str | None = None
    """A number column by which rows are sorted, over files and within them, instead of by hash."""
    order_step: float = 3600.0
    """The step of `order` at whose multiples files are cut."""
    partition: str | None = None
    """A column whose values name the folders of files; Delta's readers can leave files out by it."""
    together: str | None = None
    """A column by which rows are grouped: those that agree in it are next to each other."""
    plain_lists: bool = False
    """Whether bags are stored as Parquet lists, for readers other than Sluice's, instead of packed bytes."""

    @property
    def training(self) -> str:
        """The split that is learned from, here and by a trainer: `train`, or the first one if none has that name."""
        return "train" if "train" in self.split else next(iter(self.split))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One fitted state: its key, which operator learns it, in which pass, and from which columns."""

    key: str
    op: Fitted
    level: int
    users: tuple[tuple[ColumnSpec, int], ...]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole spec, known to be consistent."""

    input: Input
    table: TableSpec
    columns: tuple[ColumnSpec, ...]
    text: str = field(repr=False)
    transforms: tuple[TableTransform, ...] = ()
    """What is left to whoever reads the table, on top of its columns."""
    rows: RowRules = field(default_factory=RowRules)
    drift: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """For psi, unseen and nulls: the value from which a new version gets a warning, and the one from which it is
    refused."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind (see `sluice.etl.ops.base`) of every column that operators may start from."""
    identity: Identity | None = None
    """The rule of the existing table that a job adds to; None: this spec begins a table."""
    name: str = "spec"
    """The name of the spec in messages."""
    permission: Permission = NOTHING
    """Which functions of the spec may be imported. It goes with the spec, also to Spark's workers."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Spec:
        """Reads a spec that its user wrote: see `own`."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SpecError(f"{path}: the spec cannot be read ({reason})") from None
        return cls.own(text, str(path))

    @classmethod
    def own(cls, text: str, name: str = "spec") -> Spec:
        """Parses the user's own spec, not one that came with a table: the functions that it names are imported, and a
        spec that shows a model its label is refused."""
        spec = cls.parse(text, name)
        if where := next(_uses_of_label(spec), None):
            raise SpecError(
                f"{name}: {where}, which is the label: a row's features must not depend on its own label. "
                "Name another column; a [[history]] or [[lag]] of the label holds labels of earlier rows"
            )
        if told := next(_signs_of_drawn(spec), None):
            raise SpecError(
                f"{name}: {told}, of which [negatives] draws other values: what never occurred would show "
                "a drawn row, and so its label. Use target, hash or cross, or past = true"
            )
        spec = replace(spec, permission=Permission(functions=spec.functions))
        try:
            spec.imported()
        except OperatorError as error:
            raise SpecError(f"{name}: {error}") from None
        return spec

    @classmethod
    def parse(cls, text: str, name: str = "spec", permission: Permission = NOTHING) -> Spec:
        """Parses a spec without importing anything, whoever wrote it: `imported` does that, if `permission` allows
        it."""
        try:
            return replace(_spec(tomllib.loads(text), text), name=name, permission=permission)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{name}: not TOML: {error}") from None
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None

    @cached_property
    def rule(self) -> Identity:
        """The rule by which rows are recognised."""
        return self.identity or Identity.of(self)

    @property
    def types(self) -> dict[str, str]:
        """Types of the input's columns, and of those that joins and lags add to them, one value a row."""
        found = self.input.with_place
        for join in self.rows.joins:
            found |= join.columns
        for lag in self.rows.histories:
            if lag.lag:
                found[lag.name] = found[lag.of]
        return found

    @property
    def unused(self) -> tuple[str, ...]:
        """The input columns that no column of the table is made from, and no rule names."""
        table, rows = self.table, self.rows
        named = {
            *table.key,
            *table.split_by,
            table.split_column,
            table.split_time,
            table.order,
            table.partition,
            table.together,
            *(name for column in self.columns for name in column.sources),
            *(name for one in rows.histories for name in (one.of, one.by, one.order)),
            *(name for join in rows.joins for name in (*join.on, join.time)),
            *(one.column for one in rows.filters),
            rows.negatives.column if rows.negatives else None,
            *((*rows.dedup.by, rows.dedup.order) if rows.dedup else ()),
        }
        return tuple(name for name in self.input.columns if name not in named)

    @property
    def functions(self) -> frozenset[str]:
        """The functions that its `python` operators and its transforms name, as "module:function"."""
        found = {
            op.function for column in self.columns for op in column.ops if isinstance(op, Python)
        }
        return frozenset(found | {one.function for one in self.transforms if one.function})

    def imported(self) -> dict[str, Callable[..., Any]]:
        """Imports those of its operators; OperatorError if one may not or cannot be imported."""
        found: dict[str, Callable[..., Any]] = {}
        for made in self.columns:
            for op in made.ops:
                if isinstance(op, Python):
                    try:
                        found[op.function] = self.permission.load(
                            op.function, f"the spec of {self.name}"
                        )
                        op.check(found[op.function])
                    except OperatorError as error:
                        raise OperatorError(f"column {made.name!r}: {error}") from None
        return found

    @property
    def label(self) -> str:
        """The input column that the label is made from."""
        return next(c.sources[0] for c in self.columns if c.role == "label")

    def labels(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """What the label's operators, if it has any, make of the rows."""
        made = next(c for c in self.columns if c.role == "label")
        return functools.reduce(
            lambda values, op: step(op, values, None, {}), made.ops, columns[self.label]
        )

    @property
    def hidden(self) -> tuple[ColumnSpec, ...]:
        """Columns that are learned only because rules on rows need them: they do not become columns of the table."""
        found = []
        if self.rows.negatives:
            found.append(
                ColumnSpec(
                    name="rows/negatives",
                    sources=(self.rows.negatives.column,),
                    role="sparse",
                    ops=(self.rows.negatives.learns,),
                )
            )
        if self.table.order:
            found.append(
                ColumnSpec(
                    name="rows/order",
                    sources=(self.table.order,),
                    role="sparse",
                    ops=(Steps(step=self.table.order_step),),
                )
            )
        return tuple(found)

    @property
    def fitted(self) -> tuple[Learned, ...]:
        """Every state that must be learned, once."""
        found: dict[str, Learned] = {}
        for spec in (*self.columns, *self.hidden):
            for key, op, number in spec.fitted:
                before = found[key].users if key in found else ()
                found[key] = Learned(
                    key=key, op=op, level=spec.level(number), users=(*before, (spec, number))
                )
        return tuple(found.values())

    @property
    def learned_from_labels(self) -> dict[str, Fitted]:
        """The operators that learn from labels, by the keys of their states."""
        return {
            learned.key: learned.op
            for learned in self.fitted
            if "label" in learned.op.needs
            or any(self.label in column.sources for column, _ in learned.users)
        }

    @property
    def levels(self) -> int:
        """The number of passes that fitting takes."""
        return max((learned.level + 1 for learned in self.fitted), default=0)

    @property
    def chains(self) -> dict[str, Any]:
        """Everything that the fitted states depend on, by their keys, as plain values."""
        made = tuple((c, len(c.ops)) for c in self.columns if c.role == "label" and c.ops)
        return {
            learned.key: [
                [list(c.sources), [op.described for op in c.ops[: number + 1]]]
                for c, number in (*learned.users, *(made if "label" in learned.op.needs else ()))
            ]
            for learned in self.fitted
        }

    @property
    def fitted_hash(self) -> str:
        """Hash of `chains`: a state with another hash belongs to another spec."""
        return hashlib.sha256(json.dumps(self.chains, sort_keys=True).encode()).hexdigest()[:16]

    def fields(
        self,
        cardinalities: Mapping[str, int],
        bags: Mapping[str, tuple[int, float, int]] | None = None,
    ) -> tuple[Field, ...]:
        return tuple(
            self.field(c, cardinalities.get(c.name), (bags or {}).get(c.name)) for c in self.columns
        )

    def field(
        self,
        c: ColumnSpec,
        cardinality: int | None = None,
        bag: tuple[int, float, int] | None = None,
    ) -> Field:
        kind, layout = c.type, "scalar"
        if c.raw:
            layout = "list" if kind.startswith("list<") else layout
        elif c.role == "id_list":
            ids = "list<int64>" if c.wide else "list<int32>"
            kind, layout = (ids, "list") if self.table.plain_lists else (kind, "bytes")
        return Field(
            name=c.name,
            role=c.role,
            type=kind,
            layout=layout,
            width=c.width,
            cardinality=cardinality,
            bag=bag,
            online=c.left_to_loader,
            inputs=() if c.sources == (c.name,) else c.sources,
            nullable=c.raw,
        )


def _spec(raw: dict[str, Any], text: str) -> Spec:
    known(raw, ("input", "table", "column", "transform", "drift", "placement", *SECTIONS), "")
    source = _input(section(raw, "input"))
    kinds = {name: INPUT_TYPES[kind] for name, kind in source.columns.items()}
    if source.place:
        kinds[source.place] = "number"
    rows = read_rows(raw, kinds, INPUT_TYPES)
    table = _table(section(raw, "table"), kinds, source.columns)
    entries = sections(raw, "column")
    if not entries:
        raise SpecError("column: there must be at least one [[column]]")
    columns = read_placement(section(raw, "placement"), read_columns(entries, kinds), kinds)
    labels = [c for c in columns if c.role == "label"]
    if len(labels) != 1:
        names = [c.name for c in labels] or "none"
        raise SpecError(f'column: exactly one must have role = "label", but {names} has')
    if len(labels[0].sources) != 1 or labels[0].sources[0] not in source.columns:
        raise SpecError(f"column {labels[0].name!r}: a label is made of one input column")
    if wrong := next(
        (op.name for op in labels[0].ops if isinstance(op, (Fitted, Python)) or op.needs), None
    ):
        raise SpecError(
            f"column {labels[0].name!r}: {wrong} cannot make a label; operators that learn nothing can, "
            'for instance {op = "compare", to = ">= 4"}'
        )
    if labels[0].ops and (rows.negatives or any(one.positive for one in rows.histories)):
        raise SpecError(
            f"column {labels[0].name!r}: [negatives], and a [[history]] of positive rows, need a label "
            "that is an input column as it is, 0 or 1"
        )
    if not any(c.role in ("dense", "sparse", "id_list") for c in columns):
        raise SpecError('column: none has role "dense" or "sparse": there is nothing to learn from')
    if rows.sample and rows.sample.weight:
        columns = (*columns, _weight(columns, rows, labels[0]))
    if sum(c.role == "weight" for c in columns) > 1:
        raise SpecError('column: at most one can have role = "weight"')
    for c in columns:
        if table.split_time is None and (
            past := next((op for op in c.ops if "time" in op.needs), None)
        ):
            raise SpecError(
                f"column {c.name!r}: {past.name} with past = true needs table.split_time, the column that "
                "says when a row was"
            )
    if source.place and (
        made := [
            *(c.name for c in columns if source.place in c.sources and c.role != "time"),
            *(h.name for h in rows.histories if source.place in (h.of, h.by)),
        ]
    ):
        raise SpecError(
            f"input.place: {made[0]!r} is made of it, and a server does not know where a row lies; order "
            "and split rows by it"
        )
    if source.place and rows.dedup and not rows.dedup.by:
        raise SpecError(
            "dedup.by: name the columns, as no two rows have one place in the input (input.place)"
        )
    if table.unlabelled and (rows.sample or rows.negatives):
        raise SpecError(
            "table.unlabelled: cannot be combined with [sample] and [negatives], which go by the label"
        )
    if table.partition and rows.negatives:
        raise SpecError("table.partition: cannot be combined with [negatives]")
    return Spec(
        input=source,
        table=table,
        columns=columns,
        text=text,
        rows=rows,
        drift=_drift(section(raw, "drift")),
        kinds=kinds,
        transforms=read_transforms(raw, {c.name: c.role for c in columns}),
    )


def _uses_of_label(spec: Spec) -> Iterator[str]:
    """Says where a spec would let a row's own label decide its features, its split, or its place among others."""
    label, rows = spec.label, spec.rows
    for made in spec.columns:
        # What is learned of the past is of other rows alone, as long as the label is not what groups.
        of_past = made.sources[0] != label and any(
            getattr(op, "past", False) for op in made.ops[:1]
        )
        if made.role in ("dense", "sparse", "id_list") and label in made.sources and not of_past:
            yield f"column {made.name!r} is made from {label!r}"
    keys = ("key", "split_by", "split_time", "order", "together")
    named = [(f"table.{key}", getattr(spec.table, key)) for key in keys]
    named += [("dedup.order", rows.dedup.order)] if rows.dedup else []
    named += [("join.on", join.on) for join in rows.joins] + [
        ("join.time", join.time) for join in rows.joins
    ]
    for history in rows.histories:
        kind = "lag" if history.lag else "history"
        named += [(f"{kind}.by", history.by), (f"{kind}.order", history.order)]
        named += [("lag.difference", history.of)] if history.difference else []
    for path, names in named:
        if label in (names if isinstance(names, tuple) else (names,)):
            yield f"{path} names {label!r}"


def _signs_of_drawn(spec: Spec) -> Iterator[str]:
    """Says which columns would know rows of `[negatives]` by a combination that no row of the input has."""
    drawn = spec.rows.negatives.column if spec.rows.negatives else None
    for made in spec.columns:
        learns = any(isinstance(op, Fitted) and not op.needs for op in made.ops)
        if learns and len(made.sources) > 1 and drawn in made.sources:
            yield f"column {made.name!r} learns what occurs together with {drawn!r}"


def _weight(columns: tuple[ColumnSpec, ...], rows: RowRules, label: ColumnSpec) -> ColumnSpec:
    """The column that makes up for the rows that a sample leaves out: 1 / share for label 0."""
    from sluice.etl.ops.numeric import InverseShare

    assert rows.sample is not None
    assert rows.sample.weight is not None
    if any(c.name == rows.sample.weight for c in columns):
        raise SpecError(
            f"sample.weight = {rows.sample.weight!r}: there is a column of this name already"
        )
    return ColumnSpec(
        name=rows.sample.weight,
        sources=label.sources,
        role="weight",
        ops=(*label.ops, InverseShare(share=rows.sample.negatives)),
    )


def _input(raw: dict[str, Any]) -> Input:
    known(
        raw,
        (
            "format",
            "delimiter",
            "header",
            "multiline",
            "optional",
            "columns",
            "encoding",
            "place",
            "decimal",
        ),
        "input",
    )
    form = value(raw, "format", str, "tsv", "input")
    if form not in FORMATS:
        raise SpecError(f"input.format = {form!r}: unknown format{nearest(form, FORMATS)}")
    delimiter = value(raw, "delimiter", str, "\t" if form == "tsv" else ",", "input")
    coded = encoding(raw, "input", delimiter)
    columns: dict[str, str] = {}
    was: dict[str, str] = {}
    times: dict[str, ParseTime] = {}
    for number, entry in enumerate(value(raw, "columns", list, [], "input")):
        path = f"input.columns[{number}]"
        about = entry if isinstance(entry, dict) else {"name": str(entry)}
        known(about, ("name", "was", "format", "zone"), path)
        names, _, kind = str(needed(about, "name", str, path)).rpartition(":")
        if "was" in about:
            was[names] = str(value(about, "was", str, "", path))
        if kind not in INPUT_TYPES:
            raise SpecError(f"{path} = {entry!r}: write name:type{nearest(kind, INPUT_TYPES)}")
        if kind in ("texts", "floats") and form not in WITH_LISTS:
            raise SpecError(
                f"{path} = {entry!r}: {form} has no lists; read it as text, and add "
                '{op = "split"} to its column'
            )
        for name in _expanded(names, path):
            if name in columns:
                raise SpecError(f"{path}: column {name!r} is there twice")
            columns[name] = kind
            if {"format", "zone"} & about.keys():
                times[name] = _time(about, kind, path)
    if not columns:
        raise SpecError(
            'input.columns: name the columns in order, for instance ["label:int", "I1..I13:int"]'
        )
    for key, only in (
        ("multiline", ("csv",)),
        ("optional", ("parquet", "csv", "tsv")),
        ("decimal", ("tsv", "csv")),
        ("encoding", ("tsv", "csv", "json")),
        ("place", ("tsv", "csv", "json", "parquet")),
    ):
        if key in raw and form not in only:
            raise SpecError(
                f"input.{key}: is for {' and '.join(only)} alone, and input.format is {form!r}"
            )
    for name in (optional := texts(raw, "optional", (), "input")):
        if name not in columns:
            raise SpecError(
                f"input.optional = {name!r}: no such input column{nearest(name, columns)}"
            )
    if form != "parquet" and (
        optional
        and (
            set(list(columns)[-len(set(optional)) :]) != set(optional)
            or len(columns) == len(set(optional))
        )
    ):
        raise SpecError(
            f"input.optional = {list(optional)}: in {form} they must be the last of input.columns, as "
            "lines without them end before them"
        )
    other = next((key for key in ("optional", "encoding", "place") if raw.get(key)), None)
    if other and raw.get("multiline"):
        raise SpecError(f"input.{other}: cannot be combined with multiline")
    place = value(raw, "place", str, None, "input")
    if place is not None and (place in columns or not place or place.startswith("_")):
        raise SpecError(f"input.place = {place!r}: must be the name of a new column")
    decimal = value(raw, "decimal", str, ".", "input")
    if decimal not in (".", ",") or decimal == delimiter:
        raise SpecError(
            f"input.decimal = {decimal!r}: must be a point or a comma, and not what parts the fields "
            f"(input.delimiter = {delimiter!r})"
        )
    _check_was(was, columns)
    return Input(
        format=form,
        delimiter=delimiter,
        header=value(raw, "header", bool, False, "input"),
        columns=columns,
        multiline=value(raw, "multiline", bool, False, "input"),
        optional=optional,
        was=was,
        times=times,
        encoding=coded,
        place=place,
        decimal=decimal,
    )


def _time(about: dict[str, Any], kind: str, path: str) -> ParseTime:
    """How a column's texts become times."""
    if kind not in ("int", "float") or "format" not in about:
        raise SpecError(
            f'{path} = {about!r}: a time is {{name = "at:float", format = "%Y-%m-%d", zone = "UTC"}}, and '
            "becomes seconds since 1970, a float or an int"
        )
    given = {key: about[key] for key in ("format", "zone") if key in about}
    op, _ = operator({"op": ParseTime.name, **given}, path)
    assert isinstance(op, ParseTime)
    return op


def _check_was(was: Mapping[str, str], columns: Mapping[str, str]) -> None:
    """Checks that each old name belongs to one column."""
    for name, old in was.items():
        if name not in columns:
            raise SpecError(
                f"input.columns: {name!r} has a `was`, and so must be one column, not a range"
            )
        if list(was.values()).count(old) > 1:
            raise SpecError(f"input.columns: two columns were {old!r}")
        if old in columns and old != name and old not in was:
            raise SpecError(
                f"input.columns: {name!r} was {old!r}, but there is an input column {old!r} too"
            )


def _expanded(names: str, path: str) -> list[str]:
    """Expands a range of names: `I1..I13` is thirteen names, anything else one."""
    if match := _RANGE.fullmatch(names):
        if match[1] != match[3] or int(match[2]) > int(match[4]):
            raise SpecError(f"{path}: {names!r} is no range; write for instance I1..I13")
        return [f"{match[1]}{i}" for i in range(int(match[2]), int(match[4]) + 1)]
    if not names:
        raise SpecError(f"{path}: a column has no name")
    return [names]


def _table(raw: dict[str, Any], kinds: Mapping[str, str], inputs: Mapping[str, str]) -> TableSpec:
    known(
        raw,
        (
            "seed",
            "key",
            "row_group_rows",
            "file_rows",
            "split",
            "split_by",
            "split_column",
            "split_time",
            "order",
            "order_step",
            "partition",
            "together",
            "plain_lists",
            "unlabelled",
        ),
        "table",
    )
    whole: dict[str, Any] = {
        name: value(raw, name, int, getattr(TableSpec(), name), "table")
        for name in ("seed", "row_group_rows", "file_rows")
    }
    for key in ("row_group_rows", "file_rows"):
        if whole[key] < 1:
            raise SpecError(f"table.{key} = {whole[key]}: must be at least 1")
    for key in ("split_column", "order", "together", "split_time", "partition"):
        if key in raw:
            whole[key] = column(raw, key, kinds, "table")
            if key in ("order", "split_time") and kinds[whole[key]] != "number":
                raise SpecError(
                    f"table.{key} = {whole[key]!r}: holds {kinds[whole[key]]}, not numbers"
                )
    for name in (by := texts(raw, "split_by", (), "table")):
        if name not in kinds:
            raise SpecError(
                f"table.split_by = {name!r}: no such input column{nearest(name, kinds)}; a split goes by "
                "columns as they come in: name a session's user to keep it in one"
            )
        if kinds[name] not in ("text", "number"):
            raise SpecError(f"table.split_by = {name!r}: holds {kinds[name]}, not one value a row")
    for name in (named := texts(raw, "key", (), "table")):
        if name not in inputs:
            raise SpecError(f"table.key = {name!r}: no such input column{nearest(name, inputs)}")
        if named.count(name) > 1:
            raise SpecError(f"table.key = {name!r}: is there twice")
    ways = [key for key in ("split_by", "split_column", "split_time") if key in raw]
    for pair in (ways[:2], *(["together", "order"], ["partition", "order"])):
        if len(pair) == 2 and all(key in raw for key in pair):
            raise SpecError(f"table.{pair[1]}: cannot be combined with {pair[0]}")
    if "partition" in raw and kinds[whole["partition"]] not in ("text", "number"):
        raise SpecError(
            f"table.partition = {whole['partition']!r}: holds {kinds[whole['partition']]}, not one value a "
            "row"
        )
    step = float(value(raw, "order_step", (int, float), 3600.0, "table"))
    if not step > 0:
        raise SpecError(f"table.order_step = {step:g}: must be above 0")
    whole |= {
        "key": named,
        "split_by": by,
        "order_step": step,
        "plain_lists": value(raw, "plain_lists", bool, False, "table"),
    }
    return TableSpec(**_split(raw), **whole)


def _unlabelled(raw: dict[str, Any], split: Mapping[str, Any]) -> dict[str, Any]:
    """The split of rows without a label, which no share and no bound leads to."""
    name = value(raw, "unlabelled", str, None, "table")
    if name is None:
        return {"split": split}
    if name in split or not re.fullmatch(_SPLIT_NAME, name):
        raise SpecError(
            f"table.unlabelled = {name!r}: must be the name of one more split, of letters, digits, - and _"
        )
    return {"split": {**split, name: 0.0}, "unlabelled": name}


def _split(raw: dict[str, Any]) -> dict[str, Any]:
    split = value(raw, "split", dict, DEFAULT_SPLIT, "table")
    for name, share in split.items():
        if not re.fullmatch(_SPLIT_NAME, name):
            raise SpecError(f"table.split.{name}: a split's name is letters, digits, - and _")
        if not isinstance(share, (int, float)) or isinstance(share, bool):
            raise SpecError(f"table.split.{name} = {share!r}: must be a number")
        if "split_time" not in raw and not 0 < share <= 1:
            raise SpecError(f"table.split.{name} = {share!r}: must be a share above 0, at most 1")
    if "split_time" in raw:
        bounds = list(split.values())
        if "split" not in raw or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise SpecError(
                "table.split: with split_time, it says from which value on each split begins, and these "
                "must rise"
            )
        return {
            **_unlabelled(raw, dict.fromkeys(split, 1 / len(split))),
            "split_from": tuple(map(float, bounds)),
        }
    if abs(sum(split.values()) - 1) > 1e-9:
        raise SpecError(f"table.split: the shares add up to {sum(split.values()):g}, not 1")
    return _unlabelled(raw, split)


def _drift(raw: dict[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    known(raw, DRIFTS, "drift")
    found = {}
    for key, about in raw.items():
        if not isinstance(about, dict):
            raise SpecError(f"drift.{key}: write {{warn = …, refuse = …}}")
        known(about, ("warn", "refuse"), f"drift.{key}")
        found[key] = tuple(
            value(about, name, (int, float), None, f"drift.{key}") for name in ("warn", "refuse")
        )
    return found
