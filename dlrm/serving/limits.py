"""Limits a server: `ServerLimits`, and `Bucket`, which limits the rate of requests. The clock is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.dlrm.options import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one server."""

    body_bytes: int = 4 * 2**20
    rows: int = 4096
    """Rows in one request."""
    seconds: float = 10.0
    """Seconds for a request's head, and the same for its body and for its answer."""
    rate: float = 0.0
    """Requests a second; 0: any number."""
    waiting: int = 1024
    """Requests that wait for the model at one time."""
    connections: int = 1024
    batch_requests: int = 128
    """Requests in one batch."""

    def __post_init__(self) -> None:
        for name in ("body_bytes", "rows", "waiting", "connections", "batch_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not 1 or more")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"seconds: {self.seconds!r} is not a positive number")
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"rate: {self.rate!r} is not a number of 0 or more")


class Bucket:
    """Has permits for the requests of at most one second, and gains `rate` permits a second."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._capacity = max(1.0, rate)
        self._permits = self._capacity
        self._filled_at = clock()

    def take(self) -> float:
        """Returns 0 if the request may pass, otherwise the seconds until one may."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._permits = min(self._capacity, self._permits + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._permits < 1:
            return (1 - self._permits) / self._rate
        self._permits -= 1
        return 0.0
