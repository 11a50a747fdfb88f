"""`Spec`: the input, the rules on rows, and the columns of the table with their operators.

`Spec.read` checks the whole spec. Errors name the key's path in the file and the nearest right name.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import Arrays, Fitted, Operator
from sluice.etl.ops.chain import make_labels
from sluice.etl.ops.user_function import Python
from sluice.etl.schema import CLOSE_RULE, VALUES_RULE, BagSizes, Field, digest
from sluice.etl.spec.columns import MODEL_ROLES, ColumnSpec, read_columns, takes_texts
from sluice.etl.spec.input_section import INPUT_TYPES, Input, read_input
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.row_identity import Identity
from sluice.etl.spec.row_rules import SECTIONS, InverseShare, RowRules, read_rows
from sluice.etl.spec.table_section import TableSpec, read_table
from sluice.etl.spec.table_transform import TableTransform, read_transforms
from sluice.etl.spec.time_order import Steps
from sluice.etl.spec.toml_keys import (
    SpecError,
    check_keys,
    columns_named,
    read_into,
    read_section,
    read_sections,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLimits:
    """Limits of a measure of drift."""

    warn: float | None = None
    """The limit above which a new version gets a warning."""
    refuse: float | None = None
    """The limit above which a new version is refused."""


_NOTHING_KNOWN: Mapping[str, Any] = MappingProxyType({})
DRIFTS = ("psi", "unseen", "nulls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One fitted state: its key, the operator that learns it, the pass, and the columns that use it."""

    key: str
    op: Fitted
    level: int
    users: tuple[tuple[ColumnSpec, int], ...]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole spec, checked for consistency."""

    input: Input
    table: TableSpec
    columns: tuple[ColumnSpec, ...]
    text: str = field(repr=False)
    transforms: tuple[TableTransform, ...] = ()
    """The transforms that readers of the table apply to its columns."""
    rows: RowRules = field(default_factory=RowRules)
    drift: Mapping[str, DriftLimits] = field(default_factory=dict)
    """The limits of psi, unseen and nulls."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind (see `sluice.etl.ops.base`) of every column that operators may start from."""
    identity: Identity | None = None
    """The rule of the existing table that a job adds to. None if this spec begins a table."""
    name: str = "spec"
    """The name of the spec in messages."""
    permission: Permission = NOTHING
    """Which functions of the spec may be imported. Spark's workers get it with the spec."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Spec:
        """Reads the user's own spec from a file: see `own`."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SpecError(f"{path}: the spec cannot be read ({reason})") from None
        return cls.own(text, str(path))

    @classmethod
    def own(cls, text: str, name: str = "spec") -> Spec:
        """Parses the user's own spec, and imports the functions that it names. Use `parse` for the spec of a table.

        Refuses a spec that would show a model its label."""
        spec = cls.parse(text, name)
        if where := next(_find_uses_of_label(spec), None):
            raise SpecError(
                f"{name}: {where}, which is the label: a row's features must not depend on its own label. "
                "Name another column; a [[history]] or [[lag]] of the label holds labels of earlier rows"
            )
        drawn = spec.rows.negatives.column if spec.rows.negatives else None
        for made in spec.columns:
            learns = any(isinstance(op, Fitted) and not op.needs for op in made.ops)
            if learns and len(made.sources) > 1 and drawn in made.sources:
                raise SpecError(
                    f"{name}: column {made.name!r} learns what occurs together with {drawn!r}, for which [negatives] "
                    "draws other values: a combination that never occurred would show a drawn row, and so its label. "
                    "Use target, hash or cross"
                )
        spec = replace(spec, permission=Permission(functions=spec.functions))
        try:
            spec.import_functions()
        except OperatorError as error:
            raise SpecError(f"{name}: {error}") from None
        return spec

    @classmethod
    def parse(cls, text: str, name: str = "spec", permission: Permission = NOTHING) -> Spec:
        """Parses any spec, and imports nothing. `import_functions` imports what `permission` allows."""
        try:
            return replace(_read_spec(tomllib.loads(text), text), name=name, permission=permission)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{name}: not TOML: {error}") from None
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None

    @cached_property
    def rule(self) -> Identity:
        """The rule by which rows are recognised."""
        return self.identity or Identity.of(self.table, self.input, self.types, self.label)

    @property
    def types(self) -> dict[str, str]:
        """The types of the input's columns, and of those that joins and lags add."""
        types = self.input.with_place
        for join in self.rows.joins:
            types |= join.columns
        for lag in self.rows.histories:
            if lag.lag:
                types[lag.name] = types[lag.of]
        return types

    @property
    def unused(self) -> tuple[str, ...]:
        """The input columns that no column of the table and no rule uses."""
        rows = self.rows
        sections = (
            self.table,
            *rows.histories,
            *rows.joins,
            *rows.filters,
            rows.negatives,
            rows.dedup,
        )
        named = {name for section in sections if section for _, name in columns_named(section)}
        named |= {name for column in self.columns for name in column.sources}
        return tuple(name for name in self.input.columns if name not in named)

    @property
    def functions(self) -> frozenset[str]:
        """The functions of its `python` operators and its transforms, as "module:function"."""
        named = {op.function for _, op in self._python}
        return frozenset(
            named | {transform.function for transform in self.transforms if transform.function}
        )

    @property
    def _python(self) -> Iterator[tuple[str, Python]]:
        """Yields each `python` operator with the name of its column."""
        for column in self.columns:
            yield from ((column.name, op) for op in column.ops if isinstance(op, Python))

    def import_functions(self) -> dict[str, Callable[..., Any]]:
        """Imports the functions of its operators. Raises OperatorError if one may not or cannot be imported."""
        functions: dict[str, Callable[..., Any]] = {}
        for column, op in self._python:
            try:
                function = self.permission.load(op.function, f"the spec of {self.name}")
                op.check(function)
            except OperatorError as error:
                raise OperatorError(f"column {column!r}: {error}") from None
            functions[op.function] = function
        return functions

    @property
    def label_column(self) -> ColumnSpec:
        return next(c for c in self.columns if c.role == "label")

    @property
    def label(self) -> str:
        """The input column that the label is made from."""
        return self.label_column.sources[0]

    def is_renewed(self, column: ColumnSpec) -> bool:
        """Returns whether a column's values may differ from those of `VALUES_RULE` 1: it depends on a join by floats,
        or takes texts of whole numbers in a history."""
        types, by_float = self.types, set[str]()
        for join in self.rows.joins:
            if "float" in map(types.get, join.on) or by_float & {*join.on, join.time}:
                by_float |= join.columns.keys()
        for history in self.rows.histories:
            if by_float & {history.of, history.by, history.order}:
                by_float.add(history.name)
        if by_float & {*column.sources}:
            return True
        whole = {h.name for h in self.rows.histories if not h.lag and types[h.of] == "int"}
        return bool(whole & {*column.sources}) and takes_texts(column.ops)

    def labels(self, columns: Arrays) -> pa.Array:
        """Returns the label of each row, after the label's operators."""
        return make_labels(self.label_column.ops, columns[self.label])

    @property
    def hidden(self) -> tuple[ColumnSpec, ...]:
        """Columns that are only learned for rules on rows. They do not become columns of the table."""
        table, negatives = self.table, self.rows.negatives
        rules: list[tuple[str, str, Operator]] = []
        if negatives:
            rules.append(("rows/negatives", negatives.column, negatives.learns))
        if table.order:
            rules.append(("rows/order", table.order, Steps(step=table.order_step)))
        return tuple(
            ColumnSpec(name=name, sources=(source,), role="sparse", ops=(op,))
            for name, source, op in rules
        )

    @property
    def fitted(self) -> tuple[Learned, ...]:
        """Every state to learn, once each."""
        learned: dict[str, Learned] = {}
        for spec in (*self.columns, *self.hidden):
            for key, op, number in spec.fitted:
                before = learned[key].users if key in learned else ()
                learned[key] = Learned(
                    key=key, op=op, level=spec.level(number), users=(*before, (spec, number))
                )
        return tuple(learned.values())

    @property
    def buckets(self) -> dict[str, int]:
        """The number of ids of each column for values outside its vocabulary."""
        return {c.name: op.oov for c in self.columns for op in c.ops if hasattr(op, "oov")}

    def may_be_stored(self, learned: Learned) -> bool:
        """Returns whether a fitted table may stay in files. A table that negatives are drawn from may not, because each
        worker needs all of it."""
        return learned.op.may_be_stored and all(
            column in self.columns for column, _ in learned.users
        )

    @property
    def learned_from_labels(self) -> frozenset[str]:
        """The keys of the states that are learned from labels."""
        return frozenset(learned.key for learned in self.fitted if "label" in learned.op.needs)

    @property
    def levels(self) -> int:
        """The number of passes that fitting takes."""
        return max((learned.level + 1 for learned in self.fitted), default=0)

    def named_as(self, earlier: Input) -> Spec:
        """Returns a spec that makes its columns of the names that input columns had in an earlier one."""
        name = partial(self.input.name_before, earlier)
        table, rows = self.table, self.rows
        histories = (
            replace(each, of=name(each.of), by=name(each.by), order=name(each.order))
            for each in rows.histories
        )
        negatives = rows.negatives
        if negatives:
            negatives = replace(negatives, column=name(negatives.column))
        return replace(
            self,
            columns=tuple(replace(c, sources=tuple(map(name, c.sources))) for c in self.columns),
            rows=replace(rows, histories=tuple(histories), negatives=negatives),
            table=replace(table, order=name(table.order)) if table.order else table,
        )

    @property
    def chains(self) -> dict[str, Any]:
        """What each fitted state depends on, by its key, as plain values."""
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
        """The hash of `chains`. A state with another hash belongs to another spec."""
        return digest(self.chains)

    def fields(
        self,
        cardinalities: Mapping[str, int] = _NOTHING_KNOWN,
        bags: Mapping[str, BagSizes] = _NOTHING_KNOWN,
        learned: Mapping[str, Any] = _NOTHING_KNOWN,
    ) -> tuple[Field, ...]:
        """Returns the table's columns. `learned` has the states of operators, by their keys."""
        fields = (self.field(c, cardinalities.get(c.name), bags.get(c.name)) for c in self.columns)
        return tuple(
            replace(field, values_rule=CLOSE_RULE)
            if any(key in learned and op.is_close(learned[key]) for key, op, _ in c.fitted)
            else field
            for field, c in zip(fields, self.columns, strict=True)
        )

    def field(
        self,
        c: ColumnSpec,
        cardinality: int | None = None,
        bag: BagSizes | None = None,
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
            values_rule=VALUES_RULE if self.is_renewed(c) else 1,
        )


def _read_spec(raw: dict[str, Any], text: str) -> Spec:
    check_keys(raw, ("input", "table", "column", "transform", "drift", *SECTIONS), "")
    source = read_input(read_section(raw, "input"))
    kinds = {name: INPUT_TYPES[kind] for name, kind in source.with_place.items()}
    rows = read_rows(raw, kinds, INPUT_TYPES)
    table = read_table(read_section(raw, "table"), kinds, source.columns)
    entries = read_sections(raw, "column")
    if not entries:
        raise SpecError("column: there must be at least one [[column]]")
    columns = read_columns(entries, kinds)
    columns = _add_weight(columns, rows, _check_label(columns, rows, source))
    drift = read_section(raw, "drift")
    check_keys(drift, DRIFTS, "drift")
    spec = Spec(
        input=source,
        table=table,
        columns=columns,
        text=text,
        rows=rows,
        drift={
            key: read_into(DriftLimits, read_section(drift, key), f"drift.{key}") for key in drift
        },
        kinds=kinds,
        transforms=read_transforms(raw, {c.name: c.role for c in columns}),
    )
    _check_columns(spec)
    _check_rules(spec)
    # As floats, long whole numbers would lose digits before the loader makes texts of them.
    columns = tuple(
        replace(c, left_as="list<string>")
        if c.raw
        and c.left_as == "list<double>"
        and takes_texts(c.ops[c.online :])
        and spec.is_renewed(c)
        else c
        for c in columns
    )
    return replace(spec, columns=columns)


def _check_label(columns: tuple[ColumnSpec, ...], rows: RowRules, source: Input) -> ColumnSpec:
    """Returns the label's column. Raises SpecError if there is not exactly one, or if it cannot be a label."""
    labels = [c for c in columns if c.role == "label"]
    if len(labels) != 1:
        names = [c.name for c in labels] or "none"
        raise SpecError(f'column: exactly one must have role = "label", but {names} has')
    label = labels[0]
    path = f"column {label.name!r}"
    if len(label.sources) != 1 or label.sources[0] not in source.columns:
        raise SpecError(f"{path}: a label is made of one input column")
    for op in label.ops:
        if isinstance(op, (Fitted, Python)) or op.needs:
            raise SpecError(
                f"{path}: {op.name} cannot make a label; operators that learn nothing can, for instance "
                '{op = "compare", to = ">= 4"}'
            )
    if label.ops and (rows.negatives or any(history.positive for history in rows.histories)):
        raise SpecError(
            f"{path}: [negatives] and a [[history]] of positive rows need a label that is an input column "
            "as it is, 0 or 1"
        )
    return label


def _add_weight(
    columns: tuple[ColumnSpec, ...], rows: RowRules, label: ColumnSpec
) -> tuple[ColumnSpec, ...]:
    """Adds the column that makes up for the rows that a sample leaves out: 1 / share for label 0."""
    if not rows.sample or not rows.sample.weight:
        return columns
    name = rows.sample.weight
    if any(c.name == name for c in columns):
        raise SpecError(f"sample.weight = {name!r}: there is a column of this name already")
    weight = ColumnSpec(
        name=name,
        sources=label.sources,
        role="weight",
        ops=(*label.ops, InverseShare(share=rows.sample.negatives)),
    )
    return (*columns, weight)


def _check_columns(spec: Spec) -> None:
    """Refuses columns that do not fit each other or the other sections."""
    roles = [c.role for c in spec.columns]
    if not {*MODEL_ROLES} & {*roles}:
        raise SpecError('column: none has role "dense" or "sparse": there is nothing to learn from')
    if roles.count("weight") > 1:
        raise SpecError('column: at most one can have role = "weight"')


def _check_rules(spec: Spec) -> None:
    """Refuses rules on rows that cannot be combined."""
    table, rows = spec.table, spec.rows
    if place := spec.input.place:
        made = [c.name for c in spec.columns if place in c.sources and c.role != "time"]
        made += [h.name for h in rows.histories if place in (h.of, h.by)]
        if made:
            raise SpecError(
                f"input.place: {made[0]!r} is made of it, and a server does not know where a row lies; use "
                "the place only to order and split rows"
            )
        if rows.dedup and not rows.dedup.by:
            raise SpecError(
                "dedup.by: name the columns, because no two rows have the same place (input.place)"
            )
    if table.unlabelled and (rows.sample or rows.negatives):
        raise SpecError(
            "table.unlabelled: cannot be combined with [sample] and [negatives], which need the label"
        )


def _find_uses_of_label(spec: Spec) -> Iterator[str]:
    """Names each place where a row's own label would decide its features, its split, or its place among others."""
    label, rows = spec.label, spec.rows
    for made in spec.columns:
        if made.role in MODEL_ROLES and label in made.sources:
            yield f"column {made.name!r} is made from {label!r}"
    sections: list[tuple[str, Any, tuple[str, ...]]] = [
        ("table", spec.table, ("split_column",)),
        *(("join", join, ()) for join in rows.joins),
    ]
    if rows.dedup:
        sections.append(("dedup", rows.dedup, ("by",)))
    for history in rows.histories:
        may_name = () if history.difference else ("of",)
        sections.append(("lag" if history.lag else "history", history, may_name))
    for path, section, allowed in sections:
        for key, name in columns_named(section):
            if name == label and key not in allowed:
                yield f"{path}.{'difference' if key == 'of' else key} names {label!r}"
