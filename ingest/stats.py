"""What a pipeline reports about itself: `Snapshot`, made of `StageStats`.

All counters are cumulative since the start and never fall; whoever wants a rate takes the difference of two snapshots
(`later - earlier` over `later.at - earlier.at`). Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class StatsError(ValueError):
    """A snapshot that cannot be: its message names the field and the value."""


def _counts(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value < 0
        ):
            raise StatsError(
                f"{type(owner).__name__}.{name}: {value!r} is not a finite number from 0 up"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """The counters of one stage since the start of the pipeline. Sums run over all workers it ever had."""

    name: str
    """The stage's name: the key of its knobs."""
    items: int
    """Pieces of work finished (row groups, windows, batches). Not moving: the stage is stuck, starved or blocked;
    the waits say which."""
    rows: int
    """Rows passed on. Its rate is the stage's throughput; equal rates in all stages mean a steady state."""
    bytes: int
    """Bytes passed on, in memory, not on disk."""
    busy_s: float
    """Useful time, waits for neighbours left out, reading from a store included. Its rate near `workers`: the stage
    is the bottleneck; near 0: it has capacity to spare."""
    cpu_s: float
    """Processor time within `busy_s`. Near `busy_s`: more workers help only while cores are free; near 0: the stage
    waits for a store, and more workers help even if no core is free."""
    wait_input_s: float
    """Time workers waited for something to do. Its rate near `workers`: the stages before are too slow, or it has
    workers to give away; near 0: always fed."""
    wait_output_s: float
    """Time workers waited for room after them. Its rate near `workers`: the stages after (or the trainer) are the
    bottleneck; near 0: always room."""
    workers: int
    """The number of workers now. For a fused stage: those of the stage before that do its work."""
    core_wait_s: float = 0.0
    """Time within `busy_s` that workers were ready to run and had no core. Near 0: cores are free, or none is needed;
    as large as `cpu_s`: two threads on average want the same core, and more workers take from others what they get."""
    backend: str = "thread"
    """Where its workers run now: `thread` or `process`."""
    queue_bytes: int = 0
    """The bytes that wait after this stage now. Near its limit: the stages after are slower; near 0: they wait."""
    queue_limit_bytes: int = 0
    """The most bytes that may wait there; 0 if the stage has no buffer of its own."""
    process_bytes: int = 0
    """The most memory that a process of it was seen to take for itself. 0: none has worked yet; large: few fit."""

    def __post_init__(self) -> None:
        _counts(
            self,
            "items",
            "rows",
            "bytes",
            "busy_s",
            "cpu_s",
            "core_wait_s",
            "wait_input_s",
            "wait_output_s",
            "workers",
            "queue_bytes",
            "queue_limit_bytes",
            "process_bytes",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the whole pipeline at one moment."""

    at: float
    """Seconds on a monotonic clock, the same for all snapshots of a pipeline. Standing still: no rate can be taken."""
    sequence: int
    """Number of this snapshot, from 0 up. A repeated one is stale."""
    stages: tuple[StageStats, ...]
    """The stages in the order in which rows pass them."""
    batches: int
    """The number of batches that the consumer took."""
    rows: int
    """The number of rows that the consumer took: tuning is meant to raise its rate."""
    consumer_wait_s: float
    """Time the consumer waited in `next()`. Its rate near 1: input-bound; near 0: the trainer is the bottleneck and
    cores may be given back."""
    consumer_compute_s: float
    """Time the consumer spent between two `next()`. Its rate near 1: trainer-bound; near 0: nothing but loading."""
    memory_used: int
    """Anonymous and shared bytes of the process tree now (no page cache). Near the limit: the governor
    holds work back."""
    memory_limit: int
    """The lowest limit in force: the control groups' along the path, the host's, the user's."""
    cpu_quota: float
    """The number of cores this pipeline may use now: affinity and quota along the control groups' path; it changes
    while running."""
    cpu_used_s: float
    """Processor time of the process tree. Its rate near `cpu_quota`: no core is free, and a pool that grows takes from
    others; far below: cores are idle."""
    cores_idle_s: float | None = None
    """How long cores this pipeline may use had nothing to do. Its rate near 0: somebody wants every core; near
    `cpu_quota`: a wait for a core is no more than the time a wake-up takes. None: the system does not say."""
    held_back: int = 0
    """How many times the governor made work wait for memory. Rising: memory, not cores, is the bottleneck; 0: never
    short."""
    held_back_pressure: int = 0
    """How many of these times the whole system was short of memory, rather than the limit near. Rising: other programs
    take the memory; 0: work was only held back for the limit."""
    restarts: int = 0
    """How many worker processes died and were replaced. Rising: something kills them; 0: none died."""
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    """What workers on other hosts did, by name: `workers` now, those `starting`, the units, calls and bytes that came,
    `retries`, `hedges` and `late` answers, and `core_s`, the cores that they held, at work or not, times seconds: the
    price. Empty: there are none."""

    def __post_init__(self) -> None:
        _counts(
            self,
            "at",
            "sequence",
            "batches",
            "rows",
            "consumer_wait_s",
            "consumer_compute_s",
            "memory_used",
            "memory_limit",
            "cpu_quota",
            "cpu_used_s",
            "held_back",
            "held_back_pressure",
            "restarts",
            *(["cores_idle_s"] if self.cores_idle_s is not None else []),
        )
        if not self.stages:
            raise StatsError("Snapshot.stages: a pipeline without stages")
        if len({s.name for s in self.stages}) != len(self.stages):
            raise StatsError(
                f"Snapshot.stages: two stages of one name among {[s.name for s in self.stages]}"
            )

    def stage(self, name: str) -> StageStats:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise StatsError(f"no stage {name!r} among {[s.name for s in self.stages]}")

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as JSON holds it; `from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Snapshot:
        return cls(**{**values, "stages": tuple(StageStats(**s) for s in values["stages"])})
