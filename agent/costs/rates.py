"""Makes rates of two snapshots' counters: `PipelineRates`. No other place does so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sluice.agent.planner_settings import DEFAULT
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot, StageStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRates:
    """The rates of one stage over an interval."""

    rows_per_s: float
    """Rows passed on per second. Equal in all stages: a steady state."""
    busy: float
    """Workers doing useful work on average. Near `workers`: the bottleneck; near 0: capacity to spare."""
    cpu: float
    """Cores used. Near `busy`: processor-bound; near 0: bound by a store."""
    starved: float
    """Workers that waited for input on average. Near `workers`: the stages before are too slow."""
    blocked: float
    """Workers that waited for room on average. Near `workers`: what comes after is too slow."""
    workers: int
    queue_bytes: int
    core_wait: float = 0.0
    """Workers that were ready to run and had no core, on average. If as large as `cpu`: half the speed of free
    cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRates:
    """The rates of the whole pipeline over an interval."""

    seconds: float
    rows_per_s: float
    """Rows that the consumer took per second: tuning is to raise this."""
    stall: float
    """Share of the consumer's time spent waiting for input. Near 1: input-bound; near 0: trainer-bound."""
    demand_rows_per_s: float | None
    """Rows a second that the consumer would take if it never waited; None while it has computed nothing."""
    cpu: float
    """Cores used by the process tree. Near `cpu_quota`: none is free."""
    cpu_quota: float
    memory_used: int
    memory_limit: int
    stages: Mapping[str, StageRates]
    idle: float | None = None
    """Cores without work, of those that may be used. Near 0: every core is wanted; None: unknown."""
    away: float = 0.0
    """Share of the time in which the consumer neither waited nor computed. Near 1: it was at something else, for
    instance an evaluation."""

    def saturated(self, share: float = DEFAULT.saturated_share) -> bool:
        """Whether no core is free: at least this share of them is in use."""
        return self.cpu >= share * self.cpu_quota

    @property
    def running(self) -> float:
        """Cores that the stages use."""
        return sum(stage.cpu for stage in self.stages.values())

    @property
    def wanting(self) -> float:
        """Cores that the stages would use if each thread that is ready had one."""
        return self.running + sum(stage.core_wait for stage in self.stages.values())

    def joined(self, knobs: Knobs, limits: Limits) -> PipelineRates:
        """The same rates, with fused stages as one: the stage whose workers do the work of all."""
        stages: dict[str, StageRates] = {}
        for name, stage in self.stages.items():
            head = limits.head(knobs, name)
            done = stages.get(head)
            stages[head] = (
                stage
                if done is None
                else replace(
                    done,
                    busy=done.busy + stage.busy,
                    cpu=done.cpu + stage.cpu,
                    core_wait=done.core_wait + stage.core_wait,
                    queue_bytes=done.queue_bytes + stage.queue_bytes,
                    rows_per_s=stage.rows_per_s,
                )
            )
        return replace(self, stages=stages)


def rates(earlier: Snapshot, later: Snapshot) -> PipelineRates | None:
    """The rates between two snapshots; None if no time passed, or if a counter fell (another pipeline, or a restarted
    one)."""
    seconds = later.at - earlier.at
    rows = later.rows - earlier.rows
    wait = later.consumer_wait_s - earlier.consumer_wait_s
    compute = later.consumer_compute_s - earlier.consumer_compute_s
    cpu = later.cpu_used_s - earlier.cpu_used_s
    if seconds <= 0 or min(rows, wait, compute, cpu) < 0:
        return None
    before = {s.name: s for s in earlier.stages}
    stages = {s.name: _stage(before[s.name], s, seconds) for s in later.stages if s.name in before}
    return PipelineRates(
        seconds=seconds,
        rows_per_s=rows / seconds,
        stall=wait / (wait + compute) if wait + compute > 0 else 0.0,
        demand_rows_per_s=rows / compute if compute > 0 and rows > 0 else None,
        cpu=cpu / seconds,
        cpu_quota=later.cpu_quota,
        memory_used=later.memory_used,
        memory_limit=later.memory_limit,
        stages=stages,
        idle=_idle(earlier.cores_idle_s, later.cores_idle_s, seconds),
        away=min(max(0.0, 1 - (wait + compute) / seconds), 1.0),
    )


def _idle(before: float | None, after: float | None, seconds: float) -> float | None:
    return None if before is None or after is None or after < before else (after - before) / seconds


def _stage(before: StageStats, after: StageStats, seconds: float) -> StageRates:
    def rate(name: str) -> float:
        return float(max(0.0, getattr(after, name) - getattr(before, name)) / seconds)

    return StageRates(
        rows_per_s=rate("rows"),
        busy=rate("busy_s"),
        cpu=rate("cpu_s"),
        starved=rate("wait_input_s"),
        blocked=rate("wait_output_s"),
        workers=after.workers,
        queue_bytes=after.queue_bytes,
        core_wait=rate("core_wait_s"),
    )
