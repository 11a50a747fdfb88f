"""How the rows of a table are recognised: `Identity`. A row's split, fold, sample and place hash these columns alone.

The table's first version settles it, and every later job's record carries it on. So columns may be added, and columns
that only features are made from may be dropped, and no row changes its split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest

if TYPE_CHECKING:
    from sluice.etl.spec.spec import Spec

TYPES = ("int", "float", "text", "texts", "floats")
# Pairs (type of a column now, type that it had) in which an old value can be recovered from the present one.
_READABLE = {("int", "float"), ("float", "int"), ("text", "int"), ("text", "float")}
ACCEPT = "--split-moved accept"


class SplitMoved(UsageError):
    """Rows change their split, or it cannot be known whether they do: what was trained on would be tested on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumn:
    """A column that is hashed, under its present name and type, as the type that it had first."""

    name: str
    type: str
    first: str
    """The column's name in the table's first version."""
    first_type: str
    was: str | None = None
    """The name that it had before the last `was` of a spec."""

    def __post_init__(self) -> None:
        for kind in (self.type, self.first_type):
            if kind not in TYPES:
                raise ValueError(
                    f"key column {self.name!r}: type {kind!r} is none of {', '.join(TYPES)}"
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
    named: bool = False
    """Whether a spec named them, as `table.key`; otherwise they are the input columns of the first version."""
    split_by: tuple[KeyColumn, ...] = ()
    """The columns whose hash decides the split instead, if `table.split_by` names any."""
    recognised: tuple[KeyColumn, ...] = ()
    """The columns that tell a row from others when two versions are compared."""

    def __post_init__(self) -> None:
        if not self.columns or not self.recognised:
            raise ValueError("an identity needs at least one column")
        if len({c.name for c in self.columns}) < len(self.columns):
            raise ValueError(
                f"an identity has a column twice: {', '.join(c.name for c in self.columns)}"
            )

    @classmethod
    def of(cls, spec: Spec) -> Identity:
        """The rule of a new table that begins with this spec: its key, or all input columns but the label, so that no
        label decides where its row lies."""
        types = spec.types
        names = spec.table.key or tuple(name for name in spec.input.columns if name != spec.label)
        columns = tuple(KeyColumn.of(name, types[name]) for name in names)
        by = tuple(KeyColumn.of(name, types[name]) for name in spec.table.split_by)
        return cls(
            seed=spec.table.seed,
            columns=columns,
            named=bool(spec.table.key),
            split_by=by,
            recognised=_recognised(columns, by, spec),
        )

    def found_in(self, spec: Spec) -> Identity:
        """This rule, with the names and types that its columns have in a later spec; `SplitMoved` if that spec lacks
        them.

        The rows that are there already can then be recognised again, whatever the spec's own rule is."""
        columns = tuple(_found(column, spec) for column in self.columns)
        by = tuple(_found(column, spec) for column in self.split_by)
        return replace(
            self, columns=columns, split_by=by, recognised=_recognised(columns, by, spec)
        )

    def permit(self, spec: Spec) -> None:
        """Refuses a later spec, in which this rule was found, if it has another key, seed or groups."""
        key, names = spec.table.key, tuple(c.name for c in self.columns)
        if key and set(key) != set(names):
            raise SplitMoved(
                f"table.key names {', '.join(key)}, and the rows of this table are known by "
                f"{', '.join(names)}; write that, or {_accept()}"
            )
        if spec.table.seed != self.seed:
            raise SplitMoved(
                f"table.seed = {spec.table.seed}: the rows of this table are placed by seed {self.seed}, "
                f"and another gives them other splits; write that one, or {_accept()}"
            )
        groups = tuple(c.name for c in self.split_by)
        if groups != spec.table.split_by:
            now, was = (", ".join(by) or "nothing" for by in (spec.table.split_by, groups))
            raise SplitMoved(
                f"table.split_by names {now}, and for the rows of this table it was {was}; write that, "
                f"or {_accept()}"
            )

    def same(self, other: Identity) -> bool:
        """Whether both rules give every row the same key, and the same group where groups decide the split."""
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
        """Names the hash by which rows are recognised: two versions that share it can be compared."""
        told = json.dumps([self.seed, [(c.first, c.first_type) for c in self.recognised]])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def without(self, label: str) -> tuple[KeyColumn, ...]:
        """The columns that decide a row's fold, and its place among rows of one moment: all but the label."""
        return tuple(column for column in self.columns if column.name != label)

    def covers(self, names: Iterable[str]) -> bool:
        """Whether rows with equal keys are equal in all of these columns."""
        return set(names) <= {c.name for c in self.columns if c.type == c.first_type}

    @property
    def text(self) -> str:
        """Describes the rule for a person."""
        names = [c.name for c in self.columns]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
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


def _recognised(
    columns: tuple[KeyColumn, ...], by: tuple[KeyColumn, ...], spec: Spec
) -> tuple[KeyColumn, ...]:
    """The columns of the key, and whatever else decides a row's split; but not the column of the split's own name, nor
    a row's place in the input, as these may change."""
    table, known = spec.table, {c.name for c in columns}
    more = [c for c in by if c.name not in known]
    if table.split_time and table.split_time not in {*known, spec.input.place}:
        more.append(KeyColumn.of(table.split_time, spec.types[table.split_time]))
    found = tuple(c for c in (*columns, *more) if c.name != table.split_column)
    return found or columns


def _found(column: KeyColumn, spec: Spec) -> KeyColumn:
    """Finds a column of the rule among those of a later spec."""
    types, was = spec.types, spec.input.was
    name = column.name
    if name not in types or was.get(name) not in (None, column.was, name):
        name = next((new for new, old in was.items() if old == column.name), "")
    if not name:
        renamed = (
            "" if column.name not in types else f" ({column.name!r} was {was[column.name]!r} there)"
        )
        raise SplitMoved(
            f"input column {column.name!r} is missing{renamed}, and which split a row of this table lies in hangs on "
            f"it{nearest(column.name, [n for n in types if n not in was])}; put it back, or, if it has another name "
            f'now, write {{name = "…:{column.type}", was = "{column.name}"}} in input.columns, or {_accept()}'
        )
    kind, mapped = types[name], name in was
    if kind != column.type and not mapped:
        raise SplitMoved(
            f"input column {name!r} is {kind} and was {column.type}, and which split a row of this table lies in hangs "
            f'on it; write {column.type} again, or {{name = "{name}:{kind}", was = "{name}"}} in input.columns to '
            f"read it as {column.first_type} there, or {_accept()}"
        )
    if kind != column.first_type and (kind, column.first_type) not in _READABLE:
        raise SplitMoved(
            f"input column {name!r} is {kind} and was {column.first_type} in this table's first version: "
            f"what that held cannot be read out of it, so rows would change their split; {_accept()}"
        )
    return replace(column, name=name, type=kind, was=was.get(name))


def _accept() -> str:
    return f"accept with {ACCEPT} that rows of train become rows of test"
