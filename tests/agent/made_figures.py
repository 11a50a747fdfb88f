"""Figures of stages and pipelines, as snapshots and as rates. What is not given is 0, or the least there can be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sluice import Knobs
from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.stage_cost import StageCost
from tests.product import Contention, Limits, PipelineRates, Snapshot, StageRates, StageStats


def stage_stats(name: str = "decode", **given: Any) -> StageStats:
    counters = dict.fromkeys(("items", "rows", "bytes"), 0)
    times = dict.fromkeys(("busy_s", "cpu_s", "wait_input_s", "wait_output_s"), 0.0)
    times["finished_s"] = given.get("busy_s", 0.0)
    return StageStats(**{"name": name, "workers": 1, **counters, **times, **given})


def snapshot(at: float, *stages: StageStats, **given: Any) -> Snapshot:
    counters = dict.fromkeys(("batches", "rows", "memory_used"), 0)
    times = dict.fromkeys(("consumer_wait_s", "consumer_compute_s", "cpu_used_s"), 0.0)
    machine = {"memory_limit": 2**34, "cpu_quota": 4.0}
    return Snapshot(
        **{
            "at": at,
            "sequence": int(4 * at),
            "stages": stages,
            **counters,
            **times,
            **machine,
            **given,
        }
    )


def stage_rates(**given: Any) -> StageRates:
    names = ("busy", "cpu", "blocked", "queue_bytes")
    return StageRates(**{"rows_per_s": 1.0, "workers": 1, **dict.fromkeys(names, 0), **given})


def pipeline_rates(**given: Any) -> PipelineRates:
    usual = {"seconds": 1.0, "rows_per_s": 1.0, "stall": 1.0, "demand_rows_per_s": None, "cpu": 0.0}
    machine = {"cpu_quota": 4.0, "memory_used": 0, "memory_limit": 1, "stages": {}}
    return PipelineRates(**{**usual, **machine, **given})


def stage_cost(name: str, by_workers: dict[int, tuple[float, float]], **given: Any) -> StageCost:
    """A cost: number of workers → useful and processor seconds of a row."""
    busy, cpu = np.array(list(by_workers.values())).T
    return StageCost(name=name, workers=np.array(list(by_workers)), busy=busy, cpu=cpu, **given)


def forecast(
    seen: PipelineRates, knobs: Knobs, limits: Limits, *costs: StageCost, **given: Any
) -> Forecast:
    """A forecast beside no other program. The trainer takes all rows and no core."""
    usual = {"contention": Contention.of(seen), "other_cpu_s": 0.0, "demand": math.inf}
    by_name = {cost.name: cost for cost in costs}
    return Forecast.of(seen, knobs, limits, by_name, **{**usual, **given})
