"""A loader's figures for Prometheus: `LoaderMetrics`. They are looked up on request; loading does nothing for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from sluice.ingest.stats import READY, LoaderStats, Snapshot, doublings

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
        yield from _counters(snapshot)
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


def _counters(snapshot: Snapshot) -> Iterator[Metric]:
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
