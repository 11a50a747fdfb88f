"""Connects the stages of one rank and turns their knobs: `Pipeline`."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from sluice.ingest import stage_spec
from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoadingError
from sluice.ingest.knobs import BACKENDS, REMOTE, Knobs, Limits
from sluice.ingest.machine import WORKER_PROCESS_BYTES, Machine, give_back
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge, Governor, MemoryReadings
from sluice.ingest.process.worker import RestartBudget
from sluice.ingest.read.decoding import Decoding
from sluice.ingest.read.reader import RowGroupSource, Work
from sluice.ingest.row_order import Position, RankShare, Read, RowsPlan
from sluice.ingest.stage_spec import BATCH, COLLATE, READ, SHUFFLE, StageSpec, limits_of
from sluice.ingest.stages.batch import (
    BatchSeries,
    Collator,
    Cut,
    Cutter,
    Ready,
    at_once,
    cuts,
    most_steps,
)
from sluice.ingest.stages.completed_windows import (
    CompletedWindows,
    ReadDone,
    ReadWorker,
    RemoteWork,
    placed,
    switched,
)
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.minimum_memory import footprint_of
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.quarantine import RowQuarantine
from sluice.ingest.stages.scatter_kernel import load_compiled
from sluice.ingest.stages.shuffle import Block, Chunks, Gatherer, Gathering, ReadTask
from sluice.ingest.stages.transform import Fused
from sluice.ingest.stages.transform_worker import TransformStage, Worker, function_of
from sluice.ingest.stages.transformer import Step, Transformer
from sluice.ingest.stats import StageStats

PATIENCE_S = 1.5  # how long to wait for workers in the middle of their work: an interrupt may take two seconds


class PipelineError(LoadingError):
    """A pipeline that cannot be: its message says what would do."""


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """What a pipeline is made of."""

    plan: RowsPlan
    source: RowGroupSource
    describe: Callable[[Read], str]
    columns: Columns
    share: RankShare
    transforms: Sequence[Fused] = ()
    quarantine: RowQuarantine
    memory_limit: int
    machine: Machine
    decoding: Decoding
    converted: int = 0
    """The number of columns whose values cannot be moved as they are stored in a file."""
    epochs: int = 1
    """The number of epochs that follow each other without a stop."""
    remote: RemoteWork | None = None
    """Workers elsewhere that can read and call functions, too."""

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise PipelineError(
                f"two stages are called {', '.join(sorted(twice))}: give each transform a name of "
                "its own"
            )

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        there = self.remote is not None
        return stage_spec.pipeline(
            [
                stage_spec.transform(t.name, movable=t.movable, remote=there and t.sendable)
                for t in self.transforms
            ],
            remote=there,
        )


class Pipeline:
    """Stages read → shuffle → batch → transforms → collate. It starts at a position, stops, and starts anew; its
    knobs and counters stay."""

    def __init__(self, parts: PipelineParts, knobs: Knobs | None):
        self._parts, self._pid = parts, os.getpid()
        self._specs = {spec.name: spec for spec in parts.stages}
        self.stages = tuple(self._specs)
        self._cores = max(1, math.ceil(parts.machine.cores()))
        start = Knobs(
            workers={name: spec.first_workers(self._cores) for name, spec in self._specs.items()},
            fused=frozenset(name for name, spec in self._specs.items() if spec.begins_fused),
        )
        if parts.remote is not None:
            start = replace(
                start.with_workers(read=parts.remote.requests), backend={READ.name: REMOTE}
            )
        self.knobs = self._complete(start, start if knobs is None else knobs)
        self._tallies = {name: StageCounters(name) for name in self.stages}
        self._buffers = Buffers()
        self.footprint = footprint_of(
            parts.plan,
            parts.columns,
            parts.decoding,
            share=parts.share,
            stages=parts.stages,
            converted=parts.converted,
            epochs=parts.epochs,
        )
        self.minimum = self.footprint.total
        load_compiled(
            bags=bool(parts.columns.stored_bags)
        )  # its memory is taken before anything is counted
        self.base, self._own = parts.machine.memory_used(), parts.machine.memory_own()
        self._limit = parts.memory_limit
        self._group = parts.machine.memory_group()
        self._charged = 0
        if self._group is not None:
            self._charged = max(self.base, self._group.charged() or 0)
            if (
                self._group.limit - self._charged < self._limit - self.base
            ):  # the group holds more than this process
                self._limit, self.base = self._group.limit, self._charged
        self._elsewhere = 0  # bytes of this host that workers which read have
        self._governor = self._new_governor()
        self.limits.check(self.knobs)
        largest = max(itertools.chain(*parts.plan.groups), default=0)
        # The rows of a stream that readers place at once: a row group's, unless it is so large that windows would be
        # placed long before they are due, in memory for the batches of all streams.
        self._placed_rows = max(parts.plan.widest, min(largest, 4 * parts.plan.widest))
        self._held_back: Counter[str] = Counter()
        self._pools: dict[str, Pool[Any, Any]] = {}
        for stage in parts.transforms:
            for transform in stage.transforms:
                function_of(transform)  # a name that leads nowhere is an error now
        self._transforms: dict[str, list[TransformStage]] = {}
        self._budget, self._burden = RestartBudget(), 1
        self._leaving: list[Pool[Any, Any]] = []
        self._turning = (
            threading.RLock()
        )  # a garbage collector may close a forgotten loader's pipeline within it
        if parts.remote is not None:
            parts.remote.watch(self._hold_elsewhere)

    # ---- knobs

    @property
    def limits(self) -> Limits:
        """The limits of the knobs. They rise with the cores, and never fall: knobs in force stay within them."""
        self._cores = max(self._cores, math.ceil(self._parts.machine.cores()))
        return limits_of(tuple(self._specs.values()), self._cores, self._backends)

    @property
    def _backends(self) -> tuple[str, ...]:
        """The back ends for transforms: processes only if there is memory for as many as cores keep busy."""
        spare = self._limit - self.base - self.minimum
        return BACKENDS if spare >= 2 * self._cores * WORKER_PROCESS_BYTES else ("thread",)

    def _complete(self, knobs: Knobs, given: Knobs) -> Knobs:
        """Completes `given`: stages that it does not name get what `knobs` say, or one worker."""
        return replace(
            given,
            workers={n: given.workers.get(n, knobs.workers.get(n, 1)) for n in self.stages}
            | dict(given.workers),
            backend={**knobs.backend, **given.backend},
        )

    def apply(self, knobs: Knobs) -> None:
        """Changes the stages and sizes that `knobs` name at once; the other stages keep their workers."""
        knobs = self._complete(self.knobs, knobs)
        self.limits.check(knobs)
        with self._turning:
            self.knobs = knobs
            self._use_remote()
            for name, pool in self._pools.items():
                pool.resize(self._workers_of(name))
                pool.limit(self._limit_bytes(name))
            for name, stages in self._transforms.items():
                for stage in stages:
                    stage.backend = knobs.backend.get(name, "thread")

    def _use_remote(self) -> None:
        if self._parts.remote is not None and self._pools:
            self._parts.remote.use(
                sum(
                    self.knobs.workers[name]
                    for name, backend in self.knobs.backend.items()
                    if backend == REMOTE and name not in self.knobs.fused
                )
            )

    def _read_backend(self) -> str:
        return self.knobs.backend.get(READ.name, "thread")

    def _hold_elsewhere(self, change: int) -> None:
        with self._turning:
            self._elsewhere += change
            self._governor.hold(change, outside=True)

    def _workers_of(self, stage: str) -> int:
        return 0 if stage in self.knobs.fused else self.knobs.workers[stage]

    def _until(self, number: int) -> int:
        """The number of the next stage of transforms after `number` that has workers of its own."""
        names = [t.name for t in self._parts.transforms]
        return next(
            (n for n in range(number + 1, len(names)) if names[n] not in self.knobs.fused),
            len(names),
        )

    def burden(self, times: int) -> None:
        """Makes transforms do their work so many times over."""
        with self._turning:
            self._burden = times
            for stage in itertools.chain(*self._transforms.values()):
                stage.burden = times

    def _limit_bytes(self, stage: str) -> int:
        """Returns how many bytes may wait after a stage."""
        limit = self._specs[stage].buffer_limit
        if limit == "window":  # all streams may come to the end of their window at the same time
            return len(self._streams) * self._block_bytes
        if limit == "read_ahead_bytes":
            return self.knobs.read_ahead_bytes
        if limit == "stretch":  # what waits here waits for the trainer, too
            return min(self._series_bytes, self.knobs.prefetch_bytes)
        return self.knobs.prefetch_bytes

    # ---- starting and stopping

    def start(self, position: Position, epochs: int) -> Iterator[Ready]:
        """Starts a run: yields batches from `position` to the end of epoch number `epochs - 1`. An earlier run is
        stopped."""
        self.stop()
        parts = self._parts
        columns = parts.columns
        with self._turning:
            self._governor = self._new_governor()
            # All steps are made, because a fused stage does the work of others.
            steps = [self._step(transform) for transform in parts.transforms]
            chunks = Chunks(parts.plan, columns, parts.share.readers, self._buffers)
            blocks = self._blocks(self._tasks(position, epochs), chunks)
            cutter = Cutter(parts.plan, columns, parts.share, self._buffers)
            series: Iterator[BatchSeries] = self._pool(
                BATCH.name,
                cuts(blocks, parts.plan, parts.share.readers, chunks, self._at_once),
                self._marked(cutter),
                size=cutter.size,
                measure=_measured,
            )
            for number, transform in enumerate(parts.transforms):
                series = self._pool(
                    transform.name,
                    series,
                    self._transformer(number, steps),
                    size=lambda s: s.nbytes,
                    measure=_measured,
                    passes=functools.partial(_done, number),
                )
            collator = Collator(columns, parts.share.rows)
            self._use_remote()
            return self._pool(
                COLLATE.name,
                series,
                lambda _: lambda s, charge: collator(parts.quarantine.finite(s, columns), charge),
                size=collator.size,
                measure=lambda r: (sum(b.rows for b in r.batches), r.nbytes),
            )

    def _blocks(self, tasks: Iterator[ReadTask], chunks: Chunks) -> Pool[Gatherer, Block]:
        """Starts the stages that read row groups and put their rows into windows."""
        parts = self._parts
        governor = self._governor
        windows = CompletedWindows()

        def gatherer() -> Gatherer:
            return Gatherer(parts.plan, parts.columns, chunks, parts.describe)

        def read(
            tasks: Iterator[ReadTask], make_work: Callable[[], Work]
        ) -> Pool[ReadTask, ReadDone]:
            return self._pool(
                READ.name,
                tasks,
                lambda clock: ReadWorker(
                    switched(make_work(), parts.remote, self._read_backend),
                    windows,
                    gatherer(),
                    clock=clock,
                    shuffle=self._tallies[SHUFFLE.name],
                    room=lambda window: self._room_for(window, windows, governor),
                ),
                size=lambda t: parts.decoding.at_work(t.read.rows),
                measure=lambda r: (r.rows, r.nbytes),
                corrects=False,
            )

        return self._pool(
            SHUFFLE.name,
            windows.in_order(parts.source.open(tasks, read)),
            lambda _: gatherer(),
            size=lambda g: g.window.rows * parts.columns.row_bytes,
            measure=lambda b: (b.rows, b.nbytes),
            passes=placed,
        )

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process that made it: it has none of the threads, locks that one of them held
        are never freed here, and worker processes are the other's."""
        return os.getpid() != self._pid

    def close(self) -> list[Pool[Any, Any]]:
        """Sends all workers home, without waiting for them. Returns the pools that had any. Does nothing in a fork."""
        if self.forked:
            return []
        with self._turning:
            pools, self._pools = list(self._pools.values()), {}
            for pool in pools:
                pool.close()
            for stage in itertools.chain(*self._transforms.values()):
                stage.close()
            self._transforms = {}
            self._leaving = [p for p in self._leaving + pools if not p.gone]
            self._held_back += self._governor.reasons
            self._governor.reasons.clear()
        return self._leaving

    def stop(self) -> None:
        """Sends all workers home and waits a while for them. Does nothing in a fork."""
        if self.forked:
            return
        end = time.monotonic() + PATIENCE_S
        for pool in self.close():
            pool.join(max(0.0, end - time.monotonic()))
        self._buffers.trim()

    def _tasks(self, position: Position, epochs: int) -> Iterator[ReadTask]:
        plan, share = self._parts.plan, self._parts.share
        for epoch in range(position.epoch, max(epochs, position.epoch + 1)):
            step = position.step if epoch == position.epoch else 0
            schedule = plan.schedule(epoch, share.reader, share.readers, step)
            for one in schedule.reads:
                yield ReadTask(schedule, one)

    def _pool(
        self,
        name: str,
        upstream: Iterator[Any],
        make_work: Callable[[WorkerClock], Callable[..., Any]],
        **how: Any,
    ) -> Pool[Any, Any]:
        pool: Pool[Any, Any] = Pool(
            self._tallies[name],
            upstream,
            make_work,
            workers=self._workers_of(name),
            limit_bytes=self._limit_bytes(name),
            governor=self._governor,
            **how,
        )
        self._pools[name] = pool
        return pool

    def _room_for(
        self, gathering: Gathering, windows: CompletedWindows, governor: Governor
    ) -> Charge | None:
        """Returns a charge for a window if readers are to place it now: the shuffle stage is fused with theirs, the
        window is due soon, and there is memory for it."""
        knobs = self.knobs
        soon = (2 + knobs.workers[READ.name] // len(self._streams)) * self._placed_rows
        if SHUFFLE.name not in knobs.fused or windows.ahead(gathering) > soon:
            return None
        with governor.lock:
            return governor.admit(gathering.window.rows * self._parts.columns.row_bytes, due=False)

    def _step(self, fused: Fused) -> Step:
        tally = self._tallies[fused.name]
        governor = self._governor
        columns = self._parts.columns

        def spent(cpu_s: float, core_wait_s: float) -> None:
            with governor.lock:
                tally.cpu_s += cpu_s
                tally.core_wait_s += core_wait_s

        stages = self._transforms[fused.name] = [
            TransformStage(
                transform,
                columns,
                self._parts.quarantine,
                backend=self.knobs.backend.get(fused.name, "thread"),
                budget=self._budget,
                charge=governor.hold,
                spent=spent,
                run_alone=governor.run_alone,
                burden=self._burden,
                elsewhere=self._parts.remote,
            )
            for transform in fused.transforms
        ]
        return Step(fused, tally, lambda: [stage.runner() for stage in stages])

    def _transformer(self, number: int, steps: list[Step]) -> Callable[[WorkerClock], Transformer]:
        columns = self._parts.columns
        return lambda stint: Transformer(number, steps, columns, stint, lambda: self._until(number))

    def _marked(
        self, cutter: Cutter
    ) -> Callable[[WorkerClock], Callable[[Cut, Charge], BatchSeries]]:
        """Wraps a cutter so that rows of unreadable row groups have weight 0 in its batches."""
        return lambda _: (
            lambda cut, charge: self._parts.quarantine.marked(
                cutter(cut, charge), self._parts.columns
            )
        )

    def _new_governor(self) -> Governor:
        governor = Governor(
            self._limit,
            self.minimum,
            self.base,
            MemoryReadings(
                used=lambda: self.base + self._grown(),
                idle=self._buffers.idle_bytes,
                reclaim=self._reclaim,
                pressure=self._parts.machine.memory_pressure,
            ),
            parts=str(self.footprint),
        )
        governor.hold(self._elsewhere, outside=True)
        return governor

    def _grown(self) -> int:
        """The bytes that this process has taken since the start, or, if that is more, what its control group was
        charged with since then besides what worker processes hold."""
        own = self._parts.machine.memory_own() - self._own
        charged = self._group.charged() if self._group is not None else None
        return (
            own if charged is None else max(own, charged - self._charged - self._governor.outside)
        )

    def _reclaim(self) -> None:
        """Gives back our buffers, Arrow's memory, and the C library's: each keeps what was freed."""
        self._buffers.trim()
        pa.default_memory_pool().release_unused()
        give_back()

    # ---- what it reports

    def stats(self) -> tuple[StageStats, ...]:
        pools = dict(self._pools)
        for n, own in list(self._transforms.items()):  # those of an earlier run are gone
            self._tallies[n].process_bytes = max(
                self._tallies[n].process_bytes, sum(s.process_bytes for s in own)
            )
        found = (
            pools[name].stats()
            if name in pools
            else self._tallies[name].stats(
                self.knobs.workers[name], "thread", 0, self._limit_bytes(name)
            )
            for name in self.stages
        )
        knobs, limits = self.knobs, self.limits
        return tuple(
            replace(
                s,
                backend=knobs.backend.get(s.name, "thread"),
                workers=knobs.workers[limits.head(knobs, s.name)],
            )
            for s in found
        )

    @property
    def gone(self) -> bool:
        """Whether no worker of any stage is left."""
        return not self._pools and all(pool.gone for pool in self._leaving)

    @property
    def worker_pids(self) -> list[int]:
        """The ids of the worker processes of all stages now."""
        return [pid for _, worker in self._workers() if (pid := worker.process.pid)]

    def stacks(self) -> str:
        """Says what every worker process does now, for a person who looks for a hang."""
        return "\n".join(
            f"worker {worker.process.pid} of {name}:\n{worker.process.stack()}"
            for name, worker in self._workers()
        )

    def _workers(self) -> list[tuple[str, Worker]]:
        return [
            (name, worker)
            for name, stages in list(self._transforms.items())
            for stage in stages
            for worker in stage.workers()
        ]

    @property
    def restarts(self) -> int:
        """The number of worker processes that died and were replaced."""
        return self._budget.used

    @property
    def least_limit(self) -> int:
        """The smallest memory limit that will do."""
        return self.base + self.minimum

    @property
    def parts(self) -> dict[str, int]:
        """What `least_limit` is for, in bytes."""
        return {"in_use_at_the_start": self.base, **asdict(self.footprint)}

    @property
    def held_back(self) -> Counter[str]:
        """How often work was held back for memory, by reason."""
        return self._held_back + self._governor.reasons

    @property
    def overhead(self) -> int:
        """The bytes in use that no work is charged for."""
        return self._governor.overhead

    @property
    def _streams(self) -> tuple[int, ...]:
        return self._parts.plan.streams_of(self._parts.share.reader, self._parts.share.readers)

    @property
    def _block_bytes(self) -> int:
        return self._parts.plan.widest * self._parts.columns.row_bytes

    def _at_once(self) -> int:
        """How many batches may pass the stages of transforms together now."""
        plan = self._parts.plan
        share = self._parts.share
        tallies = self._tallies
        code = [
            (tallies[stage.name], self.knobs.workers[stage.name])
            for stage in self._parts.transforms
        ]
        return at_once(
            most_steps(plan, share.readers), share.rows, [(t.busy_s, t.rows, n) for t, n in code]
        )

    @property
    def _series_bytes(self) -> int:
        parts = self._parts
        rows = (
            most_steps(parts.plan, parts.share.readers)
            * parts.plan.batch_size
            // parts.share.readers
        )
        return rows * (parts.columns.row_bytes + 4)


def _done(number: int, series: BatchSeries) -> bool:
    """Whether the series has been through that stage of transforms."""
    return series.done > number


def _measured(series: BatchSeries) -> tuple[int, int]:
    return sum(series.rows), series.nbytes
