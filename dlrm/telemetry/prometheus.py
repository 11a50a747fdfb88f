"""A rank's figures for Prometheus: `Endpoint`. They are looked up on request; training does nothing for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sluice.agent.report.format import line as as_line
from sluice.agent.report.format import moves
from sluice.agent.report.prometheus import LoaderMetrics, Measured
from sluice.dlrm.options import ConfigError

_TRAINING = {
    "step": "Batches trained",
    "epoch": "Epochs finished",
    "loss": "Mean loss since the last line of the log",
    "samples_per_s": "Rows a second, of all ranks",
    "stall": "Share of the time that input was waited for",
}
_EVAL = ("auc", "ne", "logloss", "calibration")


class Endpoint:
    """A sink of the journal that collects a rank's figures. `served` shows them over HTTP."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` tells seconds since 1970."""
        self._rank = rank
        self._clock = clock
        self._last: dict[str, tuple[str, float]] = {}
        self._train: dict[str, float] = {}
        self._evals: dict[str, dict[str, float]] = {}
        self._decisions = 0
        self._loader: Measured | None = None
        self._version = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def show_loader(self, loader: Measured | None, version: int) -> None:
        """Sets the loader whose counters are shown from now on. None: there is no loader."""
        self._loader, self._version = loader, version

    def metric(self, metric: Mapping[str, Any]) -> None:
        if metric["kind"] == "train":
            self._train = {name: metric[name] for name in _TRAINING if metric.get(name) is not None}
        elif metric["kind"] == "eval":
            self._evals[metric["split"]] = {
                name: metric[name] for name in _EVAL if metric.get(name) is not None
            }

    def event(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind in ("decision", "fault", "incident"):
            is_decision = kind == "decision"
            self._decisions += is_decision
            what = moves(event["before"], event["after"]) if is_decision else as_line(event)
            self._last[kind] = what, self._clock()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("sluice_train_rank", "Number of this rank", self._rank)
        yield GaugeMetricFamily(
            "sluice_train_table_version", "Version of the table that is trained on", self._version
        )
        yield CounterMetricFamily(
            "sluice_train_decisions", "Decisions of the agent of this rank", self._decisions
        )
        last = GaugeMetricFamily(
            "sluice_train_last_event_timestamp_seconds",
            "When such a thing last happened",
            labels=["kind", "what"],
        )
        for kind, (what, at) in self._last.items():
            last.add_metric([kind, what], at)
        yield last
        for name, text in _TRAINING.items():
            yield GaugeMetricFamily(f"sluice_train_{name}", text, self._train.get(name))
        for name in _EVAL:
            by_split = GaugeMetricFamily(
                f"sluice_eval_{name}", f"{name} of the newest evaluation", labels=["split"]
            )
            for split, values in self._evals.items():
                if name in values:
                    by_split.add_metric([split], values[name])
            yield by_split
        if self._loader is not None:
            yield from LoaderMetrics(self._loader).collect()


@contextmanager
def served(endpoint: Endpoint, address: str, local_rank: int) -> Iterator[None]:
    """Returns a context in which the figures are served at `address`, [HOST:]PORT. A machine's rank n takes PORT + n.
    Empty: they are not served."""
    if not address:
        yield
        return
    host, _, text = address.rpartition(":")
    port = int(text) + local_rank if text.isdigit() and int(text) else 0
    if not 0 < port < 2**16:
        raise ConfigError(
            f"metrics: {address!r} is not [HOST:]PORT, with a port from 1 to 65535 for each rank"
        )
    host = host or "127.0.0.1"
    try:
        server, thread = start_http_server(port, host, endpoint.registry)
    except OSError as error:
        raise ConfigError(
            f"metrics: {host}:{port}, for local rank {local_rank}, cannot be listened on "
            f"({error.strerror or error})"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
