"""Descriptions of a table's columns and files: `Field`, `DataFile`, `Fingerprint`. Frozen values, no I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("label", "weight", "dense", "sparse", "id_list", "time", "key")
LAYOUTS = ("scalar", "bytes", "list")
VALUES_RULE = 2
"""The version of the rule by which values of other rows become texts and keys. In version 1, whole numbers of a history
became floats first, and keys of joins depended on the engine."""
CLOSE_RULE = 3
"""The rule of a column whose medians or quantiles were learned by dividing ranges, which 0.3.0 did not do."""


BagSizes = tuple[int, float, int]
"""The smallest, mean and largest number of ids in a bag."""


class FieldError(ValueError):
    """An invalid column. The message names the column and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One column of a feature table, as a trainer needs it."""

    name: str
    role: str
    """One of ROLES. `sparse` is one id a row, `id_list` is a bag of ids."""
    type: str
    """Arrow's name of the stored type: `float`, `int32`, `int8`, `binary`, `list<int32>` …"""
    layout: str = "scalar"
    """`scalar`, `bytes` (a bag packed as little-endian words of 32 bits in a binary column) or `list`."""
    cardinality: int | None = None
    """The number of rows that its embedding needs. Every id is below it. Only for `sparse` and `id_list`."""
    width: int | None = None
    """The embedding width that the spec asks for, if any."""
    bag: BagSizes | None = None
    """None for scalars."""
    online: tuple[dict[str, Any], ...] = ()
    """Operators left to the loader, as the spec has them (`{"op": "log", …}`)."""
    inputs: tuple[str, ...] = ()
    """The columns that it is made from. If empty, the input column of the same name."""
    nullable: bool = False
    """Whether nulls may be stored. This needs operators in the loader that handle them."""
    made: bool = False
    """Whether a transform adds it (`sluice.etl.spec.table_transform`). No file holds it then."""
    transforms: tuple[str, ...] = ()
    """The names of the transforms that add or change it."""
    stored_ids: int | None = None
    """The cardinality of the stored ids, if a transform changes the ids."""
    values_rule: int = 1
    """The rule that converted its values. It is 1 if version 1 gives the same values."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise FieldError(
                f"column {self.name!r}: role {self.role!r} is none of {', '.join(ROLES)}"
            )
        if self.layout not in LAYOUTS:
            raise FieldError(
                f"column {self.name!r}: layout {self.layout!r} is none of {', '.join(LAYOUTS)}"
            )
        if self.cardinality is not None and self.cardinality < 1:
            raise FieldError(f"column {self.name!r}: cardinality {self.cardinality} is below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Parquet file of one version, as the table's log lists it."""

    path: str
    """Absolute path or URI."""
    rows: int
    bytes: int
    split: str = "train"
    """`train`, `validation`, `test`, or what the spec names."""
    row_group_rows: tuple[int, ...] = ()
    """The number of rows in each row group, in order. If empty, read it from the footer."""
    stored_rows: tuple[int, ...] = ()
    """If only a split's rows count above: the number of all rows in each row group."""
    content: str = ""
    """The digest of the file, from its job's record, or of its footer. Empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Two short hashes, of what a pipeline's tuning and a model's shape depend on."""

    layout: str
    """The hash of names, types, roles, online operators, bag lengths and transforms. If it changes, tune again, because
    the pipeline's costs change."""
    vocabulary: str
    """The hash of the cardinalities. If it changes, the embeddings have another shape."""

    @classmethod
    def of(
        cls, fields: Iterable[Field], transforms: Sequence[Mapping[str, Any]] = ()
    ) -> Fingerprint:
        """Returns the fingerprint of these columns. `transforms` describe the table's transforms as plain values."""
        fields = sorted(fields, key=lambda f: f.name)
        bags = {f.name: f.bag and [f.bag[0], round(f.bag[1]), f.bag[2]] for f in fields}
        layout = [
            [f.name, f.role, f.type, f.layout, list(f.online), bags[f.name]]
            + ([f.values_rule] if f.values_rule > 1 else [])
            for f in fields
        ]
        return cls(
            layout=digest([*layout, *transforms]),
            vocabulary=digest([[f.name, f.cardinality] for f in fields]),
        )


def abridged(names: Sequence[object], most: int) -> str:
    """Returns the first `most` names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def digest(value: Any) -> str:
    """Returns a short hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One commit in a table's history."""

    version: int
    at: str
    """The time of the commit: UTC, ISO 8601."""
    mode: str
    """`create`, `append` or `overwrite`."""
    job: str
    rows: int
