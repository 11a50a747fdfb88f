"""The nearest right name to one that does not exist, for messages."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.etl.common.arguments import _meant


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'clip'?)` or what there is to choose from: the tail of a message about a name."""
    known = list(known)
    return _meant(name, known) or f" (known: {', '.join(sorted(known)) or 'none'})"
