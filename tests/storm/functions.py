"""What users of a storm give their loader: functions that are interrupted, fail on some rows, or want memory."""

from typing import Any

import numpy as np

from tests.storm.threads import current, running


def raised(columns: dict[str, Any]) -> None:
    """Writes into what it gets, half of it at a time."""
    x = columns["x"]
    half = len(x) // 2
    x[:half] += 1
    _point()
    x[half:] += 1


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    """Gives back something new."""
    _point()
    return {"x": columns["x"] * np.float32(2)}


def hungry(columns: dict[str, Any]) -> dict[str, Any]:
    """At times there is not enough memory for it, at its first try. That depends on the batch alone."""
    given = {"x": columns["x"] + np.float32(0.5)}
    columns["x"][:] = -1
    _point()
    if running():  # what is right is worked out with the same functions
        first, fed = int(columns["a"][0]), current().world.fed
        if first % 3 == 0 and first not in fed:
            fed.add(first)
            raise MemoryError("this once")
    return given


def fragile(columns: dict[str, Any]) -> dict[str, Any]:
    """Fails on one row in eleven."""
    _point()
    bad = columns["a"] % 11 == 5
    if bad.any():
        raise ValueError("a row that it cannot take")
    return {"x": columns["x"] + np.float32(3)}


def shifted(columns: dict[str, Any]) -> dict[str, Any]:
    """A function over rows."""
    _point()
    return {"x": columns["x"] + (columns["a"] % 5).astype(np.float32)}


def picky(columns: dict[str, Any]) -> dict[str, Any]:
    """A function over rows that fails on one row in thirteen."""
    _point()
    if (columns["a"] % 13 == 4).any():
        raise ValueError("a row that it cannot take")
    return {"x": columns["x"] * np.float32(3)}


FUNCTIONS = {f.__name__: f for f in (raised, doubled, hungry, fragile)}
OVER_ROWS = {f.__name__: f for f in (shifted, picky)}


def _point() -> None:
    if running():
        current().point("function")
