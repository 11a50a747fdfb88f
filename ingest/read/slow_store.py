"""A store that is slow or faulty on purpose: `Disturbance` says how, and `FaultyFiles` does it to a store's files.

Tests and benchmarks use it, and users who want to see how their set-up copes with a slow or failing store. It never
changes anything on disk: a "corrupt" read flips one bit in the bytes that it returns.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields

from sluice.ingest.knobs import nearest, parse_bytes
from sluice.ingest.read.range_files import RangeFile
from sluice.ingest.read.retry import Clock

_PARSERS: dict[str, Callable[[str], float]] = {"bandwidth": parse_bytes, "seed": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """How a store misbehaves. In `latency:///data/table?latency_ms=50&error_rate=0.1`, the names after the question
    mark are these fields."""

    latency_ms: float = 0.0
    """The wait before each read and each opening of a file."""
    bandwidth: int = 0
    """The bytes a second of one reader (`bandwidth=100MiB`). 0: no limit."""
    error_rate: float = 0.0
    """The share of reads and openings that fail with a temporary error."""
    short_rate: float = 0.0
    """The share of reads that return half of the requested bytes."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("error_rate", "short_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not a share from 0 to 1")
        for name in ("latency_ms", "bandwidth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")

    @classmethod
    def parse(cls, options: dict[str, str]) -> Disturbance:
        known = {field.name for field in fields(cls)}
        values: dict[str, float] = {}
        for name, text in options.items():
            if name not in known:
                raise ValueError(f"latency://: unknown option {name!r}{nearest(name, known)}")
            try:
                values[name] = _PARSERS.get(name, float)(text)
            except ValueError as error:
                raise ValueError(f"latency://: {name}={text}: {error}") from None
        return cls(**values)  # type: ignore[arg-type]


class FaultyFiles:
    """Makes files misbehave. It counts its faults, so that a test can check them."""

    def __init__(self, how: Disturbance, clock: Clock):
        self._how = how
        self._clock = clock
        self._lock = threading.Lock()
        self._chance = random.Random(how.seed)
        self._stalled_until = float("-inf")
        self.slowed_s = 0.0
        """Seconds that each read and each opening waits in addition to `how`."""
        self._corrupt: str | None = None
        self.errors = self.shorts = self.corrupted = 0

    def stall(self, seconds: float) -> None:
        """Makes all reads that begin within the next `seconds` wait until these are over."""
        with self._lock:
            self._stalled_until = self._clock.now() + seconds

    def slow(self, seconds: float) -> None:
        """Makes each read and each opening from now on wait `seconds` longer."""
        with self._lock:
            self.slowed_s = seconds

    def corrupt(self, part: str) -> None:
        """Flips one bit in the next read of data from a file whose name holds `part`."""
        with self._lock:
            self._corrupt = part

    def read(self, key: str, source: RangeFile, offset: int, length: int) -> bytes:
        short = self.disturb(key, length)
        data = source.read(offset, length // 2 if short else length)
        with self._lock:
            # The footer at the end of a file has no checksum, so it is not corrupted.
            if (
                self._corrupt is None
                or self._corrupt not in key
                or offset + length >= source.size
                or not data
            ):
                return data
            self._corrupt = None
            self.corrupted += 1
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0x10
        return bytes(flipped)

    def disturb(self, key: str, length: int = 0) -> bool:
        """Waits, or raises, before a file is opened or so many bytes are read. Returns whether the read shall come back
        short."""
        how = self._how
        with self._lock:
            wait = (
                self.slowed_s
                + how.latency_ms / 1000
                + (length / how.bandwidth if how.bandwidth else 0.0)
            )
            left = self._stalled_until - self._clock.now()
            chance = self._chance.random
            fails = chance() < how.error_rate
            short = chance() < how.short_rate
            self.errors += fails
            short = short and not fails and length > 1
            self.shorts += short
        wait += max(0.0, left)
        if wait:
            self._clock.sleep(wait)
        if fails:
            raise OSError(f"{key}: an error injected by error_rate={how.error_rate:g}")
        return short
