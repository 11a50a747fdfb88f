"""Reads a spec's keys. Each mistake is a `SpecError` that names the key's path and the nearest right name."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest

ONE_VALUE = ("text", "number")
"""The kinds of columns that hold one value a row."""


class SpecError(UsageError):
    """A spec that cannot be used. The message names the file, the key's path and what to write."""


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
            raise SpecError(f"{path}{'.' if path else ''}{key}: unknown key{nearest(key, names)}")


def read_value(
    raw: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any, path: str
) -> Any:
    """Returns the value of a key, or the default if the key is missing. Checks the value's type."""
    found = raw.get(key, default)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if key in raw and (
        not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds)
    ):
        raise SpecError(
            f"{path}.{key} = {found!r}: must be {' or '.join(k.__name__ for k in kinds)}"
        )
    return found


def read_required(
    raw: Mapping[str, Any], key: str, kind: type | tuple[type, ...], path: str
) -> Any:
    if key not in raw:
        raise SpecError(f"{path}: {key} is missing")
    return read_value(raw, key, kind, None, path)


def read_choice(
    raw: Mapping[str, Any], key: str, choices: Iterable[str], default: str, path: str
) -> str:
    """Returns the value of a key that must be one of a few words."""
    found = str(read_value(raw, key, str, default, path))
    if found not in choices:
        raise SpecError(f"{path}.{key} = {found!r}: unknown {key}{nearest(found, choices)}")
    return found


def read_count(raw: Mapping[str, Any], key: str, default: int, most: int, path: str) -> int:
    """Returns a whole number from 1 to `most`."""
    found = int(read_value(raw, key, int, default, path))
    if not 1 <= found <= most:
        raise SpecError(f"{path}.{key} = {found}: must be from 1 to {most}")
    return found


def read_texts(
    raw: Mapping[str, Any], key: str, default: Iterable[str], path: str
) -> tuple[str, ...]:
    """Returns a list of texts. A single text counts as a list of one."""
    found = read_value(raw, key, (list, str), list(default), path)
    found = [found] if isinstance(found, str) else found
    if not all(isinstance(item, str) for item in found):
        raise SpecError(f"{path}.{key} = {found!r}: must be texts")
    return tuple(found)


def read_column_names(
    raw: Mapping[str, Any],
    key: str,
    kinds: Mapping[str, str],
    path: str,
    allowed: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Returns the input columns that a key names. Each must hold one of the `allowed` kinds of values."""
    names = read_texts(raw, key, (), path)
    for name in names:
        if name not in kinds:
            raise SpecError(f"{path}.{key} = {name!r}: no such input column{nearest(name, kinds)}")
        if allowed and kinds[name] not in allowed:
            raise SpecError(
                f"{path}.{key} = {name!r}: the column holds {kinds[name]}, and this key takes one value a row: "
                f"{' or '.join(allowed)}"
            )
    return names


def read_column_name(
    raw: Mapping[str, Any],
    key: str,
    kinds: Mapping[str, str],
    path: str,
    allowed: Iterable[str] | None = None,
) -> str:
    read_required(raw, key, str, path)
    return read_column_names(raw, key, kinds, path, allowed)[0]


def read_encoding(raw: Mapping[str, Any], path: str, delimiter: str) -> str:
    """Returns Python's name for the encoding of lines. Line ends, the delimiter, quotes and a few other characters must
    have the same bytes as in ASCII."""
    if len(delimiter.encode()) != 1 or delimiter in "\r\n":
        raise SpecError(
            f"{path}.delimiter = {delimiter!r}: must be one character other than a line's end"
        )
    name = read_value(raw, "encoding", str, "utf-8", path)
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
