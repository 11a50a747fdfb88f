"""Reads a spec's keys: each mistake is a `SpecError` that names the key's path and the nearest right name."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest


class SpecError(UsageError):
    """A spec that cannot be used: its message names the file, the key's path and what would do."""


def section(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{key}: must be a table, written [{key}]")
    return value


def sections(raw: Mapping[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the tables of an array, each with its path."""
    entries = raw.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise SpecError(f"{key}: must be tables, each written [[{key}]]")
    return [(f"{key}[{number}]", entry) for number, entry in enumerate(entries)]


def known(raw: Mapping[str, Any], names: Iterable[str], path: str) -> None:
    names = tuple(names)
    for key in raw:
        if key not in names:
            raise SpecError(f"{path}{'.' if path else ''}{key}: unknown key{nearest(key, names)}")


def value(
    raw: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any, path: str
) -> Any:
    """Returns the value of a key, which must be of a type; its default if it is not there."""
    found = raw.get(key, default)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if key in raw and (
        not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds)
    ):
        raise SpecError(
            f"{path}.{key} = {found!r}: must be {' or '.join(k.__name__ for k in kinds)}"
        )
    return found


def needed(raw: Mapping[str, Any], key: str, kind: type | tuple[type, ...], path: str) -> Any:
    if key not in raw:
        raise SpecError(f"{path}: {key} is missing")
    return value(raw, key, kind, None, path)


def column(raw: Mapping[str, Any], key: str, columns: Iterable[str], path: str) -> str:
    """Returns the value of a key that names an input column."""
    name = str(needed(raw, key, str, path))
    if name not in (columns := tuple(columns)):
        raise SpecError(f"{path}.{key} = {name!r}: no such input column{nearest(name, columns)}")
    return name


def texts(raw: Mapping[str, Any], key: str, default: Iterable[str], path: str) -> tuple[str, ...]:
    """Returns a list of texts; one text is a list of one."""
    found = value(raw, key, (list, str), list(default), path)
    found = [found] if isinstance(found, str) else found
    if not all(isinstance(item, str) for item in found):
        raise SpecError(f"{path}.{key} = {found!r}: must be texts")
    return tuple(found)


def encoding(raw: Mapping[str, Any], path: str, delimiter: str) -> str:
    """Returns Python's name for the encoding of lines. Line ends, the delimiter, quotes and a few other characters must
    have the same bytes as in ASCII."""
    if len(delimiter.encode()) != 1 or delimiter in "\r\n":
        raise SpecError(
            f"{path}.delimiter = {delimiter!r}: must be one character other than a line's end"
        )
    name = value(raw, "encoding", str, "utf-8", path)
    signs = f'\r\n"+~{delimiter}'  # of + and ~ some encodings make an end of a line, or none of one
    try:
        if signs.encode(name) == signs.encode():
            return codecs.lookup(name).name
    except (LookupError, UnicodeError):
        raise SpecError(
            f"{path}.encoding = {name!r}: no such encoding; write for instance latin-1 or cp1252"
        ) from None
    raise SpecError(
        f"{path}.encoding = {name!r}: a line's end or the delimiter is written in other bytes there, by "
        "which lines are cut; write the files in UTF-8"
    )
