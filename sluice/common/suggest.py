"""Suggests the nearest existing name in messages. Standard library only, because every package uses this file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Self


def meant(name: object, known: Iterable[str]) -> str:
    """Returns the end of a message about a name or a value: ` (did you mean 'clip'?)`, or nothing."""
    close = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns the end of a message about a name: the one that may have been meant, or the names to choose from."""
    known = list(known)
    return meant(name, known) or f" (known: {', '.join(sorted(known)) or 'none'})"


class NamedFields:
    """A base of dataclasses that users write. An unknown argument raises a TypeError with the most similar field."""

    __slots__ = ()

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = vars(cls)["__dataclass_fields__"]
        for name in given.keys() - known.keys():
            raise TypeError(f"{cls.__name__} has no argument {name!r}{nearest(name, known)}")
        return super().__new__(cls)
