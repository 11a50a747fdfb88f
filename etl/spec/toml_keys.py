"""Reads a spec's TOML into dataclasses: `read_into`. The hints of their fields say which values a key may have.

Each mistake is a `SpecError` that names the key's path, its value and the nearest right name."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest, nearest_or_way
from sluice.etl.ops.base import hints_of, problem

ONE_VALUE = ("text", "number")
"""The kinds of columns that hold one value a row."""
T = TypeVar("T")
_NO_COLUMNS: Mapping[str, str] = MappingProxyType({})


class SpecError(UsageError):
    """A spec that cannot be used. The message names the file, the key's path and what to write."""


@dataclass(frozen=True, slots=True)
class InputColumn:
    """In the hint of a key: its texts name input columns. Each holds one of these kinds of values, if any are given."""

    kinds: tuple[str, ...] = ()

    def check(self, names: str | tuple[str, ...], path: str, columns: Mapping[str, str]) -> None:
        for name in (names,) if isinstance(names, str) else names:
            if name not in columns:
                raise SpecError(f"{path} = {name!r}: no such input column{nearest(name, columns)}")
            if self.kinds and columns[name] not in self.kinds:
                raise SpecError(
                    f"{path} = {name!r}: the column holds {columns[name]}, and this key takes one value a row: "
                    f"{' or '.join(self.kinds)}"
                )


Columns = Annotated[tuple[str, ...], InputColumn()]
Column = Annotated[str, InputColumn()]
ValueColumn = Annotated[str, InputColumn(ONE_VALUE)]
NumberColumn = Annotated[str, InputColumn(("number",))]


def columns_named(section: Any) -> Iterator[tuple[str, str]]:
    """Yields each key of a section that names input columns, with each of these names."""
    hints = hints_of(type(section))  # type: ignore[arg-type]
    for f in fields(section):
        parts = (hints[f.name], *get_args(hints[f.name]))
        marks = (mark for part in parts for mark in getattr(part, "__metadata__", ()))
        if any(isinstance(mark, InputColumn) for mark in marks):
            names = getattr(section, f.name) or ()
            yield from ((f.name, name) for name in ([names] if isinstance(names, str) else names))


def read_section(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{key}: must be a table, written [{key}]")
    return value


def read_sections(raw: Mapping[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the tables of an array, each with its path."""
    entries = raw.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise SpecError(f"{key}: must be tables, each written [[{key}]]")
    return [(f"{key}[{number}]", entry) for number, entry in enumerate(entries)]


def check_keys(raw: Mapping[str, Any], names: Iterable[str], path: str) -> None:
    names = tuple(names)
    for key in raw:
        if key not in names:
            raise SpecError(
                f"{path}{'.' if path else ''}{key}: unknown key{nearest_or_way(key, names)}"
            )


def read_into(
    kind: type[T],
    raw: Mapping[str, Any],
    path: str,
    columns: Mapping[str, str] = _NO_COLUMNS,
    /,
    **given: Any,
) -> T:
    """Returns a dataclass from a section that has a key for each field. Fields that are `given` have no key. `columns`
    are the input columns with their kinds."""
    keys = [f for f in fields(kind) if f.name not in given]  # type: ignore[arg-type]
    check_keys(raw, [f.name for f in keys], path)
    for f in keys:
        if f.name in raw:
            hint = hints_of(kind)[f.name]  # type: ignore[arg-type]
            given[f.name] = read_value(raw[f.name], hint, f"{path}.{f.name}", columns)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise SpecError(f"{path}: {f.name} is missing")
    return kind(**given)


def read_value(value: Any, hint: Any, path: str, columns: Mapping[str, str] = _NO_COLUMNS) -> Any:
    """Returns the value of a key with such a hint."""
    converted = _convert(value, hint, path, columns)
    if wrong := problem(converted, hint):
        raise SpecError(f"{path} = {value!r}: {wrong}")
    return converted


def _convert(value: Any, hint: Any, path: str, columns: Mapping[str, str]) -> Any:
    """Returns a value of TOML in the type of a hint."""
    kind, parts = get_origin(hint), [part for part in get_args(hint) if part is not NoneType]
    if kind is Annotated:
        converted = _convert(value, parts[0], path, columns)
        for mark in hint.__metadata__:
            if isinstance(mark, InputColumn):
                mark.check(converted, path, columns)
        return converted
    if kind is Literal:
        return _convert(value, str, path, columns)
    if kind is tuple:  # a single text counts as a list of one
        items = [value] if isinstance(value, str) else _convert(value, list, path, columns)
        places = (f"{path}[{number}]" for number in range(len(items)))
        return tuple(
            read_value(item, parts[0], place, columns)
            for item, place in zip(items, places, strict=True)
        )
    if kind is Mapping:
        return {
            name: read_value(item, parts[1], f"{path}.{name}", columns)
            for name, item in _convert(value, dict, path, columns).items()
        }
    if parts:  # a union: its text comes first
        return _convert(value, parts[0 if isinstance(value, str) else -1], path, columns)
    if hint is float and type(value) in (int, float):
        return float(value) + 0.0  # without -0.0, equal operators give equal bits
    if hint is Any or type(value) is hint:
        return value
    raise SpecError(f"{path} = {value!r}: must be {hint.__name__}")


def read_encoding(name: str, path: str, delimiter: str) -> str:
    """Returns Python's name for the encoding of lines. Line ends, the delimiter, quotes and a few other characters must
    have the same bytes as in ASCII."""
    if len(delimiter.encode()) != 1 or delimiter in "\r\n":
        raise SpecError(
            f"{path}.delimiter = {delimiter!r}: must be one character other than a line's end"
        )
    signs = f'\r\n"+~{delimiter}'  # some encodings write + or ~ with the byte of a line's end
    try:
        if signs.encode(name) == signs.encode():
            return codecs.lookup(name).name
    except (LookupError, UnicodeError):
        raise SpecError(
            f"{path}.encoding = {name!r}: no such encoding; write for instance latin-1 or cp1252"
        ) from None
    raise SpecError(
        f"{path}.encoding = {name!r}: this encoding writes a line's end or the delimiter in other bytes, "
        "so lines cannot be cut; write the files in UTF-8"
    )


def quoted(value: object) -> str:
    """Returns a text, or a list of texts, in TOML."""
    return json.dumps(value, ensure_ascii=False)


def toml_texts(several: Sequence[str]) -> str:
    """Returns texts in TOML: a single one as it is, several as a list."""
    return quoted(several[0] if len(several) == 1 else list(several))
