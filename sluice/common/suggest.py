"""Suggests the nearest existing name in messages. Standard library only, because every package uses this file."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any, Self

_LEFT = {
    "intune": "`sluice bench --tuning intune` runs it in a checkout (benchmarks/rivals)",
    "agent_weights": "leave it out; `auto` has no such file",
    "step_threads": "leave it out; whole runs were 1.04 times as fast at most",
    "Loader epochs": "take read_ahead_epochs, which limits read-ahead, not the number of epochs",
    "sluice serve --tables": "leave it out; tables are held as they were trained",
}
"""A verb, an option, an argument or a value of 0.3 that left → what to do instead. A name that means
something elsewhere follows its program or its class."""

_OF_0_2 = (
    *("placement", "partition", "past", "past_step", "boxcox", "logit", "flags", "overlap"),
    *("recent", "lookup", "group", "min_max", "read", "collate"),
)
BY_WAY = (
    'Sluice 0.3 reads what 0.2 wrote: pip install "sluice-recsys==0.3.*", and continue or rewrite it there '
    "(docs/from-0.2.md)"
)


def nearest_or_way(name: object, known: Collection[str]) -> str:
    """Returns the end of a message about an unknown name in a spec or in knobs: `BY_WAY` if Sluice 0.2 had it, else as
    `nearest`."""
    return f". {BY_WAY}" if name in _OF_0_2 else nearest(name, known)


def left(name: str) -> str:
    """Returns the end of a message about a verb, an option or an argument that Sluice had: what to do instead. Empty:
    Sluice did not have it. The name may follow a program or a class: `sluice plan --data`, `Transform memory_limit`."""
    word = name.rpartition(" ")[2].lstrip("-")
    instead = _LEFT.get(name) or _LEFT.get(word.replace("-", "_"))
    return f", which was in an earlier version: {instead}" if instead else ""


def meant(name: object, known: Collection[str]) -> str:
    """Returns the end of a message about a name or a value: ` (did you mean 'clip'?)`, or nothing. A part of an object
    (`geo.country`) is meant by the object's name."""
    parts = [path for path in known if path.startswith(f"{name}.")]
    close = parts or difflib.get_close_matches(str(name), known, 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest(name: object, known: Collection[str]) -> str:
    """Returns the end of a message about a name: the one that may have been meant, or the names to choose from."""
    return meant(name, known) or f" (known: {', '.join(sorted(known)) or 'none'})"


class NamedFields:
    """A base of dataclasses that users write. An unknown argument raises a TypeError with the most similar field."""

    __slots__ = ()

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = vars(cls)["__dataclass_fields__"]
        for name in given.keys() - known.keys():
            raise TypeError(
                f"{cls.__name__} has no argument {name!r}{left(f'{cls.__name__} {name}') or nearest(name, known)}"
            )
        return super().__new__(cls)
