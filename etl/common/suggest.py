"""Suggests the nearest right name for one that does not exist, in messages."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.etl.common.arguments import _meant


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of a message about a name: ` (did you mean 'clip'?)`, or the names there are to choose from."""
    known = list(known)
    return _meant(name, known) or f" (known: {', '.join(sorted(known)) or 'none'})"
