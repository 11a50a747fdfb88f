"""The stages of one rank while they run: `StagePools` has their pools of workers, knobs, counters and memory."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.lock_probe import PROBE
from sluice.ingest.machine import Machine
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Governor
from sluice.ingest.memory.process_memory import ProcessMemory
from sluice.ingest.stage_spec import StageSpec, limits_of
from sluice.ingest.stages.counters import StageCounters
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.transform_worker import TransformStage
from sluice.ingest.stats import StageStats

if TYPE_CHECKING:
    from sluice.ingest.cache.made_rows import MadeCache
    from sluice.ingest.read.reader import RowGroupReader

STOP_WAIT_S = 1.5
"""How long `stop` waits for workers that are in the middle of an item."""


class StagePools:
    """Stages that can be started, resized while they run, and stopped. Knobs and counters outlive a run."""

    knobs: Knobs
    memory: ProcessMemory
    _governor: Governor
    _minimum: tuple[int, str]
    """The least memory of a run, and its parts."""

    def __init__(
        self,
        specs: Sequence[StageSpec],
        machine: Machine,
        groups: RowGroupReader,
        cores: int | None = None,
        rank: int = 0,
    ):
        """`cores`: the most that all stages together use. Their threads run on no others, nor do their processes."""
        self._specs = {stage.name: stage for stage in specs}
        """The properties of all stages, in order."""
        self.machine, self._groups = machine, groups
        self._pid = os.getpid()
        self._most_cores = cores
        self._own_cores = machine.some_cores(cores, rank) if cores else set()
        self._cores = self._count_cores()
        self._counters = {name: StageCounters(name) for name in self._specs}
        self._buffers = Buffers()
        self._remote_bytes = 0
        """The memory of the remote workers that run on this host."""
        self.held_back: Counter[str] = Counter()
        """How often work had to wait for memory, by reason."""
        self._pools: dict[str, Pool] = {}
        self._transform_stages: dict[str, list[TransformStage]] = {}
        self.restarts = 0
        """The number of worker processes that died and were replaced."""
        self._closing_pools: list[Pool] = []
        # The garbage collector may close abandoned stages while this thread already has the lock.
        self._lock = threading.RLock()

    # ---- knobs

    @property
    def limits(self) -> Limits:
        """The limits of the knobs. They rise when the process gets more cores. If processes of a stage start too
        slowly, it loses them. The current knobs always stay valid."""
        self._cores = max(self._cores, self._count_cores())
        limits = limits_of(tuple(self._specs.values()), self._cores, self._backends)
        return replace(limits, cores=self._most_cores)

    @property
    def cache(self) -> MadeCache | None:
        """What keeps the results of the first functions over rows."""
        return self._groups.cache

    def _count_cores(self) -> int:
        return max(1, math.ceil(min(self.machine.cores(), self._most_cores or math.inf)))

    @property
    def _backends(self) -> tuple[str, ...]:
        """The back ends that stages may use now."""
        return ("thread",)

    def apply(self, knobs: Knobs) -> None:
        """Changes the stages and sizes, immediately."""
        knobs = self.limits.check(knobs)
        with self._lock:
            self.knobs = knobs
            for name, pool in self._pools.items():
                pool.resize(knobs.workers[name])
                pool.limit(self._buffer_bytes(name))

    def _buffer_bytes(self, stage: str) -> int:
        """Returns how many bytes of results may wait after a stage."""
        return self.knobs.read_ahead_bytes

    # ---- starting and stopping

    def _renew_governor(self) -> None:
        """Makes the governor of the next run."""
        self._governor = self.memory.new_governor(*self._minimum, outside=self._remote_bytes)
        self._governor.reasons = self.held_back

    def _pool(
        self,
        name: str,
        upstream: Iterator[Any],
        make_work: Callable[[], Callable[..., Any]],
        **options: Any,
    ) -> Pool:
        """Starts the workers of one stage. `options` are further arguments of `Pool`."""

        def make() -> Callable[..., Any]:
            if self._own_cores:
                os.sched_setaffinity(
                    0, self._own_cores
                )  # of this thread, and of all that it starts
            return make_work()

        pool = self._pools[name] = Pool(
            self._counters[name],
            upstream,
            make,
            workers=self.knobs.workers[name],
            limit_bytes=self._buffer_bytes(name),
            governor=self._governor,
            **options,
        )
        return pool

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the stages.

        A fork has none of the threads, so nothing releases a lock that a thread had at that moment. The other process
        owns the worker processes."""
        return os.getpid() != self._pid

    def close(self) -> list[Pool]:
        """Tells all workers to stop, and returns the pools that still have workers. Does nothing in a fork."""
        if self.forked:
            return []
        PROBE.leave(self)
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
            for pool in pools:
                pool.close()
            for stage in itertools.chain(*self._transform_stages.values()):
                stage.close()
            self._transform_stages = {}
            self._closing_pools = [pool for pool in self._closing_pools + pools if not pool.gone]
        return self._closing_pools

    def stop(self) -> None:
        """Stops all workers and waits for them, at most `STOP_WAIT_S`. Does nothing in a fork."""
        if self.forked:
            return
        end = time.monotonic() + STOP_WAIT_S
        for pool in self.close():
            pool.join(max(0.0, end - time.monotonic()))
        self._buffers.trim()

    @property
    def gone(self) -> bool:
        """Whether no worker of any stage is left."""
        return not self._pools and all(pool.gone for pool in self._closing_pools)

    # ---- counters

    def stats(self) -> tuple[StageStats, ...]:
        """Returns the counters of every stage, in order."""
        pools, knobs = dict(self._pools), self.knobs
        stats = []
        for name, counters in self._counters.items():
            stages = self._transform_stages.get(name, ())
            # Stages of an earlier run are gone, so the largest size so far is kept.
            sizes = (stage.process_bytes for stage in stages)
            counters.process_bytes = max(counters.process_bytes, sum(sizes))
            stats.append(
                counters.stats(
                    workers=knobs.workers[name],
                    backend=knobs.backend.get(name, "thread"),
                    queue_bytes=pools[name].waiting_bytes if name in pools else 0,
                    queue_limit_bytes=self._buffer_bytes(name),
                    starting=sum(stage.starting for stage in stages),
                )
            )
        return tuple(stats)

    def durations(self) -> dict[str, tuple[int, ...]]:
        """Returns how often the work on an item took how long, for each stage (`LoaderStats.durations`)."""
        return {name: tuple(counter.durations.counts) for name, counter in self._counters.items()}

    @property
    def throttled(self) -> int:
        """How many requests stores refused, because there were too many."""
        return self._groups.stats().get("throttled", 0)

    @property
    def memory_free(self) -> int:
        """The bytes that work in advance, or another worker process, may take now."""
        return self._governor.free
