"""A pipeline's report about itself: `Snapshot`, made of `StageStats`, and `LoaderStats`, its figures for a user.

All counters are cumulative since the start and never fall. For a rate, divide the difference of two snapshots by the
difference of their `at`. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.common.number_checks import is_number


class StatsError(ValueError):
    """A snapshot is invalid. The message names the field and the value."""


def _check_counts(owner: StageStats | Snapshot) -> None:
    """Raises StatsError if a field of numbers has another value, or None where its type does not allow that."""
    for f in dataclasses.fields(owner):
        kind, _, optional = str(f.type).partition(" | ")
        value = getattr(owner, f.name)
        if kind in ("int", "float") and not (optional and value is None) and not is_number(value):
            raise StatsError(
                f"{type(owner).__name__}.{f.name}: {value!r} is not a finite number from 0 up"
            )


STAGE_COUNTERS = (
    "items",
    "rows",
    "bytes",
    "busy_s",
    "finished_s",
    "cpu_s",
    "core_wait_s",
    "wait_input_s",
    "wait_output_s",
)
"""The counters of a stage that rise, and that can be added up over loaders."""
_PARTS = 4
_DOUBLINGS = 30
_LEAST_EXPONENT = -19  # the first bucket begins at 2**-20 s, a microsecond


class Durations:
    """Counts durations from a microsecond to 17 minutes in 120 buckets. A quantile is at most 25 % too large."""

    def __init__(self) -> None:
        self.counts = [0] * (_PARTS * _DOUBLINGS)

    def add(self, seconds: float) -> None:
        mantissa, exponent = math.frexp(
            seconds
        )  # seconds = mantissa * 2**exponent, mantissa from 0.5
        bucket = _PARTS * (exponent - _LEAST_EXPONENT) + int(2 * _PARTS * mantissa) - _PARTS
        self.counts[min(max(bucket, 0), len(self.counts) - 1) if seconds > 0 else 0] += 1


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Returns the duration in seconds that this share of the counted ones does not exceed. None: none was counted."""
    left = share * sum(counts)
    for bucket, count in enumerate(counts):
        left -= count
        if count and left <= 0:
            doubling, part = divmod(bucket, _PARTS)
            return math.ldexp((part + 1 + _PARTS) / (2 * _PARTS), doubling + _LEAST_EXPONENT)
    return None


def doublings(counts: Sequence[int]) -> list[tuple[float, int]]:
    """Returns how many of the counted durations are at most 2 µs, 4 µs, and so on."""
    return [
        (math.ldexp(1.0, n + _LEAST_EXPONENT), sum(counts[: _PARTS * (n + 1)]))
        for n in range(_DOUBLINGS)
    ]


READY = "ready"
"""The name of the consumer's waits among `LoaderStats.durations`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """The figures of one rank's loader after its first batch, or since earlier figures (`since`). The rows of that
    batch and the wait for it do not count. The figures cost nothing until they are asked for, but for a counter at
    each item of a stage."""

    rank: int
    """The number of the rank. Compare ranks with each other: all wait for the slowest one."""
    rows: int
    """The rows that the training loop took after its first batch."""
    wait_s: float
    """Seconds in which the loop waited for a batch."""
    compute_s: float
    """Seconds in which the loop worked on batches. Rests and the time between epochs count as neither."""
    durations: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Counts of durations in buckets: of each stage's items, and, as `ready`, of the waits for a batch."""

    @property
    def rows_per_s(self) -> float:
        """Rows a second. 0: the loop takes no batch. As high as `sluice bench` shows for this table: the loop takes
        batches as fast as they can be loaded."""
        seconds = self.wait_s + self.compute_s
        return self.rows / seconds if seconds > 0 else 0.0

    @property
    def stall_fraction(self) -> float:
        """Share of the time in which the loop waited for a batch. Near 0: the loop is the bottleneck, and faster
        loading would not help. Near 1: loading is the bottleneck, and the loop hardly works."""
        seconds = self.wait_s + self.compute_s
        return self.wait_s / seconds if seconds > 0 else 0.0

    def quantile_s(self, share: float, of: str = READY) -> float | None:
        """Returns the time that this share of the items does not exceed: the waits for a batch, or the work of a stage.

        Waits near 0: batches were ready before they were asked for. As long as a step or longer: loading is too slow.
        A stage's p99 near its p50: its items take equally long. Many times its p50: something stalls it at times, such
        as a store. None: nothing was counted."""
        return quantile(self.durations[of], share)

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """Returns the figures of the time between these two."""
        return LoaderStats(
            rank=self.rank,
            rows=self.rows - earlier.rows,
            wait_s=self.wait_s - earlier.wait_s,
            compute_s=self.compute_s - earlier.compute_s,
            durations={
                name: tuple(
                    now - then for now, then in zip(counts, earlier.durations[name], strict=True)
                )
                for name, counts in self.durations.items()
            },
        )

    def to_dict(self) -> dict[str, float]:
        """Returns all figures as numbers by name, for a logger: `rows_per_s`, `stall_fraction`, `ready_p50_s`,
        `decode_p99_s` and so on. Times of stages without an item are left out."""
        times = {
            f"{name}_{label}_s": self.quantile_s(share, name)
            for name in self.durations
            for label, share in (("p50", 0.5), ("p99", 0.99))
        }
        return {
            "rank": self.rank,
            "rows": self.rows,
            "rows_per_s": self.rows_per_s,
            "stall_fraction": self.stall_fraction,
            **{name: seconds for name, seconds in times.items() if seconds is not None},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """The counters of one stage since the start of the pipeline, summed over all workers that it ever had."""

    name: str
    """The stage's name: the key of its knobs."""
    items: int
    """Finished pieces of work (row groups, series of batches). If it stops rising, the stage is stuck, starved or
    blocked. The waits show which."""
    rows: int
    """Rows passed on. Its rate is the stage's throughput. Equal rates in all stages mean a steady state."""
    bytes: int
    """Bytes passed on, in memory, not on disk."""
    busy_s: float
    """Working time, including reads from a store, without waits for other stages. If its rate is near `workers`, the
    stage is the bottleneck. If it is near 0, the stage has spare capacity."""
    cpu_s: float
    """Processor time within `busy_s`. Near `busy_s`: more workers only help while cores are free. Near 0: the stage
    waits for a store, and more workers help even if no core is free."""
    wait_input_s: float
    """Time that workers waited for input. If its rate is near `workers`, the stages before are too slow, or the stage
    has too many workers. Near 0: input is always there."""
    wait_output_s: float
    """Time that workers waited for space after the stage. If its rate is near `workers`, later stages or the trainer
    are the bottleneck. Near 0: space is always there."""
    workers: int
    """The number of workers now."""
    finished_s: float = 0.0
    """Time within `busy_s` of finished items. Near `busy_s`: items are short. Far below: long ones are under way, and
    `busy_s` does not tell yet what an item costs."""
    core_wait_s: float = 0.0
    """Time within `busy_s` that workers were ready to run but had no core. Near 0: cores are free or not needed. As
    large as `cpu_s`: on average two threads want each core, and new workers take cores from others."""
    backend: str = "thread"
    """Where its workers run now: `thread` or `process`."""
    queue_bytes: int = 0
    """The bytes that wait after this stage now. Near its limit: later stages are slower. Near 0: later stages wait."""
    queue_limit_bytes: int = 0
    """The most bytes that may wait there. 0: the stage has no buffer of its own."""
    process_bytes: int = 0
    """The most memory of its own that one of its processes was seen to use. 0: none was measured yet."""
    starting: int = 0
    """Workers whose process has not started yet. Above 0: rates do not show the present knobs yet."""

    def __post_init__(self) -> None:
        _check_counts(self)


def core_s_per_million(stages: Sequence[StageStats], rows: int) -> float:
    """Returns the processor seconds that stages took for a million rows: what the input costs the trainer's host."""
    return 1e6 * sum(stage.cpu_s for stage in stages) / max(1, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the whole pipeline at one moment."""

    at: float
    """Seconds on a monotonic clock, the same clock for all snapshots of a pipeline."""
    sequence: int
    """The number of this snapshot, from 0 up. A repeated number is a stale snapshot."""
    stages: tuple[StageStats, ...]
    """The stages in the order in which rows pass them."""
    batches: int
    """The number of batches that the consumer took."""
    rows: int
    """The number of rows that the consumer took. Tuning tries to raise its rate."""
    consumer_wait_s: float
    """Time that the consumer waited in `next()`. If its rate is near 1, loading is the bottleneck. Near 0, the trainer
    is the bottleneck, and cores may be given back."""
    consumer_compute_s: float
    """Time that the consumer spent between two `next()`. If its rate is near 1, the trainer is the bottleneck."""
    memory_used: int
    """Anonymous and shared bytes of the process tree now, without page cache. Near the limit, the governor holds work
    back."""
    memory_limit: int
    """The lowest limit in force: the limits of the control groups, the host and the user."""
    cpu_quota: float
    """The number of cores that this pipeline may use now, by affinity and control groups. It may change at any time."""
    cpu_used_s: float
    """Processor time of the process tree. If its rate is near `cpu_quota`, no core is free. If it is far below, cores
    are idle."""
    cores_idle_s: float | None = None
    """Idle time of the cores that this pipeline may use. If its rate is near 0, all cores are busy. None: the system
    does not report it."""
    memory_free: int = 2**62
    """Bytes that the governor still admits for work in advance and for worker processes. Near 0: it holds work back. It
    keeps memory for work that is due and for recent peaks, so `memory_used` may be far below the limit. The default:
    there is no governor."""
    lock_held_s: float | None = None
    """Time for which Python's interpreter lock was held by other threads when one more wanted it. If its rate is near
    1, Python code holds the lock, and the threads of all stages wait for it. Near 0: nothing waits for the lock. None:
    it is not observed."""
    longest_wait_s: float | None = None
    """Time that the consumer of that rank waited which waits longest, on all hosts. At each step, all ranks wait for
    it. None: there is one rank."""
    held_back: int = 0
    """How many times the governor made work wait for memory. If it rises, memory is the bottleneck and not cores."""
    held_back_pressure: int = 0
    """How many of these times the whole system was short of memory. If it rises, other programs take the memory."""
    throttled: int = 0
    """How many requests stores refused, because there were too many (HTTP 503 or 429). If it rises, more requests at
    the same time bring fewer rows."""
    restarts: int = 0
    """How many worker processes died and were replaced. If it rises, something kills them."""
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    """The counters of remote workers, by name: `workers`, `starting`, `units`, `calls`, `bytes`, `retries`, `hedges`,
    `late` and `core_s`. `core_s` is their cost: the cores that they held, busy or idle, times seconds. Empty: there are
    none."""

    def __post_init__(self) -> None:
        _check_counts(self)

    def stage(self, name: str) -> StageStats:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise StatsError(f"no stage {name!r} among {[s.name for s in self.stages]}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the snapshot as a dict for JSON. `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Snapshot:
        return cls(**{**values, "stages": tuple(StageStats(**s) for s in values["stages"])})
