"""Suggests the nearest right name for one that does not exist, in messages. Standard library only: every room uses
it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: object, known: Iterable[str]) -> str:
    """The tail of a message about a name, or about what was given for one: ` (did you mean 'clip'?)`, or nothing if no
    name is near."""
    close = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest(name: object, known: Iterable[str]) -> str:
    """The tail of a message about a name: the one that may have been meant, or the names there are to choose from."""
    known = list(known)
    return meant(name, known) or f" (known: {', '.join(sorted(known)) or 'none'})"
