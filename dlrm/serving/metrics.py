"""Counts a server's requests for Prometheus: `ServerMetrics`."""

from __future__ import annotations

import functools
from collections import Counter as Count
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """A server's counters, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        home: dict[str, Any] = {"registry": self.registry}
        requests = Counter(
            "sluice_serve_requests", "Requests for predictions, by status", ["status"], **home
        )
        missing = Counter(
            "sluice_serve_missing_features",
            "Rows in which a feature was missing or null",
            ["feature"],
            **home,
        )
        # Cached, because finding a label's counter takes longer than counting.
        self._requests_by_status = functools.cache(requests.labels)
        self._missing_by_feature = functools.cache(missing.labels)
        self.rows = Counter("sluice_serve_rows", "Rows predicted", **home)
        self._seconds = Histogram(
            "sluice_serve_seconds", "From a request's head to its answer", buckets=_SECONDS, **home
        )
        self.batches = Histogram(
            "sluice_serve_batch_requests", "Requests in a batch", buckets=_BATCH_SIZES, **home
        )
        self.waiting = Gauge("sluice_serve_waiting", "Requests that wait for the model", **home)
        self._step = Gauge(
            "sluice_serve_model_step", "Training step of the model that answers", **home
        )
        self._version = Gauge(
            "sluice_serve_model_version", "Version of the feature table behind it", **home
        )
        self._bytes = Gauge("sluice_serve_table_bytes", "Bytes of its embedding tables", **home)
        reloads = Counter(
            "sluice_serve_reloads",
            "Newer checkpoints looked at, by what came of it",
            ["result"],
            **home,
        )
        self.taken, self.refused = map(reloads.labels, ("taken", "refused"))
        self.statuses: Count[int] = Count()

    def request(self, status: int, seconds: float) -> None:
        """Counts an answered request, with any status."""
        self.statuses[status] += 1
        self._requests_by_status(status).inc()
        self._seconds.observe(seconds)

    def missing(self, features: Mapping[str, int]) -> None:
        """Counts the rows of a batch that lacked a feature, by feature."""
        for name, rows in features.items():
            self._missing_by_feature(name).inc(rows)

    def model(self, about: Mapping[str, Any]) -> None:
        """Notes which model answers from now on."""
        self._step.set(about["step"])
        self._version.set(about["version"])
        self._bytes.set(about["table_bytes"])

    def text(self) -> bytes:
        """Returns all metrics in the format of Prometheus."""
        return generate_latest(self.registry)
