"""Units that several loaders of one job want are made once: `SharedUnits`.

A unit is kept until each loader that was heard of lately has had it, or until there is no room: then the oldest goes,
and whoever lags makes it anew. So a loader that dies or lags holds up nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

_GONE_S = 30.0  # after so long a silence nobody keeps anything for a loader
Made = tuple[Any, bytes]
"""A unit's rows, and their checksum."""


@dataclass(eq=False)
class _Kept:
    """One unit, and which loaders have had it."""

    made: Future[Made] = field(default_factory=Future)
    had: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return int(self.made.result()[0].nbytes) if self.made.done() and self.made.exception() is None else 0


class SharedUnits:
    """The units that a worker keeps for others, in so many bytes at most."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._limit, self._clock, self._lock = limit_bytes, clock, threading.Lock()
        self._kept: dict[tuple[str, str], _Kept] = {}  # the oldest first
        self._heard: dict[str, dict[str, float]] = {}

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())

    def get(self, kin: str, loader: str, unit: str, make: Callable[[], Made]) -> Made:
        """A unit for a loader. Loaders of one `kin` want the same units: who asks while one is made waits for it."""
        with self._lock:
            self._heard.setdefault(kin, {})[loader] = self._clock()
            alone = self._tidied(kin) == 1
            kept = self._kept.get((kin, unit))
            mine = kept is None
            if kept is None:
                kept = _Kept()
                if not alone:  # otherwise there is nobody to keep it for
                    self._kept[kin, unit] = kept
        if mine:
            try:
                kept.made.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._kept.pop((kin, unit), None)  # who asks again may fare better
                kept.made.set_exception(error)
        found = kept.made.result()
        with self._lock:
            kept.had.add(loader)
            self._tidied(kin)
        return found

    def _tidied(self, kin: str) -> int:
        """Drops what nobody may still want, and what there is no room for; the number of loaders heard of lately."""
        heard, since = self._heard[kin], self._clock() - _GONE_S
        for loader in [one for one, at in heard.items() if at < since]:
            del heard[loader]
        for key in [key for key, kept in self._kept.items() if key[0] == kin and kept.had >= heard.keys()]:
            del self._kept[key]
        while self._kept and self.bytes > self._limit:
            del self._kept[next(iter(self._kept))]
        return len(heard)
