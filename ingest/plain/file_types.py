"""Compares the columns of several Parquet files: `common_types` finds the common columns, and `refuse_mixed` rejects
types that cannot be loaded together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import pyarrow as pa

from sluice.common.suggest import nearest
from sluice.etl.spec.nested_columns import is_list, is_text
from sluice.ingest.columns import ColumnError
from sluice.ingest.plain.recipe import Recipe, check_kind, is_number
from sluice.ingest.plain.roles import ParquetError, Types, can_hash

SEVERAL = pa.opaque(pa.null(), "several columns of this name", "sluice")
"""The type of a column if another column of the file has the same name."""
_COMMON = (
    (pa.types.is_integer, pa.int64()),
    (is_number, pa.float64()),
    (pa.types.is_decimal, pa.float64()),
    (is_text, pa.string()),
    (pa.types.is_timestamp, pa.timestamp("us", "UTC")),
)
"""The types in which values of several types are compared."""


def common_types(
    paths: Sequence[str], files: Sequence[Types], optional: Iterable[str]
) -> tuple[dict[str, pa.DataType], dict[str, str]]:
    """Returns the types of the columns that all files have, and for each other column a file that lacks it. `optional`
    columns may be missing in some files."""
    types = dict(files[0])
    lacking: dict[str, str] = {}
    for path, own_types in zip(paths, files, strict=True):
        if own_types.keys() != types.keys():
            lacking |= {name: path for name in types if name not in own_types}
            lacking |= {name: paths[0] for name in own_types if name not in files[0]}
            types = {name: kind for name, kind in types.items() if name in own_types}
    for name in optional:
        lacking.pop(name, None)
        types |= next(({name: own_types[name]} for own_types in files if name in own_types), {})
    return types, lacking


def common_type(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    """Returns the type in which values of these types are compared. None if they cannot be loaded together."""
    if all(map(_is_list, kinds)):
        inner = common_type([kind.value_type for kind in kinds])
        return None if inner is None else pa.list_(inner)
    return next((kind for check, kind in _COMMON if all(map(check, kinds))), None)


def refuse_mixed(
    names: Iterable[str],
    recipes: Iterable[Recipe],
    kinds: Mapping[str, str],
    files: Sequence[tuple[str, Types]],
) -> None:
    """Raises an error with file and column if a column's types cannot be loaded together.

    Types with a `common_type` can: each number is checked, and all kinds of text have the same hash. So can columns
    that a spec reads as one type (`kinds`)."""
    hashed = {name for recipe in recipes if recipe.operators for name in recipe.sources}
    for name in names:
        first: tuple[str, pa.DataType] | None = None
        for path, file in files:
            if name not in file:
                continue
            kind = file[name]
            if kind == SEVERAL:
                raise ParquetError(
                    f"{path}: several columns are called {name!r}; write the file with one of "
                    "each name, or leave them out of the roles"
                )
            first = first or (path, kind)
            if kind == first[1]:
                continue
            if name in kinds:
                try:
                    check_kind(name, kind, kinds[name])
                except ColumnError as error:
                    raise ColumnError(f"{path}: {error}") from None
            elif (common := common_type((first[1], kind))) is None or not (
                can_hash(common) or (name not in hashed and not is_list(common))
            ):
                raise ParquetError(
                    f"{path}: column {name!r} holds {kind}, in {first[0]} it holds {first[1]}; "
                    "write the files with one schema, load them apart, or give the column a type in a "
                    "spec"
                )


def difference(expected: pa.Schema, given: pa.Schema, first: str) -> str | None:
    """Returns why a file cannot be loaded along with `first`, which has the `expected` columns. It needs all of them.
    Types of numbers may differ, and types of texts."""
    for field in expected:
        if wrong := why_missing(field.name, given.names):
            return wrong
        kind = given.field(field.name).type
        if _sort_of(kind) != _sort_of(field.type):
            return f"column {field.name!r} holds {kind}, in {first} it holds {field.type}"
    return None


def why_missing(name: str, names: Sequence[str]) -> str | None:
    """Returns why a column cannot be taken from these. None: it can."""
    if name not in names:
        return f"no column {name!r}{nearest(name, names)}"
    several = names.count(name)
    return (
        f"{several} columns are called {name!r}. Write the file with one column of each name"
        if several > 1
        else None
    )


def _sort_of(kind: pa.DataType) -> tuple[bool, bool]:
    return is_number(kind), _is_list(kind)


def _is_list(kind: pa.DataType) -> bool:
    """Whether it is a type of lists of any length."""
    return is_list(kind) and not pa.types.is_fixed_size_list(kind)
