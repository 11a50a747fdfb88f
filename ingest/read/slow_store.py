"""A store that is slow or faulty on purpose: `Disturbance` says how, and `FaultyFiles` does it to a store's files.

Tests and benchmarks use it, and users who want to see how their set-up copes with a slow or failing store. It never
changes anything on disk: a "corrupt" read flips one bit in the bytes that it returns.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from sluice.common.errors import UsageError
from sluice.common.suggest import NamedFields
from sluice.ingest.knobs import parse_bytes
from sluice.ingest.read.range_files import RangeFile, Stored
from sluice.ingest.read.retry import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance(NamedFields):
    """How a store misbehaves. In `latency:///data/table?latency_ms=50&error_rate=0.1`, the names after the question
    mark are these fields."""

    latency_ms: float = 0.0
    """The wait before each read and each opening of a file."""
    bandwidth: int = 0
    """The bytes a second of one reader (`bandwidth=100MiB`). 0: no limit."""
    error_rate: float = 0.0
    """The share of reads and openings that fail with a temporary error."""

    def __post_init__(self) -> None:
        if not 0 <= self.error_rate <= 1 or min(self.latency_ms, self.bandwidth) < 0:
            raise ValueError(f"{self}: error_rate must be from 0 to 1, and no other number below 0")

    @classmethod
    def parse(cls, text: str) -> Disturbance:
        """Parses fields and values that are joined by `&`."""
        try:
            pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
            values: dict[str, Any] = {
                name: parse_bytes(value) if name == "bandwidth" else float(value)
                for name, value in pairs
            }
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{text}: {error}; write name=value pairs, joined by &") from None


class FaultyFiles:
    """Makes files misbehave."""

    def __init__(self, how: Disturbance, clock: Clock):
        self._how = how
        self._clock = clock
        self._lock = threading.Lock()
        self._chance = random.Random(0)
        self._stalled_until = float("-inf")
        self.slowed_s = 0.0
        """Seconds that each read and each opening waits in addition to `how`."""
        self.corrupt: str | None = None
        """A part of a file's name. One bit is flipped in the next read of data from such a file."""

    def stall(self, seconds: float) -> None:
        """Makes all reads that begin within the next `seconds` wait until these are over."""
        self._stalled_until = self._clock.now() + seconds

    def read(self, key: str, source: RangeFile, offset: int, length: int) -> Stored:
        self.disturb(key, length)
        data = source.read(offset, length)
        with self._lock:
            # The footer at the end of a file has no checksum, so it is not corrupted.
            if (
                self.corrupt is None
                or self.corrupt not in key
                or offset + length >= source.size
                or not data
            ):
                return data
            self.corrupt = None
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0x10
        return bytes(flipped)

    def disturb(self, key: str, length: int = 0) -> None:
        """Waits, or raises, before a file is opened or so many bytes are read."""
        how = self._how
        with self._lock:
            wait = (
                self.slowed_s
                + how.latency_ms / 1000
                + (length / how.bandwidth if how.bandwidth else 0.0)
            )
            left = self._stalled_until - self._clock.now()
            fails = self._chance.random() < how.error_rate
        wait += max(0.0, left)
        if wait:
            self._clock.sleep(wait)
        if fails:
            raise OSError(f"{key}: an error injected by error_rate={how.error_rate:g}")
