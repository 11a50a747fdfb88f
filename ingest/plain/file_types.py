"""Compares the columns of several Parquet files: `common_types` finds the common columns, and `refuse_mixed` rejects
types that cannot be loaded together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import pyarrow as pa

from sluice.ingest.columns import ColumnError
from sluice.ingest.plain.recipe import Recipe, check_kind
from sluice.ingest.plain.roles import ParquetError

SEVERAL = "several columns of this name"
"""The type of a column if another column of the file has the same name."""
_WHOLE = re.compile(r"u?int(8|16|32|64)")
_NUMBER = re.compile(r"u?int(8|16|32|64)|bool|halffloat|float|double")
_BAG = re.compile(r"(large_)?list<(\w+: )?u?int(8|16|32|64)( not null)?>")
Types = Mapping[str, str]
"""Arrow's name for the type of each column of a file."""


def common_types(
    paths: Sequence[str], files: Sequence[Types], optional: Iterable[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the types of the columns that all files have, and for each other column a file that lacks it. `optional`
    columns may be missing in some files."""
    types = dict(files[0])
    lacking: dict[str, str] = {}
    for path, one in zip(paths, files, strict=True):
        if one.keys() != types.keys():
            lacking |= {name: path for name in types if name not in one}
            lacking |= {name: paths[0] for name in one if name not in files[0]}
            types = {name: kind for name, kind in types.items() if name in one}
    for name in optional:
        lacking.pop(name, None)
        types |= next(({name: one[name]} for one in files if name in one), {})
    return types, lacking


def common_number(kinds: Iterable[str]) -> pa.DataType | None:
    """Returns the type in which numbers of these types are compared. None if some are not numbers."""
    if not all(map(_NUMBER.fullmatch, kinds)):
        return None
    return pa.int64() if all(_WHOLE.fullmatch(kind) for kind in kinds) else pa.float64()


def refuse_mixed(
    names: Iterable[str],
    recipes: Iterable[Recipe],
    kinds: Mapping[str, str],
    files: Sequence[tuple[str, Types]],
    types_there: Callable[[str], Mapping[str, pa.DataType]],
) -> None:
    """Raises an error with file and column if a column's types cannot be loaded together.

    Numbers of several types can, because each value is checked. So can columns that a spec reads as one type (`kinds`).
    `types_there` returns the types of a file."""
    hashed = {name for recipe in recipes if recipe.operators for name in recipe.sources}
    for name in names:
        first: tuple[str, str] | None = None
        for path, file in files:
            if name not in file:
                continue
            if file[name] == SEVERAL:
                raise ParquetError(
                    f"{path}: several columns are called {name!r}; write the file with one of "
                    "each name, or leave them out of the roles"
                )
            first = first or (path, file[name])
            if file[name] == first[1]:
                continue
            if name in kinds:
                try:
                    check_kind(name, types_there(path)[name], kinds[name])
                except ColumnError as error:
                    raise ColumnError(f"{path}: {error}") from None
            elif not any(
                like.fullmatch(first[1]) and like.fullmatch(file[name])
                for like in (_BAG, _WHOLE if name in hashed else _NUMBER)
            ):
                raise ParquetError(
                    f"{path}: column {name!r} holds {file[name]}, in {first[0]} it holds {first[1]}; "
                    "write the files with one schema, load them apart, or give the column a type in a "
                    "spec"
                )
