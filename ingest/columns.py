"""Which columns a pipeline carries, and as what: `Columns`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from etl.fields import Field

_NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double",
            "halffloat")


class ColumnError(ValueError):
    """A column that cannot be loaded: its message names the column and what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Two blocks of numbers: float32 (dense features, label, weight) and int32 (ids)."""

    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    label: str
    weight: str | None = None
    cardinalities: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.dense and not self.sparse:
            raise ColumnError("no column has the role dense or sparse: there is nothing to train on")
        object.__setattr__(self, "cardinalities", MappingProxyType(dict(self.cardinalities)))

    @classmethod
    def of(cls, fields: Iterable[Field]) -> Columns:
        """By the roles of a table's columns, in the table's order."""
        fields = tuple(fields)
        used = [f for f in fields if f.role in ("dense", "sparse", "label", "weight", "id_list")]
        for f in used:
            if f.role == "id_list" or f.layout != "scalar" or f.type not in _NUMBERS:
                raise ColumnError(f"column {f.name!r} holds {f.type} in the role {f.role}: this loader carries one "
                                  "number a row; leave the column out or give it another role in the spec")
        labels = [f.name for f in used if f.role == "label"]
        weights = [f.name for f in used if f.role == "weight"]
        if len(labels) != 1 or len(weights) > 1:
            raise ColumnError(f"one label and at most one weight are needed; the table has the labels {labels} and "
                              f"the weights {weights}")
        return cls(dense=tuple(f.name for f in used if f.role == "dense"),
                   sparse=tuple(f.name for f in used if f.role == "sparse"), label=labels[0],
                   weight=weights[0] if weights else None,
                   cardinalities={f.name: f.cardinality for f in used if f.role == "sparse" and f.cardinality})

    @property
    def floats(self) -> tuple[str, ...]:
        """The rows of the float block."""
        return (*self.dense, self.label, *((self.weight,) if self.weight else ()))

    @property
    def names(self) -> tuple[str, ...]:
        """All columns to read."""
        return (*self.floats, *self.sparse)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in either block, and at most when decoded."""
        return 4 * len(self.names)
