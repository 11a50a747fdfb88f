"""The differences between two references, each named by its path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

MADE_WITH = "made with"
CLOSE = 1e-4
"""How far apart losses may lie, as a share: libraries and processors round differently."""


def differences(reference: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns a line for each difference. Bytes of files and of tensors are only compared if both references were made
    with the same libraries on the same kind of processor."""
    same_bytes = reference[MADE_WITH] == now[MADE_WITH]
    parts = (
        {key: value for key, value in reference_part.items() if key != MADE_WITH}
        for reference_part in (reference, now)
    )
    return list(_differences(*parts, path="", same_bytes=same_bytes))


def _differences(before: Any, after: Any, *, path: str, same_bytes: bool) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{path}/{key}" if path else key
            if key == "bytes" and not same_bytes:
                continue
            if key not in after:
                yield f"{inner}: is gone, and was {_short(before[key])}"
            elif key not in before:
                yield f"{inner}: is new, {_short(after[key])}"
            else:
                yield from _differences(before[key], after[key], path=inner, same_bytes=same_bytes)
    elif (
        isinstance(before, list)
        and isinstance(after, list)
        and _are_names(before)
        and _are_names(after)
    ):
        yield from (f"{path}: {name} is gone" for name in before if name not in after)
        yield from (f"{path}: {name} is new" for name in after if name not in before)
        if sorted(before) == sorted(after) and before != after:
            yield f"{path}: is in another order, {_short(after)}"
    elif not _is_close(before, after):
        yield f"{path}: was {_short(before)}, and is {_short(after)}"


def _are_names(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_close(before: Any, after: Any) -> bool:
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return all(map(_is_close, before, after))
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=CLOSE)
    return bool(before == after)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
