"""Measures how fast a core and the memory of this machine are: `Speed`, taken in well under a second and remembered.

Both are taken in processor time, the best of a few tries, so that a loaded machine gives nearly the same numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

_TRIES = 5
_HASHED = 4 * 2**20
_COPIED = 32 * 2**20  # larger than most caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    core_bytes_per_s: float
    """The bytes that one core hashes (BLAKE2b) in a second: its speed at plain arithmetic."""
    memory_bytes_per_s: float
    """The bytes that one core reads and writes in a second while it copies what does not fit into any cache."""

    def __post_init__(self) -> None:
        for name in ("core_bytes_per_s", "memory_bytes_per_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name}: {value!r} is not a positive number")


def measure(clock: Callable[[], float] = time.thread_time) -> Speed:
    data, source = bytes(_HASHED), np.ones(_COPIED, np.uint8)
    target = np.empty_like(source)
    target[:] = source  # from now on the pages are mapped

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(_TRIES):
            began = clock()
            work()
            times.append(clock() - began)
        return max(min(times), 1e-9)

    def copy() -> None:
        target[:] = source

    return Speed(core_bytes_per_s=_HASHED / best(lambda: hashlib.blake2b(data)),
                 memory_bytes_per_s=2 * _COPIED / best(copy))


def speed_of(machine: str, folder: Path, measured: Callable[[], Speed] = measure) -> Speed:
    """The speed remembered in `folder` of a machine of this name; measured and remembered if there is none, or if it is
    damaged. A folder that cannot be written is no reason to fail."""
    path = folder / f"speed-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
    try:
        return Speed(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        found = measured()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "x") as draft:
            json.dump(asdict(found), draft)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return found
