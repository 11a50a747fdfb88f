"""Functions that remote workers call in measurements. They have a module of their own because workers import it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from itertools import combinations, pairwise
from typing import Any

import numpy as np


def nothing(_: Mapping[str, Any]) -> None:
    """Changes no column."""


def text_crosses(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Eight crosses of two ids, each hashed as a text, row by row, as a first version in Python does."""
    names = [name for name in columns if name.startswith("C")][:9]
    found = {}
    for one, other in pairwise(names):
        pairs = zip(columns[one].tolist(), columns[other].tolist(), strict=True)
        found[one] = np.array([zlib.crc32(f"{a}_{b}".encode()) % 1000 for a, b in pairs], np.int32)
    return found


def number_crosses(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Forty crosses of two ids in numpy; every fifth replaces a column."""
    names = [name for name in columns if name.startswith("C")]
    found = {}
    for number, (one, other) in enumerate(list(combinations(names, 2))[:40]):
        mixed = columns[one].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= columns[other].astype(np.uint64)
        crossed = (mixed % np.uint64(1000)).astype(np.int32)
        if number % 5 == 0:
            found[names[number // 5]] = crossed
    return found


def service(_: Mapping[str, Any]) -> None:
    """Waits as for a service that answers in 5 ms."""
    time.sleep(0.005)
