"""Computes rates from the counters of two snapshots: `PipelineRates`. Only this module does that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.ingest.stats import Snapshot, StageStats

_WAITS = 0.5  # of its time: of a consumer that waits so long, the busiest stage shows the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRates:
    """The rates of one stage over an interval."""

    rows_per_s: float
    """Rows that the stage passed on per second. Equal in all stages: a steady state."""
    busy: float
    """Workers that did useful work, on average. Near `workers`: the bottleneck. Near 0: the stage could do more."""
    cpu: float
    """Cores that the stage used. Near `busy`: processor-bound. Near 0: bound by a store."""
    blocked: float
    """Workers that waited for space in the next queue, on average. Near `workers`: the stages after it are too slow."""
    workers: int
    queue_bytes: int
    steady_rows_per_s: float = 0.0
    """Rows a second that its work amounts to. Items under way count by the time that they have taken so far."""
    core_wait: float = 0.0
    """Workers that were ready to run and had no core, on average. Equal to `cpu`: half the speed of free cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRates:
    """The rates of the whole pipeline over an interval."""

    seconds: float
    rows_per_s: float
    """Rows that the consumer took per second. Tuning is meant to raise this rate. While the consumer waits for input,
    this is what the work of the busiest stage amounts to, because rows come to the consumer in lumps."""
    stall: float
    """Share of the consumer's time spent waiting for input. Near 1: input-bound. Near 0: trainer-bound."""
    demand_rows_per_s: float | None
    """Rows a second that the consumer would take if it never waited. None: it has computed nothing yet."""
    cpu: float
    """Cores that the process tree used. Near `cpu_quota`: no core is free."""
    cpu_quota: float
    memory_used: int
    memory_limit: int
    stages: Mapping[str, StageRates]
    idle: float | None = None
    """Idle cores among those that may be used. Near 0: every core is in use. None: unknown."""
    memory_free: int = 2**62
    """Bytes that the governor still admits."""
    lock: float | None = None
    """Share of the time in which Python's interpreter lock was held by other threads. None: unknown."""
    longest_stall: float = 0.0
    """The stall of that rank which waits longest, on all hosts. 0: there is one rank."""
    away: float = 0.0
    """Share of the time in which the consumer neither waited nor computed. Near 1: it did other work, for example an
    evaluation."""

    @property
    def running(self) -> float:
        """Cores that the stages used."""
        return sum(stage.cpu for stage in self.stages.values())

    @property
    def wanting(self) -> float:
        """Cores that the stages would use if each thread that is ready had one."""
        return self.running + sum(stage.core_wait for stage in self.stages.values())


def rates(earlier: Snapshot, later: Snapshot) -> PipelineRates | None:
    """Returns the rates between two snapshots.

    Returns None if no time passed, or if a counter fell because the pipeline is another one or was restarted."""
    seconds = later.at - earlier.at
    rows = later.rows - earlier.rows
    wait = later.consumer_wait_s - earlier.consumer_wait_s
    compute = later.consumer_compute_s - earlier.consumer_compute_s
    cpu = later.cpu_used_s - earlier.cpu_used_s
    if seconds <= 0 or min(rows, wait, compute, cpu) < 0:
        return None
    before = {s.name: s for s in earlier.stages}
    stages = {s.name: _stage(before[s.name], s, seconds) for s in later.stages if s.name in before}
    stall = wait / (wait + compute) if wait + compute > 0 else 0.0
    rows_per_s = rows / seconds
    if stages and stall >= _WAITS:
        # Buffers fill or drain, so the stage with the largest share of busy workers shows the rate.
        busiest = max(stages.values(), key=lambda stage: stage.busy / stage.workers)
        rows_per_s = busiest.steady_rows_per_s
    return PipelineRates(
        seconds=seconds,
        rows_per_s=rows_per_s,
        stall=stall,
        demand_rows_per_s=rows / compute if compute > 0 and rows > 0 else None,
        cpu=cpu / seconds,
        cpu_quota=later.cpu_quota,
        memory_used=later.memory_used,
        memory_limit=later.memory_limit,
        memory_free=later.memory_free,
        stages=stages,
        idle=_optional("cores_idle_s", earlier, later, seconds),
        lock=_optional("lock_held_s", earlier, later, seconds),
        longest_stall=(_optional("longest_wait_s", earlier, later, wait + compute) or 0.0)
        if wait + compute > 0
        else 0.0,
        away=min(max(0.0, 1 - (wait + compute) / seconds), 1.0),
    )


def _optional(name: str, earlier: Snapshot, later: Snapshot, seconds: float) -> float | None:
    """Returns the rate of a counter that may be unknown. None: it is, or it fell."""
    before, now = getattr(earlier, name), getattr(later, name)
    return None if before is None or now is None or now < before else (now - before) / seconds


def _stage(before: StageStats, after: StageStats, seconds: float) -> StageRates:
    """Returns the rates of a stage between two snapshots."""

    def rate(name: str) -> float:
        return float(max(0.0, getattr(after, name) - getattr(before, name)) / seconds)

    rows, busy, finished = rate("rows"), rate("busy_s"), rate("finished_s")
    return StageRates(
        rows_per_s=rows,
        steady_rows_per_s=rows * busy / finished if finished > 0 else rows,
        busy=busy,
        cpu=rate("cpu_s"),
        blocked=rate("wait_output_s"),
        workers=after.workers,
        queue_bytes=after.queue_bytes,
        core_wait=rate("core_wait_s"),
    )
