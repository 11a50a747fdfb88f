"""A rank's figures for Prometheus: `Endpoint`. They are looked up on request; training does nothing for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sluice.agent.report.format import line as as_line
from sluice.agent.report.format import moves
from sluice.dlrm.options import ConfigError
from sluice.ingest.stats import Snapshot

_TRAINING = {
    "step": "Batches trained",
    "epoch": "Epochs finished",
    "loss": "Mean loss since the last line of the log",
    "samples_per_s": "Rows a second, of all ranks",
    "stall": "Share of the time that input was waited for",
}
_EVENTS = ("decision", "fault", "occasion")
_EVAL = ("auc", "ne", "logloss", "calibration")
_STAGE_COUNTERS = {
    "rows": "Rows passed on",
    "bytes": "Bytes passed on",
    "busy_s": "Seconds of useful work",
    "cpu_s": "Seconds of processor time",
    "wait_input_s": "Seconds without input",
    "wait_output_s": "Seconds without room after it",
}
_STAGE_GAUGES = {"workers": "Workers", "queue_bytes": "Bytes that wait behind it"}
_LOADER_COUNTERS = {
    "batches": "Batches that the trainer took",
    "rows": "Rows that the trainer took",
    "consumer_wait_s": "Seconds that the trainer waited",
    "consumer_compute_s": "Seconds between two batches",
    "cpu_used_s": "Seconds of processor time",
    "held_back": "Times that work waited for memory",
}
_LOADER_GAUGES = {
    "memory_used": "Bytes in use",
    "memory_limit": "Bytes that may be used",
    "cpu_quota": "Cores",
}


class Endpoint:
    """A collector of figures, and a context in which it is served. `observe` takes the lines that the trainer's log
    takes."""

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
        self._snapshot: Callable[[], Snapshot] | None = None
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

    def show_loader(self, snapshot: Callable[[], Snapshot] | None, version: int) -> None:
        """Sets the loader whose counters are shown from now on. None: there is no loader."""
        self._snapshot, self._version = snapshot, version

    def observe(self, line: Mapping[str, Any]) -> None:
        """Takes a metric or an event of the run."""
        if line["kind"] == "train":
            self._train = {name: line[name] for name in _TRAINING if line.get(name) is not None}
        elif line["kind"] == "eval":
            self._evals[line["split"]] = {
                name: line[name] for name in _EVAL if line.get(name) is not None
            }
        if line["kind"] in _EVENTS:
            self._decisions += line["kind"] == "decision"
            what = (
                moves(line["before"], line["after"])
                if line["kind"] == "decision"
                else as_line(line)
            )
            self._last[line["kind"]] = what, self._clock()

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
        if self._snapshot is not None:
            yield from _loader_metrics(self._snapshot())


def _loader_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    yield from _elsewhere_metrics(snapshot.elsewhere)
    for texts, family in (
        (_LOADER_COUNTERS, CounterMetricFamily),
        (_LOADER_GAUGES, GaugeMetricFamily),
    ):
        for name, text in texts.items():
            yield family(f"sluice_loader_{_with_unit(name)}", text, getattr(snapshot, name))
    for texts, family in (
        (_STAGE_COUNTERS, CounterMetricFamily),
        (_STAGE_GAUGES, GaugeMetricFamily),
    ):
        for name, text in texts.items():
            by_stage = family(f"sluice_loader_stage_{_with_unit(name)}", text, labels=["stage"])
            for stage in snapshot.stages:
                by_stage.add_metric([stage.name], getattr(stage, name))
            yield by_stage


_ELSEWHERE = {
    "workers": "Workers on other hosts",
    "starting": "Those that are starting",
    "start_s": "How long they take to start",
    "bytes": "Bytes that came from them",
    "retries": "Requests made again",
    "hedges": "Requests to a second worker as the first was slow",
    "core_s": "Cores that they held, times seconds: their price",
}


def _elsewhere_metrics(counts: Mapping[str, float]) -> Iterator[Metric]:
    for name, text in _ELSEWHERE.items():
        if name in counts:
            family = (
                GaugeMetricFamily
                if name in {"workers", "starting", "start_s"}
                else CounterMetricFamily
            )
            yield family(f"sluice_loader_elsewhere_{_with_unit(name)}", text, counts[name])


def _with_unit(name: str) -> str:
    return name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
