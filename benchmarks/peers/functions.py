"""The user's functions of the tuned race, which every loader calls, and the trainer's step. It needs numpy only.

A function costs three times as much as soon as there is a file `dearer` in the folder that `RACE_FOLDER` names. Worker
processes inherit that variable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

_BOUNDS = np.linspace(0, 1, 100, dtype=np.float32)
_STEP = np.linspace(0, 1, 100_000, dtype=np.float32)


def dearer() -> str:
    return os.path.join(os.environ.get("RACE_FOLDER", ""), "dearer")


def times() -> int:
    return 3 if os.path.exists(dearer()) else 1


def walk(texts: Iterable[str | bytes]) -> np.ndarray:
    """Walks through the words of each text, as a first text feature does: in pure Python, some 20 µs a row."""
    numbers, repeats = [], times()
    for text in texts:
        total = 0
        for _ in range(repeats):
            for word in text.split():
                for letter in range(8):
                    total = (31 * total + len(word) + letter) % 1009
        numbers.append(total / 1009)
    return np.array(numbers, np.float32)


def bucket(dense: np.ndarray) -> np.ndarray:
    """Replaces each number by that of its bucket, with numpy: some 0.5 µs a row of 13 numbers."""
    for _ in range(times()):
        buckets = np.searchsorted(_BOUNDS, dense)
    return buckets.astype(np.float32)


def apply(function: str, dense: np.ndarray, texts: Any) -> np.ndarray:
    """Calls the user's function of this name over a batch: `walk` fills the first column, `bucket` changes all."""
    if function == "walk":
        dense = np.array(dense)
        dense[:, 0] = walk(texts)
        return dense
    return bucket(dense) if function == "bucket" else np.log1p(dense)


def train(passes: int) -> None:
    """A trainer's step on one core, of so many passes."""
    for _ in range(passes):
        np.tanh(_STEP)


def passes_of(seconds: float) -> int:
    """The passes that this machine makes in that time, when nothing else runs."""
    began = time.perf_counter()
    train(200)
    return max(1, round(200 * seconds / (time.perf_counter() - began)))
