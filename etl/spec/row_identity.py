"""How the rows of a table are recognised: `Identity`. A row's split, fold, sample and place hash only these columns.

The table's first version sets the rule, and the record of every later job keeps it. So a spec may add columns, and
drop columns that are only used for features. No row then changes its split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest
from sluice.etl.schema import abridged
from sluice.etl.spec.input_section import INPUT_TYPES, Input
from sluice.etl.spec.table_section import TableSpec

# Pairs (type of a column now, type that it had) in which an old value can be recovered from the present one.
_READABLE = {("int", "float"), ("float", "int"), ("text", "int"), ("text", "float")}
ACCEPT = "--split-moved accept"


class SplitMoved(UsageError):
    """Rows change their split, or may have changed it. A training row could become a test row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumn:
    """A hashed column: its present name and type, and those in the table's first version, which the hash uses."""

    name: str
    type: str
    first: str
    """The column's name in the table's first version."""
    first_type: str
    was: str | None = None
    """The name that it had before the last `was` of a spec."""

    def __post_init__(self) -> None:
        for kind in (self.type, self.first_type):
            if kind not in INPUT_TYPES:
                raise ValueError(
                    f"key column {self.name!r}: type {kind!r} is none of {', '.join(INPUT_TYPES)}"
                )
        if self.type != self.first_type and (self.type, self.first_type) not in _READABLE:
            raise ValueError(
                f"key column {self.name!r}: {self.type} cannot be read as {self.first_type}"
            )

    @classmethod
    def of(cls, name: str, kind: str) -> KeyColumn:
        return cls(name=name, type=kind, first=name, first_type=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A table's rule for recognising its rows."""

    seed: int
    columns: tuple[KeyColumn, ...]
    """The hashed columns in the order in which they are hashed, that of the first version."""
    named: bool
    """Whether a spec named them in `table.key`. Otherwise they are the input columns of the first version."""
    split_by: tuple[KeyColumn, ...] = ()
    """The columns whose hash decides the split instead, if `table.split_by` names any."""
    recognised: tuple[KeyColumn, ...] = ()
    """The columns that identify a row when two versions are compared."""

    def __post_init__(self) -> None:
        if not self.columns or not self.recognised:
            raise ValueError("an identity needs at least one column")
        if len({c.name for c in self.columns}) < len(self.columns):
            raise ValueError(
                f"an identity has a column twice: {', '.join(c.name for c in self.columns)}"
            )

    @classmethod
    def of(cls, table: TableSpec, source: Input, types: Mapping[str, str], label: str) -> Identity:
        """Returns the rule of a new table: its key, or all input columns but the label. So no label decides where its
        row lies."""
        names = table.key or tuple(name for name in source.columns if name != label)
        columns = tuple(KeyColumn.of(name, types[name]) for name in names)
        by = tuple(KeyColumn.of(name, types[name]) for name in table.split_by)
        return cls(
            seed=table.seed,
            columns=columns,
            named=bool(table.key),
            split_by=by,
            recognised=_list_recognised(columns, by, table, source, types),
        )

    def find_in(
        self, table: TableSpec, source: Input, types: Mapping[str, str], *, may_lack: bool = False
    ) -> Identity:
        """Returns this rule with the names and types that its columns have in a later spec. Raises SplitMoved if that
        spec lacks one. `may_lack`: the rule then goes on without it, because it does not decide a row's split.

        The rows that are in the table can then be recognised again, whatever the spec's own rule is."""
        columns: tuple[KeyColumn, ...] = ()
        for number, column in enumerate(self.columns, 1):
            try:
                columns += (_find_column(column, source, types),)
            except SplitMoved:
                if not may_lack or (number == len(self.columns) and not columns):
                    raise
        by = tuple(_find_column(column, source, types) for column in self.split_by)
        return replace(
            self,
            columns=columns,
            split_by=by,
            recognised=_list_recognised(columns, by, table, source, types),
        )

    def check_table(self, table: TableSpec) -> None:
        """Refuses the [table] section of a later spec if it has another key, seed or groups than this rule."""
        names = tuple(c.name for c in self.columns)
        if table.key and set(table.key) != set(names):
            raise SplitMoved(
                f"table.key names {', '.join(table.key)}, and the rows of this table are identified by "
                f"{', '.join(names)}; write that, or {_accept()}"
            )
        if table.seed != self.seed:
            raise SplitMoved(
                f"table.seed = {table.seed}: the rows of this table are placed by seed {self.seed}, "
                f"and another seed gives them other splits; write that one, or {_accept()}"
            )
        groups = tuple(c.name for c in self.split_by)
        if groups != table.split_by:
            now, was = (", ".join(by) or "nothing" for by in (table.split_by, groups))
            raise SplitMoved(
                f"table.split_by names {now}, and for the rows of this table it was {was}; write that, "
                f"or {_accept()}"
            )

    def is_same(self, other: Identity) -> bool:
        """Returns whether both rules give every row the same key, and the same group if groups decide the split."""
        mine, theirs = (
            (
                rule.seed,
                [(c.first, c.first_type) for c in rule.columns],
                [(c.first, c.first_type) for c in rule.split_by],
            )
            for rule in (self, other)
        )
        return mine == theirs

    @property
    def recognition(self) -> str:
        """The name of the hash that identifies rows. Two versions with the same name can be compared."""
        rule = json.dumps([self.seed, [(c.first, c.first_type) for c in self.recognised]])
        return hashlib.sha256(rule.encode()).hexdigest()[:16]

    def without(self, label: str) -> tuple[KeyColumn, ...]:
        """Returns the columns that decide a row's fold, and its place among rows of one moment: all but the label."""
        return tuple(column for column in self.columns if column.name != label)

    def covers(self, names: Iterable[str]) -> bool:
        """Returns whether rows with equal keys are equal in all of these columns."""
        return set(names) <= {c.name for c in self.columns if c.type == c.first_type}

    @property
    def text(self) -> str:
        """A description of the rule for messages."""
        shown = abridged([c.name for c in self.columns], 8)
        return f"the key {shown}" if self.named else f"the first version's input columns: {shown}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Identity:
        lists = {
            name: tuple(KeyColumn(**column) for column in value[name])
            for name in ("columns", "split_by", "recognised")
        }
        return cls(seed=value["seed"], named=value["named"], **lists)


def _list_recognised(
    columns: tuple[KeyColumn, ...],
    by: tuple[KeyColumn, ...],
    table: TableSpec,
    source: Input,
    types: Mapping[str, str],
) -> tuple[KeyColumn, ...]:
    """Returns the columns of the key, and all others that decide a row's split. The column of the split's name and a
    row's place in the input are left out, because they may change."""
    names = {c.name for c in columns}
    more = [c for c in by if c.name not in names]
    if table.split_time and table.split_time not in {*names, source.place}:
        more.append(KeyColumn.of(table.split_time, types[table.split_time]))
    recognised = tuple(c for c in (*columns, *more) if c.name != table.split_column)
    return recognised or columns


def _find_column(column: KeyColumn, source: Input, types: Mapping[str, str]) -> KeyColumn:
    """Finds a column of the rule among those of a later spec."""
    was = source.was
    name = column.name
    if name not in types or was.get(name) not in (None, column.was, name):
        name = next((new for new, old in was.items() if old == column.name), "")
    if not name:
        renamed = (
            "" if column.name not in types else f" ({column.name!r} was {was[column.name]!r} there)"
        )
        raise SplitMoved(
            f"input column {column.name!r} is missing{renamed}, and this table's rows are recognised by it"
            f"{nearest(column.name, [n for n in types if n not in was])}; put it back, or, if it has another name "
            f'now, write {{name = "…:{column.type}", was = "{column.name}"}} in input.columns, or {_accept()}'
        )
    kind = types[name]
    if kind != column.type and name not in was:
        raise SplitMoved(
            f"input column {name!r} is {kind} and was {column.type}, and this table's rows are recognised by it; "
            f'write {column.type} again, or {{name = "{name}:{kind}", was = "{name}"}} in input.columns to '
            f"read it as {column.first_type} there, or {_accept()}"
        )
    if kind != column.first_type and (kind, column.first_type) not in _READABLE:
        raise SplitMoved(
            f"input column {name!r} is {kind} and was {column.first_type} in this table's first version: "
            f"the first values cannot be read from it, so rows would change their split; {_accept()}"
        )
    return replace(column, name=name, type=kind, was=was.get(name))


def _accept() -> str:
    return f"pass {ACCEPT}: training rows may then become test rows"
