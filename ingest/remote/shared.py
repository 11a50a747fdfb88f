"""Units that several loaders of one job want are made once: `SharedUnits`.

A unit is kept until each loader that was heard of lately has had it, or until there is no room: then the oldest goes,
and whoever lags makes it anew. Whoever needs the next batch makes it, so a loader that dies in the middle holds up
nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_GONE_S = 30.0  # after so long a silence nobody keeps anything for a loader
Part = tuple[Any, bytes]
"""A batch and its checksum."""


class _Made:
    """One unit, as far as it was made, and which loaders had all of it."""

    def __init__(self, source: Iterator[Part]):
        self._source, self._lock, self._parts = source, threading.Lock(), list[Part]()
        self._error: Exception | None = None
        self.had, self.bytes = set[str](), 0

    def __iter__(self) -> Iterator[Part]:
        number = 0
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if number == len(self._parts):
                    try:
                        part = next(self._source, None)
                    except Exception as error:
                        self._error = error
                        raise
                    if part is None:
                        return
                    self._parts.append(part)
                    self.bytes += part[0].nbytes
                part = self._parts[number]
            yield part
            number += 1


class SharedUnits:
    """The units that a worker keeps for others, in so many bytes at most."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._limit, self._clock, self._lock = limit_bytes, clock, threading.Lock()
        self._kept: dict[tuple[str, str], _Made] = {}  # the oldest first
        self._heard: dict[str, dict[str, float]] = {}

    @property
    def bytes(self) -> int:
        return sum(made.bytes for made in self._kept.values())

    def parts(self, kin: str, loader: str, unit: str, make: Callable[[], Iterator[Part]]) -> Iterator[Part]:
        """The parts of a unit for a loader. Loaders of one `kin` want the same units."""
        with self._lock:
            self._heard.setdefault(kin, {})[loader] = self._clock()
            made = self._kept.get((kin, unit)) or _Made(make())
            if self._tidied(kin) > 1:  # otherwise there is nobody to keep it for
                self._kept[kin, unit] = made
        try:
            yield from made
        except Exception:
            with self._lock:
                self._kept.pop((kin, unit), None)  # who asks again may fare better
            raise
        with self._lock:
            made.had.add(loader)
            self._tidied(kin)

    def _tidied(self, kin: str) -> int:
        """Drops what nobody may still want, and what there is no room for; the number of loaders heard of lately."""
        heard, since = self._heard[kin], self._clock() - _GONE_S
        for loader in [one for one, at in heard.items() if at < since]:
            del heard[loader]
        for key in [key for key, made in self._kept.items() if key[0] == kin and made.had >= heard.keys()]:
            del self._kept[key]
        while self._kept and self.bytes > self._limit:
            del self._kept[next(iter(self._kept))]
        return len(heard)
