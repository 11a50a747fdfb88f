"""Whether values that users give are numbers: `is_number`, `is_whole`. Python counts True as 1, and these do not."""

from __future__ import annotations

import math
from typing import Any


def is_number(value: Any, low: float = 0, high: float = math.inf) -> bool:
    """Whether the value is a finite number from `low` to `high`."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    return fits and low <= value <= high and abs(value) < math.inf


def is_whole(value: Any, low: float = 0, high: float = math.inf) -> bool:
    """Whether the value is a whole number from `low` to `high`."""
    return isinstance(value, int) and is_number(value, low, high)
