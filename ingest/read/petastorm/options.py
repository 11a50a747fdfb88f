"""The options for Petastorm's Reader: `PetastormOptions`. Also its schemas, and how a TransformSpec changes them.

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
from sluice.etl.schema import Field
from sluice.etl.spec.nested_columns import parts
from sluice.ingest.knobs import nearest
from sluice.ingest.process.row_call import keep_frame
from sluice.ingest.read.petastorm import compat
from sluice.ingest.stages.transform import FrameFunction, address_of


class PetastormError(UsageError):
    """An option for Petastorm's Reader that Sluice cannot use. The message names it and says what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PetastormOptions:
    """The options of Petastorm's Reader except columns, as Petastorm's own objects."""

    transform_spec: Any = None
    """A `petastorm.transform.TransformSpec`: a function over each row group as a DataFrame, and the fields that it
    edits, removes or selects. The function must return one row for each row."""
    predicate: Any = None
    """A `petastorm.predicates.PredicateBase`. The rows that it rejects are not part of the order. Its columns are read
    once when the loader is made, to count the other rows."""
    rowgroup_selector: Any = None
    """A `petastorm.selectors.RowGroupSelectorBase` without a stored index, because Sluice unpickles nothing."""
    cache: Any = None
    """A `petastorm.cache.CacheBase`, which keeps decoded row groups."""
    schema: Any = None
    """A `petastorm.unischema.Unischema` that the files must have. None: it is inferred from the first file."""

    def __post_init__(self) -> None:
        if not any(
            (self.transform_spec, self.predicate, self.rowgroup_selector, self.cache, self.schema)
        ):
            return
        compat.install()
        from petastorm.cache import CacheBase
        from petastorm.local_disk_cache import LocalDiskCache
        from petastorm.predicates import PredicateBase
        from petastorm.selectors import RowGroupSelectorBase
        from petastorm.transform import TransformSpec
        from petastorm.unischema import Unischema

        kinds = {
            "transform_spec": TransformSpec,
            "predicate": PredicateBase,
            "schema": Unischema,
            "rowgroup_selector": RowGroupSelectorBase,
            "cache": CacheBase,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise PetastormError(
                    f"{name}: {value!r} is not a {kind.__module__}.{kind.__name__}"
                )
        if isinstance(self.cache, LocalDiskCache):
            raise PetastormError(
                "cache: Petastorm's LocalDiskCache unpickles what lies on the disk, which can run any "
                "program; use FileOpener(cache=FileCache(…)), which keeps what was read from a store"
            )
        if self.cache is not None and self.predicate is not None:
            raise PetastormError(
                "cache: Petastorm does not cache row groups that a predicate filters; "
                "leave out the cache or the predicate"
            )
        if self.rowgroup_selector is not None and list(self.rowgroup_selector.get_index_names()):
            raise PetastormError(
                f"rowgroup_selector: it needs the indexes {self.rowgroup_selector.get_index_names()}, "
                "which are pickled in _common_metadata, and Sluice unpickles nothing; give a selector "
                "that uses the numbers of row groups, or a predicate"
            )

    @property
    def asked_for(self) -> list[str]:
        return [name for name in self.__slots__ if getattr(self, name) is not None]


def filters_of(options: PetastormOptions) -> list[str]:
    """Returns the columns that the predicate reads."""
    return [] if options.predicate is None else sorted(options.predicate.get_fields())


def check_filters(options: PetastormOptions, stored: pa.Schema) -> None:
    """Raises PetastormError if the predicate reads a column that the files lack."""
    there = [part.name for part in parts(stored)]
    if lacking := [name for name in filters_of(options) if name not in there]:
        raise PetastormError(f"predicate: no column {lacking[0]!r}{nearest(lacking[0], there)}")


def spec_functions(
    options: PetastormOptions, wanted: Sequence[str], stored: pa.Schema
) -> tuple[FrameFunction, ...]:
    """Returns the TransformSpec as a function over rows that gives the wanted columns. None is needed if it only
    removes fields. Its function gets all columns of the files whose types Petastorm knows."""
    spec = options.transform_spec
    if spec is None or not (spec.func or spec.edit_fields):
        return ()
    stored = pa.schema(list(parts(stored)))
    after = transformed(stored, spec)
    if lacking := [name for name in wanted if name not in after.names]:
        raise PetastormError(f"files: no column {lacking[0]!r}{nearest(lacking[0], after.names)}")
    before = unischema_of(stored)
    shapes = {field[0]: list(field[2]) for field in spec.edit_fields}
    function = spec.func or keep_frame
    return (
        FrameFunction(
            address_of(function) or function,
            "TransformSpec",
            reads=tuple(before.fields),
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


def difference(expected: Any, found: Any) -> str | None:
    """Returns why rows of a file cannot be loaded along with the others, or None if they can. A column may be missing,
    hold something else where numbers are expected, or hold lists where single values are expected."""
    for name, field in expected.fields.items():
        if name not in found.fields:
            return f"no column {name!r}{nearest(name, list(found.fields))}"
        there = found.fields[name]
        if _kind(field) != _kind(there):
            return f"column {name!r} holds {_describe_field(there)}, where the schema has {_describe_field(field)}"
    return None


def _kind(field: Any) -> tuple[bool, int]:
    kind = field.numpy_dtype
    return isinstance(kind, type) and issubclass(kind, (np.number, np.bool_)), len(field.shape)


def _describe_field(field: Any) -> str:
    return ("lists of " if field.shape else "") + getattr(
        field.numpy_dtype, "__name__", str(field.numpy_dtype)
    )


def transformed(stored: pa.Schema, spec: Any) -> pa.Schema:
    """Returns the schema after a TransformSpec. PetastormError if it names missing fields."""
    compat.install()
    from petastorm.transform import transform_schema

    before = unischema_of(stored)
    edited = {field[0] for field in spec.edit_fields}
    check_names(spec, list(before.fields))
    return pa.schema(
        [
            _edited(field) if name in edited else stored.field(name)
            for name, field in transform_schema(before, spec).fields.items()
        ]
    )


def check_names(spec: Any, there: Sequence[str]) -> None:
    """Raises PetastormError if a TransformSpec names missing fields."""
    edited = [field[0] for field in spec.edit_fields]
    for what, known in (("removed_fields", there), ("selected_fields", [*there, *edited])):
        for name in getattr(spec, what) or ():
            if name not in known:
                raise PetastormError(
                    f"TransformSpec: {what} names {name!r}, which is not there{nearest(name, known)}"
                )


def _edited(field: Any) -> pa.Field:
    try:
        kind = (
            pa.string()
            if field.numpy_dtype is np.str_
            else pa.from_numpy_dtype(np.dtype(field.numpy_dtype))
        )
    except (TypeError, pa.ArrowException):
        raise PetastormError(
            f"TransformSpec: edit_fields gives {field.name!r} the type {field.numpy_dtype!r}, which "
            "Arrow does not have; use a numpy type"
        ) from None
    return pa.field(field.name, pa.list_(kind) if field.shape else kind)


def types_after(
    stored: Mapping[str, pa.DataType], spec: Any
) -> tuple[dict[str, pa.DataType], frozenset[str]]:
    """Returns the types of the columns after a TransformSpec, and the columns that it makes itself, which no file
    describes."""
    after = {f.name: f.type for f in transformed(pa.schema(stored), spec)}
    return after, frozenset(field[0] for field in spec.edit_fields) & after.keys()


def fields_after(fields: Iterable[Field], stored: pa.Schema, spec: Any) -> tuple[Field, ...]:
    """Returns a table's columns after a TransformSpec. An edited column keeps its role but loses its number of ids. A
    new column gets a role by its type."""
    after, found = transformed(stored, spec), []
    there = {f.name: f for f in fields}
    edited = {field[0] for field in spec.edit_fields}
    for column in after:
        if column.name in edited:
            found.append(_given_field(column.name, column.type, there))
        elif column.name in there:
            found.append(there[column.name])
    return (*found, *(f for f in there.values() if f.made))


def fields_with(fields: Iterable[Field], given: Mapping[str, pa.DataType]) -> tuple[Field, ...]:
    """Returns a table's columns with those that functions over rows give, in the way of `fields_after`."""
    there = {f.name: f for f in fields}
    made = [f for f in there.values() if f.made]
    stored = [f for f in there.values() if not f.made and f.name not in given]
    return (*stored, *(_given_field(name, kind, there) for name, kind in given.items()), *made)


def _given_field(name: str, kind: pa.DataType, there: Mapping[str, Field]) -> Field:
    several = pa.types.is_list(kind)
    if several:
        role = "id_list"
    elif pa.types.is_floating(kind):
        role = "dense"
    else:
        role = "sparse"
    known = there.get(name) or Field(name=name, role=role, type="")
    return replace(known, type=str(kind), layout="list" if several else "scalar", cardinality=None)


def split_transform_spec(transforms: Iterable[Any]) -> tuple[Iterable[Any], Any]:
    """Splits a user's transforms into those over batches, and the TransformSpec that comes first, or None."""
    given = (
        list(transforms)
        if isinstance(transforms, Sequence) and not isinstance(transforms, str)
        else transforms
    )
    known = sys.modules.get("petastorm.transform")
    if known is None or not isinstance(given, list):
        return given, None
    at = [n for n, one in enumerate(given) if isinstance(one, known.TransformSpec)]
    if len(at) > 1:
        raise PetastormError(
            "transforms: only one TransformSpec can be used; put their functions into one"
        )
    if at and at != [0]:
        raise PetastormError(
            "transforms: a TransformSpec works on row groups as they are read, before any function "
            "over batches, so give it first"
        )
    return (given[1:], given[0]) if at else (given, None)
