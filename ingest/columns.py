"""The columns that a pipeline carries, and their roles: `Columns`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from types import MappingProxyType

import numpy as np

from sluice.etl.ops.base import id_kind, is_wide
from sluice.etl.schema import Field
from sluice.ingest.choices import History, history_name
from sluice.ingest.errors import LoadingError
from sluice.ingest.knobs import nearest

_WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NUMBERS = (*_WHOLE, "float", "double", "halffloat")
_BAGS = re.compile(r"(large_)?binary|(large_)?list<(\w+: )?u?int(8|16|32|64)( not null)?>")
# The assumed ids in a bag. They only reserve memory before the first bags are read.
_GUESSED_BAG = 8.0
_ADDRESS = 8  # bytes that say where a row's bag lies
_LENGTHS = ".lengths"


def lengths_name(column: str) -> str:
    """Returns the name under which functions get the number of ids in each row of a column of bags."""
    return f"{column}{_LENGTHS}"


def column_of(name: str) -> str:
    """Returns the column whose values or lengths have this name."""
    return name.removesuffix(_LENGTHS)


class ColumnError(LoadingError):
    """A column cannot be loaded. The message names the column and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a pipeline. Dense features, label and weight are float32. Ids are int32, or uint32 if they do not
    fit int32. A row has one id, or a bag of ids."""

    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    """The columns of ids, including bags."""
    label: str
    weight: str | None = None
    bags: Mapping[str, float] = field(default_factory=dict)
    """The columns of `sparse` that hold bags, and the average number of ids in a bag."""
    cardinalities: Mapping[str, int] = field(default_factory=dict)
    fill: Mapping[str, float] = field(default_factory=dict)
    """The number that replaces a missing value in a column. In other columns a missing value is an error. A missing bag
    becomes an empty one."""
    added: frozenset[str] = frozenset()
    """The columns that no file holds, because transforms add them."""
    in_order_hash: str | None = None
    """The column whose ids, before any transform, go into the order hash: the column with the most ids."""
    histories: tuple[str, ...] = ()
    """The columns of `bags` that hold a row's history. They are the last of `sparse`."""
    numbers: tuple[str, ...] = ()
    """Those of `histories` that hold float32. They are the last of `histories`. Arrays of ids hold their 32 bits."""

    def __post_init__(self) -> None:
        if not self.dense and not self.sparse:
            raise ColumnError(
                "no column has the role dense or sparse, so there is nothing to train on; give one of them to a column"
            )
        for name in ("cardinalities", "bags", "fill"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def described(self) -> str:
        """How many columns of each role there are, with the first names, in one line."""
        roles = {"dense": self.dense, "sparse": self.sparse}
        counted = (
            f"{len(names)} {role}: {', '.join(names[:3])}{', …' * (len(names) > 3)}"
            for role, names in roles.items()
            if names
        )
        weight = (f"weight: {self.weight}",) if self.weight else ()
        return "; ".join((*counted, f"label: {self.label}", *weight))

    @classmethod
    def of(
        cls,
        fields: Iterable[Field],
        fill: Mapping[str, float] | float | None = None,
        bags: Mapping[str, float] | None = None,
        known: Mapping[str, float] = MappingProxyType({}),
    ) -> Columns:
        """Makes the columns from the fields of a table, in the table's order.

        `fill` is one number for all columns of numbers except the label, or a number for each name. It overrides
        `known`. `bags` has the average number of ids for columns that do not say it themselves."""
        fields = tuple(fields)
        used = [f for f in fields if f.role in ("dense", "sparse", "label", "weight", "id_list")]
        for f in used:
            _check_type(f)
        most = max(
            (f for f in used if f.role in ("sparse", "id_list") and not f.made),
            key=lambda f: f.stored_ids or f.cardinality or 0,
            default=None,
        )
        labels = [f.name for f in used if f.role == "label"]
        weights = [f.name for f in used if f.role == "weight"]
        if len(labels) != 1 or len(weights) > 1:
            none = (
                ""
                if labels
                else ': name one, as label=NAME in roles, or by role = "label" in a spec'
            )
            raise ColumnError(
                f"one label and at most one weight are needed; the table has the labels {labels} and "
                f"the weights {weights}{none}"
            )
        numbers = [f.name for f in used if f.role != "id_list" and not f.made]
        if not isinstance(fill, Mapping):
            fill = {n: fill for n in numbers if fill is not None and n not in labels}
        for name, value in fill.items():
            if not (isinstance(value, Real) and abs(value) < 2.0**128):
                raise ColumnError(f"fill: {value!r} for column {name!r} is no number of float32")
            if name not in numbers:
                raise ColumnError(
                    f"fill: {name!r} is no column of numbers that is loaded{nearest(name, numbers)}"
                )
        online = {f.name for f in used if f.online}  # operators that readers apply fill these
        return cls(
            fill={name: n for name, n in {**known, **fill}.items() if name not in online},
            dense=tuple(f.name for f in used if f.role == "dense"),
            sparse=tuple(f.name for f in used if f.role in ("sparse", "id_list")),
            label=labels[0],
            weight=weights[0] if weights else None,
            bags={
                f.name: f.bag[1] if f.bag else (bags or {}).get(f.name, _GUESSED_BAG)
                for f in used
                if f.role == "id_list"
            },
            cardinalities={f.name: f.cardinality for f in used if f.cardinality},
            added=frozenset(f.name for f in used if f.made),
            in_order_hash=most.name if most else None,
        )

    def with_history(self, history: History) -> Columns:
        """Returns the columns with the histories. Raises ColumnError if one of its columns cannot have a history."""
        known = (*self.floats, *self.scalars)
        for name in history.columns:
            if name in self.bags or name in self.added:
                why = "has several values a row" if name in self.bags else "is made by a transform"
                raise ColumnError(
                    f"history: column {name!r} {why}. Name columns with one stored value a row"
                )
            if name not in known:
                raise ColumnError(
                    f"history: no column {name!r} is loaded{nearest(name, known)}. Give it the role sparse or dense"
                )
            if history_name(name) in (*self.floats, *self.sparse):
                raise ColumnError(
                    f"history: the table already has a column {history_name(name)!r}; rename it"
                )
        numbers = tuple(history_name(n) for n in history.columns if n in self.floats)
        ids = {history_name(n): n for n in history.columns if n in self.scalars}
        sizes = {own: self.cardinalities[n] for own, n in ids.items() if n in self.cardinalities}
        return replace(
            self,
            sparse=(*self.sparse, *ids, *numbers),
            bags={**self.bags, **dict.fromkeys((*ids, *numbers), float(history.last))},
            cardinalities={**self.cardinalities, **sizes},
            histories=(*ids, *numbers),
            numbers=numbers,
        )

    @property
    def floats(self) -> tuple[str, ...]:
        """The columns of floats: dense features, label and weight."""
        return (*self.dense, self.label, *((self.weight,) if self.weight else ()))

    @property
    def names(self) -> tuple[str, ...]:
        """All columns to read from files."""
        other = {*self.added, *self.histories}
        return tuple(name for name in (*self.floats, *self.sparse) if name not in other)

    @property
    def ids(self) -> tuple[str, ...]:
        """The columns of `sparse` that hold ids, which are its first."""
        return self.sparse[: len(self.sparse) - len(self.numbers)]

    @property
    def scalars(self) -> tuple[str, ...]:
        """The columns with one id a row."""
        return tuple(name for name in self.sparse if name not in self.bags)

    @property
    def stored_numbers(self) -> tuple[str, ...]:
        """The columns with one number or id a row that files hold."""
        return tuple(name for name in (*self.floats, *self.scalars) if name not in self.added)

    @property
    def stored_bags(self) -> tuple[str, ...]:
        """The columns of bags that files hold."""
        return tuple(name for name in self.bags if name not in self.added)

    def id_kind(self, name: str) -> type[np.int32 | np.uint32]:
        """Returns the type of a column's ids inside the pipeline."""
        return id_kind(self.cardinalities.get(name))

    def value_kind(self, name: str) -> type[np.int32 | np.uint32 | np.float32]:
        """Returns the type of a column's ids or numbers inside the pipeline."""
        return np.float32 if name in (*self.floats, *self.numbers) else self.id_kind(name)

    @property
    def wide(self) -> bool:
        """Whether some ids do not fit int32, so that a batch has all ids as int64."""
        return any(map(is_wide, self.cardinalities.values()))

    @property
    def row_bytes(self) -> int:
        """The average bytes of a row in a batch."""
        each = 8 if self.wide else 4
        return (
            4 * len(self.floats) + each * len(self.sparse) + round(each * sum(self.bags.values()))
        )

    @property
    def history_bytes(self) -> int:
        """The average bytes of a row's histories in a batch."""
        return round((8 if self.wide else 4) * sum(self.bags[name] for name in self.histories))

    @property
    def placed_row_bytes(self) -> int:
        """The average bytes of a row at its place, until its batch is finished. It has each event of a history once,
        and a batch has it in the history of each later row. Each bag also has an address, and each other column of ids
        a length."""
        bags = _ADDRESS * len(self.stored_bags) + (4 * len(self.scalars) if self.bags else 0)
        return self.row_bytes - self.history_bytes + bags


def _check_type(f: Field) -> None:
    """Raises ColumnError if a column's type does not fit its role."""
    # The loader's operators make ids from numbers of any type.
    ids = f.role == "sparse" and not f.online
    fits = f.nullable or (
        _BAGS.fullmatch(f.type) if f.role == "id_list" else f.type in (_WHOLE if ids else _NUMBERS)
    )
    if fits:
        return
    if f.role == "id_list":
        wanted = "lists of whole numbers, or binary"
    elif not ids:
        wanted = "one number a row"
    else:
        wanted = (
            "one whole number a row (cast it; hash, categorify or bucketize it in the spec; texts and whole numbers of "
            f"plain Parquet can be hashed by Loader(hash={{{f.name!r}: 1_000_000}}))"
        )
    better = (
        "give it the role id_list"
        if ids and _BAGS.fullmatch(f.type)
        else "leave the column out, or give it another role"
    )
    if f.type.startswith(("timestamp", "date")):
        better = (
            "its hour or weekday can be a feature: `sluice guess` writes a spec that makes them"
        )
    raise ColumnError(
        f"column {f.name!r} holds {f.type} in the role {f.role}, which takes {wanted}: {better}"
    )
