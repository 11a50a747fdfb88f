"""A rank's figures for Prometheus: `Endpoint`. They are looked up on request; training does nothing for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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
    """A sink of the journal that collects figures, and a context in which they are served."""

    def __init__(
        self,
        rank: int,
        host: str = "127.0.0.1",
        port: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Without a port, the endpoint only collects and serves nothing. `clock` tells seconds since 1970."""
        self._rank = rank
        self._host = host
        self._port = port
        self._clock = clock
        self._last: dict[str, tuple[str, float]] = {}
        self._train: dict[str, float] = {}
        self._evals: dict[str, dict[str, float]] = {}
        self._decisions = 0
        self._loader: Measured | None = None
        self._version = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    @classmethod
    def at_address(cls, address: str, rank: int, local_rank: int) -> Endpoint:
        """Returns the endpoint at `address`, [HOST:]PORT; a machine's rank n takes PORT + n. Empty: it is not
        served."""
        if not address:
            return cls(rank)
        host, _, port = address.rpartition(":")
        if not port.isdigit() or not 0 < int(port) + local_rank < 2**16:
            raise ConfigError(
                f"metrics: {address!r} is not [HOST:]PORT, with a port from 1 to 65535 for each rank"
            )
        return cls(rank, host or "127.0.0.1", int(port) + local_rank)

    def __enter__(self) -> Endpoint:
        if self._port is not None:
            try:
                self._server, self._thread = start_http_server(
                    self._port, self._host, self.registry
                )
            except OSError as error:
                raise ConfigError(
                    f"metrics: {self._host}:{self._port}, for rank {self._rank}, cannot be listened on "
                    f"({error.strerror or error})"
                ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

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
        if kind in ("decision", "fault", "occasion"):
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
