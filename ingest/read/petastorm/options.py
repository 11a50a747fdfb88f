"""What Petastorm's Reader is asked for: `PetastormOptions`. Also its schemas, and how a TransformSpec changes them.

Functions import Petastorm when they need it. If it is not installed, Arrow reads the row groups.
"""

from __future__ import annotations

import json
import sys
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.common.errors import UsageError
from sluice.common.suggest import NamedFields, nearest
from sluice.etl.schema import Field
from sluice.etl.spec.nested_columns import parts
from sluice.ingest.process.row_call import keep_frame
from sluice.ingest.read.petastorm import compat
from sluice.ingest.stages.transform import FrameFunction, address_of


class PetastormError(UsageError):
    """An option for Petastorm's Reader that Sluice cannot use. The message names it and says what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PetastormOptions(NamedFields):
    """What Petastorm's Reader is asked for, as Petastorm's own objects."""

    predicate: Any = None
    """A `petastorm.predicates.PredicateBase`. The rows that it rejects are not part of the order. Its columns are read
    once when the loader is made, to count the other rows."""

    def __post_init__(self) -> None:
        if self.predicate is None:
            return
        compat.install()
        from petastorm.predicates import PredicateBase

        if not isinstance(self.predicate, PredicateBase):
            raise PetastormError(
                f"predicate: {self.predicate!r} is not a petastorm.predicates.PredicateBase"
            )


def spec_functions(
    spec: Any, wanted: Sequence[str], stored: pa.Schema
) -> tuple[FrameFunction, ...]:
    """Returns a TransformSpec as a function over rows that gives the wanted columns. None is needed if it only
    removes fields. Its function gets all columns of the files whose types Petastorm knows."""
    if spec is None or not (spec.func or spec.edit_fields):
        return ()
    stored = pa.schema(list(parts(stored)))
    after = transformed(stored, spec)
    if lacking := [name for name in wanted if name not in after.names]:
        raise PetastormError(f"files: no column {lacking[0]!r}{nearest(lacking[0], after.names)}")
    shapes = {field[0]: list(field[2]) for field in spec.edit_fields}
    function = spec.func or keep_frame
    return (
        FrameFunction(
            address_of(function) or function,
            "TransformSpec",
            reads=tuple(unischema_of(stored).fields),
            gives={name: after.field(name).type for name in wanted},
            frame=json.dumps(
                {
                    "removed": list(spec.removed_fields),
                    "shapes": {name: shapes.get(name, []) for name in after.names},
                }
            ),
        ),
    )


# ---- the schema, and what a TransformSpec makes of it


def unischema_of(schema: pa.Schema) -> Any:
    """Returns the Unischema that Petastorm infers. It leaves out columns of types that it does not know."""
    compat.install()
    from petastorm.unischema import Unischema

    known = compat.named(schema)
    footer = types.SimpleNamespace(schema=types.SimpleNamespace(to_arrow_schema=lambda: known))
    piece = types.SimpleNamespace(get_metadata=lambda: footer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Unischema.from_arrow_schema(types.SimpleNamespace(pieces=[piece], partitions=None))


def transformed(stored: pa.Schema, spec: Any) -> pa.Schema:
    """Returns the schema after a TransformSpec. PetastormError if it names missing fields."""
    compat.install()
    from petastorm.transform import transform_schema

    before = unischema_of(stored)
    check_names(spec, list(before.fields))
    edited = edited_by(spec)
    return pa.schema(
        [
            _edited(field) if name in edited else stored.field(name)
            for name, field in transform_schema(before, spec).fields.items()
        ]
    )


def edited_by(spec: Any) -> set[str]:
    """Returns the columns that a TransformSpec makes itself, which no file describes."""
    return set() if spec is None else {field[0] for field in spec.edit_fields}


def check_names(spec: Any, there: Sequence[str]) -> None:
    """Raises PetastormError if a TransformSpec names missing fields."""
    for what, known in (
        ("removed_fields", there),
        ("selected_fields", [*there, *edited_by(spec)]),
    ):
        for name in getattr(spec, what) or ():
            if name not in known:
                raise PetastormError(
                    f"TransformSpec: {what} names {name!r}, which is not there{nearest(name, known)}"
                )


def _edited(field: Any) -> pa.Field:
    text = field.numpy_dtype is np.str_
    try:
        kind = pa.string() if text else pa.from_numpy_dtype(np.dtype(field.numpy_dtype))
    except (TypeError, pa.ArrowException):
        raise PetastormError(
            f"TransformSpec: edit_fields gives {field.name!r} the type {field.numpy_dtype!r}, which "
            "Arrow does not have; use a numpy type"
        ) from None
    return pa.field(field.name, pa.list_(kind) if field.shape else kind)


def fields_after(
    fields: Iterable[Field], stored: pa.Schema | None, spec: Any, given: Mapping[str, pa.DataType]
) -> tuple[Field, ...]:
    """Returns a table's columns after a TransformSpec over the `stored` ones, with those that functions over rows have
    `given`. A column that is edited or given keeps its role but loses its number of ids. A new one gets a role by its
    type."""
    there = {f.name: f for f in fields}
    columns: dict[str, pa.DataType | None] = {n: None for n, f in there.items() if not f.made}
    if spec is not None:
        edited = edited_by(spec)
        columns = {
            f.name: f.type if f.name in edited else None
            for f in transformed(stored, spec)
            if f.name in edited or f.name in there
        }
    columns = {name: kind for name, kind in columns.items() if name not in given} | dict(given)
    return (
        *(
            there[name] if kind is None else _given_field(name, kind, there)
            for name, kind in columns.items()
        ),
        *(f for f in there.values() if f.made),
    )


def _given_field(name: str, kind: pa.DataType, there: Mapping[str, Field]) -> Field:
    role, layout = "sparse", "scalar"
    if pa.types.is_list(kind):
        role, layout = "id_list", "list"
    elif pa.types.is_floating(kind):
        role = "dense"
    known = there.get(name) or Field(name=name, role=role, type="")
    return replace(known, type=str(kind), layout=layout, cardinality=None)


def split_transform_spec(transforms: Iterable[Any]) -> tuple[Iterable[Any], Any]:
    """Splits a user's transforms into those over batches, and the TransformSpec that comes first, or None."""
    known = sys.modules.get("petastorm.transform")
    if known is None or isinstance(transforms, str) or not isinstance(transforms, Sequence):
        return transforms, None
    given = list(transforms)
    at = [n for n, transform in enumerate(given) if isinstance(transform, known.TransformSpec)]
    if at not in ([], [0]):
        raise PetastormError(
            "transforms: give only one TransformSpec, and give it first, because it works on row groups as they are "
            "read, before any function over batches"
        )
    return (given[1:], given[0]) if at else (given, None)
