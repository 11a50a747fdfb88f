"""A loader's figures for Prometheus: `LoaderMetrics`. They are looked up on request; loading does nothing for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from sluice.ingest.stats import READY, LoaderStats, Snapshot, doublings

_LOADER = {
    "batches": "Batches that the trainer took",
    "rows": "Rows that the trainer took",
    "consumer_wait_s": "Seconds that the trainer waited",
    "consumer_compute_s": "Seconds between two batches",
    "cpu_used_s": "Seconds of processor time",
    "held_back": "Times that work waited for memory",
    "memory_used": "Bytes in use",
    "memory_limit": "Bytes that may be used",
    "cpu_quota": "Cores",
}
_STAGE = {
    "rows": "Rows passed on",
    "bytes": "Bytes passed on",
    "busy_s": "Seconds of useful work",
    "cpu_s": "Seconds of processor time",
    "wait_input_s": "Seconds without input",
    "wait_output_s": "Seconds without room after it",
    "workers": "Workers",
    "queue_bytes": "Bytes that wait behind it",
}
_ELSEWHERE = {
    "workers": "Workers on other hosts",
    "starting": "Those that are starting",
    "start_s": "How long they take to start",
    "bytes": "Bytes that came from them",
    "retries": "Requests made again",
    "hedges": "Requests to a second worker as the first was slow",
    "core_s": "Cores that they held, times seconds: their price",
}
_GAUGES = {
    "workers",
    "queue_bytes",
    "memory_used",
    "memory_limit",
    "cpu_quota",
    "starting",
    "start_s",
}
"""The figures that may also fall. All others are counters."""


class Measured(Protocol):
    """A loader."""

    def snapshot(self) -> Snapshot: ...
    def stats(self) -> LoaderStats: ...


class LoaderMetrics:
    """A collector of a loader's figures: `REGISTRY.register(LoaderMetrics(loader))` of prometheus_client."""

    def __init__(self, loader: Measured) -> None:
        self._loader = loader

    def collect(self) -> Iterator[Metric]:
        snapshot, stats = self._loader.snapshot(), self._loader.stats()
        yield GaugeMetricFamily("sluice_loader_rank", "Number of this rank", stats.rank)
        for name, text in _ELSEWHERE.items():
            if name in snapshot.elsewhere:
                yield _family("elsewhere_", name, text, value=snapshot.elsewhere[name])
        for name, text in _LOADER.items():
            yield _family("", name, text, value=getattr(snapshot, name))
        for name, text in _STAGE.items():
            by_stage = _family("stage_", name, text, labels=["stage"])
            for stage in snapshot.stages:
                by_stage.add_metric([stage.name], getattr(stage, name))
            yield by_stage
        ready = HistogramMetricFamily(
            "sluice_loader_ready_seconds", "How long the trainer waited for a batch"
        )
        ready.add_metric([], *_histogram(stats.durations[READY], stats.wait_s))
        yield ready
        work = HistogramMetricFamily(
            "sluice_loader_stage_seconds", "How long a stage worked on an item", labels=["stage"]
        )
        for stage in snapshot.stages:
            work.add_metric([stage.name], *_histogram(stats.durations[stage.name], stage.busy_s))
        yield work


def _histogram(counts: Sequence[int], seconds: float) -> tuple[list[tuple[str, float]], float]:
    return [*((str(most), n) for most, n in doublings(counts)), ("+Inf", sum(counts))], seconds


def _family(part: str, name: str, text: str, **more: Any) -> Any:
    kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
    with_unit = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
    return kind(f"sluice_loader_{part}{with_unit}", text, **more)
