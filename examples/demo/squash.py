"""The demos' transforms: `squash`, and two that ask a service for the same and mostly wait for its answers.

A service is asked about 64 rows at a time. That of `levels` takes 16 ms to answer: one worker gets 4,000 rows a second,
two get 8,000. That of `quick_levels` takes 5 ms: one worker gets 12,800 rows a second.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

ROWS, ANSWER_S = 64, 0.016
_QUICK_ANSWER_S = 0.005
_LOWEST, _HIGHEST, _KNOTS = -2.0, 14.0, 32  # of the curve, in logarithms of counts


def squash(columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Maps counts of any size to numbers from -1 to 1, along a curve given by its knots."""
    knots = np.linspace(_LOWEST, _HIGHEST, _KNOTS)
    levels_there = np.tanh(knots / 4)
    return {
        name: np.interp(columns[name], knots, levels_there).astype(np.float32)
        for name in columns
        if name.startswith("I")
    }


def levels(columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Asks the service for the level of each count: it knows the curve of `squash`."""
    return _ask(columns, ANSWER_S)


def quick_levels(columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Asks the faster service for the same."""
    return _ask(columns, _QUICK_ANSWER_S)


def _ask(columns: dict[str, npt.NDArray[Any]], answer_s: float) -> dict[str, npt.NDArray[Any]]:
    rows = len(next(iter(columns.values())))
    for _ in range(0, rows, ROWS):
        time.sleep(answer_s)
    return squash(columns)
