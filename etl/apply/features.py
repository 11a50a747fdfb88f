"""Applies a spec to one batch after another: `Features` makes the table's columns, `FileAssignment` decides where rows
go.

Both are arithmetic on Arrow arrays. Spark's workers, the tests' slow reference and the server run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.number_limits import (
    NUMBERS,
    as_stored,
    is_late,
    reason,
    unfit,
    unfit_after,
)
from sluice.etl.ops.base import (
    Arrays,
    Columns,
    Fitted,
    Operator,
    as_number,
    as_one_column,
    as_text,
    on_distinct,
    plain,
)
from sluice.etl.ops.chain import FeatureError, step_of
from sluice.etl.ops.hashing import Flags, Floats, Hashes, Lookup, Narrow, hash_rows
from sluice.etl.ops.ids import Categorify
from sluice.etl.ops.lists import flat, packed
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.columns import MODEL_ROLES, ColumnSpec
from sluice.etl.spec.row_split import Keys, fold_keys, split_of
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import UNDECIDED, FittedState


def in_training(
    columns: Arrays,
    keys: Keys,
    spec: Spec,
    split: Narrow | None = None,
) -> Flags:
    """Returns whether each row is in the split from which everything is learned. `split` has the rows' splits, if they
    are known."""
    if len(spec.table.split) == 1 and not spec.table.split_column:
        return np.ones(len(keys), bool)
    number = list(spec.table.split).index(spec.table.training)
    return np.asarray((split_of(columns, keys, spec) if split is None else split) == number)


class Features:
    """Applies every column's operators. Fitted operators look values up in `state`."""

    def __init__(
        self,
        spec: Spec,
        state: FittedState,
        *,
        ahead: bool = True,
        prepared: Mapping[str, Any] | None = None,
    ) -> None:
        """Unless `ahead` is given, the lookup structures of operators are made when they are first needed. `prepared`
        has those that exist already, by the keys of their states. Raises an OperatorError if a `python` operator names
        a function that the spec has no permission to import."""
        self.spec = spec
        self._functions = spec.import_functions()
        self._state = state
        self._prepared: dict[str, Any] = dict(prepared or {})
        for learned in spec.fitted if ahead else ():
            if learned.key in state.tables:
                self.prepared(learned.key, learned.op)
        self._needs = any(op.needs for column in spec.columns for op in column.ops)
        self._model_columns = [c for c in spec.columns if c.role in MODEL_ROLES]
        self._groups = column_groups(self._model_columns)

    @property
    def ranges(self) -> dict[str, pa.Table]:
        """The sums of operators that are still learning, by the keys of their states: see `Fitted.undecided`."""
        return {
            key: table
            for key, table in self._state.tables.items()
            if isinstance(table, pa.Table) and UNDECIDED in table.column_names
        }

    def apply(self, columns: Arrays, extras: Arrays) -> Columns:
        """Returns the table's columns, in the spec's order, as they are stored. Rows that `rejected_after_learning`
        names must not be stored. `extras` comes from the method of this name."""
        return {
            column.name: stored(
                self.run(column, column.left_to_spark, columns, extras), self.spec, column
            )
            for column in self.spec.columns
        }

    def rejected_after_learning(
        self,
        columns: Arrays,
        extras: Arrays,
        made: Arrays | None = None,
    ) -> dict[str, Flags]:
        """Returns the rows with a number that must not be published, by reason, as far as it is known only after
        operators have learned. `made` are columns that `apply` made. Columns that are left to the loader are
        checked, too."""
        rejected = {}
        for column in self.spec.columns:
            if column.role in NUMBERS and is_late(column):
                if made is not None and column.online is None:
                    bad = unfit(np.asarray(made[column.name]), column)
                else:
                    bad = unfit_after(
                        column, partial(self.run, column, columns=columns, extras=extras)
                    )
                if len(bad):
                    rejected[reason(column)] = bad
        return rejected

    def inputs(self, columns: Arrays) -> Columns:
        """Returns a model's inputs for rows without labels, as a loader reads them back: a number or an id for each
        row, or a list of ids for an `id_list`. Operators that are left to the loader come after this. A number that
        float32 cannot hold stays as it is."""
        extras = self.extras(columns, None)
        try:
            made = [self._run_group(group, columns, extras) for group in self._groups]
        except FeatureError:  # it names the group's first column
            made = [self._run_group([column], columns, extras) for column in self._model_columns]
        by_name = {name: values for group in made for name, values in group.items()}
        return {column.name: by_name[column.name] for column in self._model_columns}

    def _run_group(
        self,
        group: Sequence[ColumnSpec],
        columns: Arrays,
        extras: Arrays,
    ) -> Columns:
        """Returns the model's inputs of columns with the same operators."""
        first = group[0]
        sources = [columns[column.sources[0]] for column in group]
        rows = len(sources[0])
        if len({source.type for source in sources}) > 1:
            alone = [self._run_group([column], columns, extras) for column in group]
            return {name: values for made in alone for name, values in made.items()}
        if len(group) == 1:
            values = self.run(first, first.left_to_spark, columns, extras)
        else:
            values = pa.concat_arrays(sources)
            for number, op in enumerate(first.left_to_spark):
                learned = None
                if isinstance(op, Fitted):
                    keys = (column.state_key(number) for column in group)
                    counts = (
                        flat(values)[1]
                        if pa.types.is_list(values.type)
                        else np.ones(len(values), int)
                    )
                    learned = GroupLookup(
                        tuple(self.prepared(key, op) for key in keys),
                        counts.reshape(len(group), rows).sum(axis=1).cumsum().tolist(),
                    )
                values = step_of(first.name, op, values, learned, {})
        values = (
            as_number(values)
            if first.role == "dense" and first.online is None
            else typed(values, first)
        )
        return {
            column.name: values.slice(number * rows, rows) for number, column in enumerate(group)
        }

    def extras(
        self,
        columns: Arrays,
        keys: Keys | None,
        split: Narrow | None = None,
        folds: Keys | None = None,
    ) -> Columns:
        """Returns what operators may need about each row in addition to their column: label and key. `split` and
        `folds` are given for rows whose keys do not decide them, such as drawn negatives.

        Without `keys`, as in serving, rows belong to no fold. Rows outside the training split belong to no fold either,
        because nothing was learned from them. They are treated as a server treats them."""
        if not self._needs:
            return {}
        count = len(next(iter(columns.values())))
        there = self.spec.label in columns
        extra = {
            "label": (self.spec.labels(columns) if there else pa.nulls(count)).cast(pa.int8()),
            "key": pa.nulls(count, pa.int64()),
        }
        if keys is not None:
            others = ~in_training(columns, keys, self.spec, split)
            folds = fold_keys(columns, keys, self.spec) if folds is None else folds
            extra["key"] = pa.array(folds.view(np.int64), mask=others)
        return extra

    def run(
        self,
        column: ColumnSpec,
        ops: Sequence[Operator],
        columns: Arrays,
        extras: Arrays,
    ) -> pa.Array:
        """Returns the column after `ops`, the first of its operators. Texts with a dictionary stay so if there are
        none. Otherwise operators get each distinct value once, unless they need the row."""
        values = as_one_column([columns[s] for s in column.sources], column.sources)
        if not ops:
            return values
        if any(op.needs or isinstance(op, Python) for op in ops):
            return self._run_all(column, ops, extras, plain(values))
        return on_distinct(partial(self._run_all, column, ops, {}), values)

    def _run_all(
        self,
        column: ColumnSpec,
        ops: Sequence[Operator],
        extras: Arrays,
        values: pa.Array,
    ) -> pa.Array:
        for number, op in enumerate(ops):
            learned = (
                self.prepared(column.state_key(number), op) if isinstance(op, Fitted) else None
            )
            if isinstance(op, Python):
                learned = self._functions[op.function]
            values = step_of(column.name, op, values, learned, extras)
        return values

    def prepared(self, key: str, op: Fitted) -> Any:
        """Returns the structure in which an operator looks values up."""
        if key not in self._prepared:
            self._prepared[key] = op.prepare(self._state[key])
        return self._prepared[key]


def column_groups(columns: Iterable[ColumnSpec]) -> list[list[ColumnSpec]]:
    """Returns the columns in groups, in order. All columns of a group have the same operators and stored type. A column
    with an operator that needs more than the column's own values is alone."""
    groups: dict[Any, list[ColumnSpec]] = {}
    for column in columns:
        key = (column.role, column.type, column.raw, column.online, column.ops)
        is_joinable = len(column.sources) == 1 and not any(
            op.needs
            or isinstance(op, Python)
            or (isinstance(op, Fitted) and not isinstance(op, Categorify))
            for op in column.ops
        )
        groups.setdefault(key if is_joinable else column.name, []).append(column)
    return [*groups.values()]


@dataclass(frozen=True, slots=True)
class GroupLookup:
    """The vocabularies of a group's columns. It takes the values of all columns, one column after the other."""

    lookups: tuple[Lookup, ...]
    ends: list[int]
    """The number of values up to the end of each column. Lists of equally many rows may have different numbers of
    elements."""

    def places(self, hashes: Hashes) -> Narrow:
        """Returns the place of each value in its column's vocabulary, given its hash, or -1."""
        bounds = pairwise([0, *self.ends])
        return np.concatenate(
            [
                lookup.places(hashes[start:end])
                for lookup, (start, end) in zip(self.lookups, bounds, strict=True)
            ]
        )


def cardinalities(spec: Spec, state: FittedState) -> dict[str, int]:
    """Returns the number of rows that the embedding of each sparse column needs."""
    sizes = {}
    for column in spec.columns:
        if column.role in ("sparse", "id_list"):
            last = max(
                i
                for i, op in enumerate(column.ops)
                if op.gives == "id" or (getattr(op, "size", None) and op.name == "python")
            )
            op = column.ops[last]
            size = op.cardinality(
                state.kept(column.state_key(last)) if isinstance(op, Fitted) else None
            )
            if size is not None:
                sizes[column.name] = size
    return sizes


def stored(values: pa.Array, spec: Spec, column: ColumnSpec) -> pa.Array:
    """Returns a column's values as they are stored in files."""
    packs = column.role == "id_list" and not spec.table.plain_lists and not column.raw
    return packed(values) if packs else typed(values, column)


def typed(values: pa.Array, column: ColumnSpec) -> pa.Array:
    """Returns a column's values in the type that is stored. Bags are lists."""
    if column.raw:
        if column.type == "string":
            return as_text(values)
        if column.type == "double":
            return as_number(values)
        kind = pa.list_(pa.float64() if "double" in column.type else pa.string())
        return values.cast(
            kind, safe=False
        )  # numbers above 2**53 become the nearest double, as elsewhere
    if column.role == "id_list":
        return values.cast(pa.list_(pa.int64() if column.wide else pa.int32()))
    if column.role == "key":
        return pc.fill_null(as_text(values), "")
    if column.role == "sparse" and column.online is not None:
        if column.type == "int64":
            return column.ops[column.online].whole_numbers(as_text(values))
        return pc.fill_null(as_number(values), math.nan)
    if column.role == "label":
        values = pc.fill_null(values, 0)  # where `table.unlabelled` keeps rows without one
    kind = pa.type_for_alias(column.type)
    if pa.types.is_floating(kind):
        return pa.array(as_stored(values, column.type))
    return values.cast(kind)


@dataclass(frozen=True, slots=True)
class FileAssignment:
    """Decides which split and which file a row belongs to. Only the row's own values decide, not the cluster and not
    other rows."""

    spec: Spec
    files: tuple[int, ...]
    """The number of files of each split, in the spec's order."""

    @classmethod
    def of(cls, spec: Spec, rows: int, unlabelled: float = 0.0) -> FileAssignment:
        """Plans enough files that each has about `table.file_rows` rows. `unlabelled` is the share of rows without a
        label."""
        shares = [
            unlabelled if name == spec.table.unlabelled else share
            for name, share in spec.table.split.items()
        ]
        files = tuple(max(1, -(-int(rows * share) // spec.table.file_rows)) for share in shares)
        return cls(spec, files)

    @property
    def ends(self) -> list[int]:
        """Returns for each split the number of the file after its last."""
        return [int(end) for end in np.cumsum(self.files)]

    @property
    def total(self) -> int:
        return sum(self.files)

    @property
    def sorted_by(self) -> list[str]:
        """The names of the sort keys before the rows' own keys."""
        table = self.spec.table
        first = ["_first"] if table.order or table.together else []
        return [*first, *(["_then"] if table.then else [])]

    @property
    def has_ties(self) -> bool:
        """Returns whether rows with the same key may differ in more than the label. Their order then needs more than
        the key."""
        others = self.spec.input.with_place.keys() - {self.spec.label}
        return self.spec.rows.looks_back or not self.spec.rule.covers(others)

    def file(
        self,
        keys: Keys,
        split: Narrow,
        shares: Floats | None = None,
    ) -> Narrow:
        """Returns the number of each row's file, over all splits. If `shares` is given, the share of rows before a row
        decides."""
        counts = np.array(self.files, np.uint64)[split]
        first = np.cumsum([0, *self.files[:-1]]).astype(np.int32)
        within = keys % counts if shares is None else (shares * counts).astype(np.uint64)
        return np.asarray(
            first[split] + np.minimum(within, counts - np.uint64(1)).astype(np.int32), np.int32
        )

    def place(
        self,
        features: Features,
        columns: Arrays,
        keys: Keys,
        split: Narrow,
    ) -> tuple[Narrow, list[pa.Array]]:
        """Returns the file of each row, and its sort keys there before its key: see `sorted_by`."""
        table = self.spec.table
        if table.order:
            hidden = next(c for c in self.spec.hidden if c.name == "rows/order")
            shares = np.asarray(features.run(hidden, hidden.ops, columns, {}))
            by = [name for name in (table.order, table.then) if name]
            values = [pc.fill_null(as_number(columns[name]), -np.inf) for name in by]
            return self.file(keys, split, shares), values
        if table.together:
            group = hash_rows([columns[table.together]], table.seed)
            return self.file(group, split), [pa.array((group >> np.uint64(11)).astype(np.float64))]
        return self.file(keys, split), []
