"""Connects the stages of one rank and turns their knobs: `Pipeline`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sluice.ingest import stage_spec
from sluice.ingest.errors import NoWorkerAnswers, SourceError, warn
from sluice.ingest.flow.decoded import Decoded, Placed, ReadTask
from sluice.ingest.flow.number_columns import count_converted
from sluice.ingest.flow.placer import Placer
from sluice.ingest.flow.series import Chunks
from sluice.ingest.knobs import BACKENDS, DECODE, FETCH, REMOTE, Knobs, Limits
from sluice.ingest.loader_input import LoaderInput
from sluice.ingest.lock_probe import PROBE, has_lock
from sluice.ingest.machine import WORKER_PROCESS_BYTES, Machine
from sluice.ingest.memory.governor import Charge
from sluice.ingest.memory.process_memory import ProcessMemory
from sluice.ingest.process.worker import SlowStart, WorkerProcess
from sluice.ingest.row_order import Position, RankShare
from sluice.ingest.stage_spec import StageSpec
from sluice.ingest.stages.batch import BatchSeries, Finisher, series_steps
from sluice.ingest.stages.cutter import Cutter
from sluice.ingest.stages.minimum_memory import MinimumMemory, footprint_of, held_rows
from sluice.ingest.stages.pool import Gatherer
from sluice.ingest.stages.quarantine import Quarantine
from sluice.ingest.stages.row_functions import (
    RowFunctionCaller,
    RowFunctionWorker,
    SeriesFunctionWorker,
    memory_of,
    split_functions,
)
from sluice.ingest.stages.stage_pools import StagePools
from sluice.ingest.stages.transform import (
    Transform,
    TransformError,
    function_of,
    group_into_stages,
)
from sluice.ingest.stages.transform_worker import TransformStage, TransformWorker
from sluice.ingest.stages.transformer import Transformer

if TYPE_CHECKING:
    from sluice.ingest.remote.client import RemoteClient


class Pipeline(StagePools):
    """The stages fetch → decode → transforms of one rank. Local files need no `fetch`.

    `start` yields batches from a position on. After `stop` it can start again at another position, with the same knobs
    and counters."""

    def __init__(
        self,
        given: LoaderInput,
        *,
        share: RankShare,
        machine: Machine,
        quarantine: Quarantine,
        remote: RemoteClient | None,
    ):
        """`remote` is the workers that can also read row groups and call functions. None: this process does all."""
        self._input, self._share = given, share
        self._quarantine, self._remote = quarantine, remote
        plan, columns, groups = given.plan, given.columns, given.groups
        groups.rescue = quarantine
        reads_remotely = not (remote is None or given.functions)
        if not reads_remotely:
            groups.prepare_pieces()
        self._decoding = groups.decoding
        held = self._held_bytes()
        budget = machine.memory_limit(given.config.memory_limit) - machine.memory_used()
        self._early, self._late = split_functions(given.functions, held, budget, groups.kept)
        late_columns = groups.call_late(self._late)
        if reads_remotely:  # the workers send each row's own history
            sent = self._decoding.row_bytes + columns.history_bytes
            self._decoding = replace(self._decoding, row_bytes=sent)
        self.ended = False
        """Whether the interpreter exits. Epochs that end later leave the pipeline alone."""
        self._called = group_into_stages(given.transforms)
        config = given.config
        super().__init__(
            self._stages(reads_remotely), machine, groups, cores=config.cores, rank=config.rank
        )
        defaults = stage_spec.first_knobs(self._specs.values(), self._cores)
        if remote and reads_remotely:
            defaults = defaults.with_workers(decode=remote.fleet.requests)
        self.knobs = self._with_defaults(defaults, given.config.knobs or defaults)
        self._finisher = Finisher(
            plan,
            columns,
            share,
            self._buffers,
            quarantine,
            is_last=not self._called,
            late=late_columns,
        )
        self._placer, self._late_placer = (
            Placer(
                plan, replace(columns, added=columns.added | left), groups.describe, self._buffers
            )
            for left in (late_columns, {*columns.names} - late_columns)
        )
        self.footprint = self._least_memory()
        self.memory = ProcessMemory(machine, given.config.memory_limit, self._buffers)
        self._minimum = self.footprint.total, str(self.footprint)
        self._renew_governor()
        self.knobs = self.limits.check(self.knobs)
        self._burden = 1
        if remote:
            remote.fleet.charge = self._note_remote_memory

    def _stages(self, reads_remotely: bool) -> tuple[StageSpec, ...]:
        """Returns the properties of all stages, in order."""
        given = self._input
        for transform in (*given.functions, *given.transforms):
            function_of(transform)  # raises now if the name cannot be imported

        def spec(name: str, transform: Transform) -> StageSpec:
            """All transforms of one stage have these properties in common."""
            return stage_spec.transform(
                name,
                movable=transform.movable,
                limited=transform.limit_s is not None,
                remote=bool(self._remote and transform.sendable),
            )

        stages = stage_spec.pipeline(
            [spec(name, transforms[0]) for name, transforms in self._called],
            rows=[
                *(
                    replace(spec(function.name, function), buffer_limit="read_ahead_bytes")
                    for function in self._early
                ),
                *(spec(function.name, function) for function in self._late),
            ],
            fetches=given.groups.fetches and not reads_remotely,
            remote=reads_remotely,
        )
        own = (stage.name for stage in stages if not stage.transforms)
        called = (transform.name for transform in (*given.functions, *given.transforms))
        for name, count in Counter([*own, *called]).items():
            if count > 1:
                raise TransformError(
                    f"transforms: {count} stages are called {name!r}; give each transform its own name, as in "
                    f"transforms=[('first', {name}), ('second', {name})]"
                )
        return stages

    def _least_memory(self) -> MinimumMemory:
        """Computes the least memory for loading, in addition to what is in use before."""
        given = self._input
        # While a row group is decoded, the next one waits, and the one after it is on its way.
        held = 3 * self._decoding.stored_bytes * (FETCH in self._specs)
        return footprint_of(
            given.plan,
            given.columns,
            replace(self._decoding, extra_bytes=self._decoding.extra_bytes + held),
            share=self._share,
            stages=tuple(self._specs.values()),
            converted=count_converted(given.groups.schema, given.columns),
            epochs=given.config.read_ahead_epochs,
            functions=memory_of(
                self._early,
                self._late,
                self._decoding,
                given.plan,
                self._finisher.most_steps * self._finisher.rows,
            ),
            held=self._held_bytes() if self._late else 0,
            largest=given.groups.largest_read,
        )

    def _held_bytes(self) -> int:
        """Returns the bytes of the rows of reads until their last batches are finished."""
        given = self._input
        if not given.functions:
            return 0
        epochs, row_bytes = given.config.read_ahead_epochs, given.columns.row_bytes
        rows = held_rows(given.plan, self._share, epochs, row_bytes, given.groups.largest_read)
        return self._decoding.decoded(rows)

    # ---- knobs

    @property
    def limits(self) -> Limits:
        return replace(super().limits, fetch_bytes=max(1, self._decoding.stored_bytes))

    @property
    def _backends(self) -> tuple[str, ...]:
        """The back ends for transforms. Processes are possible only if memory suffices for two of them on each core.
        Without the interpreter's lock, threads do as well."""
        free = self.memory.limit - self.least_limit
        fits = free >= 2 * self._cores * WORKER_PROCESS_BYTES
        return BACKENDS if fits and has_lock() else ("thread",)

    def _with_defaults(self, defaults: Knobs, given: Knobs) -> Knobs:
        """Returns `given`, completed for the stages that it does not name: from `defaults`, or with one worker."""
        return replace(
            given,
            workers=dict.fromkeys(self._specs, 1) | {**defaults.workers, **given.workers},
            backend={**defaults.backend, **given.backend},
        )

    def apply(self, knobs: Knobs) -> None:
        """Changes the stages and sizes that `knobs` names, immediately. The other stages keep their workers."""
        with self._lock:
            knobs = self._with_defaults(self.knobs, knobs)
            super().apply(knobs)
            self._request_remote_workers()
            for name, stages in self._transform_stages.items():
                for stage in stages:
                    stage.backend = knobs.backend.get(name, "thread")

    def _request_remote_workers(self) -> None:
        """Tells the remote workers how many requests run at the same time."""
        if self._remote and self._pools:
            self._remote.fleet.use(
                sum(
                    self.knobs.workers[name]
                    for name, backend in self.knobs.backend.items()
                    if backend == REMOTE
                )
            )

    def _note_remote_memory(self, change: int) -> None:
        """Charges memory that remote workers on this host take (`change` above 0) or give back (below 0)."""
        with self._lock:
            self._remote_bytes += change
            self._governor.hold(change, outside=True)

    def burden(self, times: int) -> None:
        """Makes each transform do its work `times` times, to imitate heavier transforms."""
        with self._lock:
            self._burden = times
            for stage in itertools.chain(*self._transform_stages.values()):
                stage.burden = times

    def _buffer_bytes(self, stage: str) -> int:
        """Returns how many bytes of results may wait after a stage."""
        limit, knobs = self._specs[stage].buffer_limit, self.knobs
        if limit == "workers":
            return 0
        # Batches after another stage than the last one are also prefetched for the trainer.
        is_last = stage == next(reversed(self._specs))
        most = knobs.prefetch_bytes if is_last else self._finisher.longest_series_bytes
        rows = knobs.read_ahead_bytes if limit == "read_ahead_bytes" else 0
        return rows + min(most, knobs.prefetch_bytes)

    # ---- starting and stopping

    def start(self, position: Position, epochs: int) -> Iterator[BatchSeries]:
        """Stops an earlier run. Then yields batches from `position` on, up to the end of epoch number `epochs - 1`."""
        self.stop()
        PROBE.enter(self)
        given = self._input
        with self._lock:
            self._renew_governor()
            chunks = Chunks(
                given.plan,
                given.columns,
                self._share.readers,
                self._buffers,
                has_numbers=bool(self._late),
            )
            tasks = self._read_tasks(position, epochs)
            if FETCH in self._specs:
                tasks = self._fetch(tasks)
            series = self._call_late(self._read(tasks, chunks), chunks)
            for number, (name, transforms) in enumerate(self._called, 1):
                series = self._pool(
                    name,
                    series,
                    functools.partial(
                        Transformer,
                        self._transform_step(name, transforms),
                        self._finisher,
                        given.columns,
                        self._quarantine,
                        number == len(self._called),
                    ),
                    size=self._finisher.size,
                    measure=_rows_and_bytes,
                )
            self._request_remote_workers()
            return series

    def _fetch(self, tasks: Iterator[ReadTask]) -> Iterator[ReadTask]:
        """Starts the stage that gets the stored bytes of row groups from a far store."""

        def fetch(task: ReadTask, charge: Charge) -> ReadTask:
            fetched = self._input.groups.fetch(task.read, charge.correct)
            return replace(task, fetched=fetched, charge=charge)

        return self._pool(
            FETCH,
            tasks,
            lambda: fetch,
            size=lambda _: self._decoding.stored_bytes,
            measure=lambda task: (task.read.rows, task.charge.bytes),
        )

    def _read(self, tasks: Iterator[ReadTask], chunks: Chunks) -> Iterator[BatchSeries]:
        """Starts the stages that decode row groups, and that call functions over rows before they are placed. The last
        one also moves the rows to their places in batches, and finishes these if no function over rows follows."""
        given, functions, finisher = self._input, self._early, self._finisher
        cutter = Cutter(given.plan, chunks, self._steps_a_series)
        gatherer = Gatherer(cutter.add, finisher.size, finisher.clear if self._late else finisher)

        def place(decoded: Decoded, charge: Charge) -> Placed:
            return self._placer.place(decoded, chunks, charge)

        def read(task: ReadTask, charge: Charge) -> Decoded | Placed:
            """Places rows if nothing is left to call on them: there is no function, or an earlier pass has kept it."""
            decoded = self._decode(task, charge)
            return place(decoded, charge) if len(decoded.made_by) == len(functions) else decoded

        cache = given.groups.cache
        is_placed = len(functions) == given.groups.kept
        row_bytes = given.columns.placed_row_bytes
        reads: Iterator[Any] = self._pool(
            DECODE,
            tasks,
            lambda: read,
            size=lambda task: (
                self._decoding.at_work(task.read.rows) + task.read.rows * row_bytes * is_placed
            ),
            measure=_size_of_read,
            gatherer=None if functions else gatherer,
        )
        for function in functions:
            is_last = function is functions[-1]
            reads = self._pool(
                function.name,
                reads,
                self._row_function(
                    function,
                    functools.partial(
                        RowFunctionWorker, place=place if is_last else None, cache=cache
                    ),
                ),
                size=lambda piece: (
                    piece.nbytes
                    if isinstance(piece, Placed)
                    else piece.rows.nbytes + piece.rows.num_rows * row_bytes
                ),
                measure=_size_of_read,
                gatherer=gatherer if is_last else None,
            )
        return reads

    def _decode(self, task: ReadTask, charge: Charge) -> Decoded:
        """Takes what functions made of the rows in an earlier pass, if it was kept. Otherwise, reads on a remote worker
        if the knobs say so now and a worker answers, else here."""
        given = self._input
        if (made := given.groups.kept_rows(task.read)) is not None:
            with contextlib.suppress(SourceError):  # what follows says what is wrong with the file
                return given.groups.work_made(task, made, charge)
        if self._remote and self.knobs.backend.get(DECODE) == REMOTE:
            with contextlib.suppress(NoWorkerAnswers):
                return self._remote.read(task, charge)
        return given.rows.work(task, charge)

    def _call_late(self, series: Iterator[BatchSeries], chunks: Chunks) -> Iterator[BatchSeries]:
        """Starts the stages that call functions over the rows of batches."""
        for function in self._late:
            finisher = self._finisher if function is self._late[-1] else None
            series = self._pool(
                function.name,
                series,
                self._row_function(
                    function,
                    functools.partial(
                        SeriesFunctionWorker,
                        placer=self._late_placer,
                        chunks=chunks,
                        finisher=finisher,
                    ),
                ),
                size=lambda called: called.nbytes + self._finisher.size(called),
                measure=_rows_and_bytes,
            )
        return series

    def _row_function(
        self, function: Transform, make: Callable[[RowFunctionCaller], Any]
    ) -> Callable[[], Any]:
        """Makes the stage of a function over rows. Returns what makes each of its workers."""
        [stage] = self._transform_step(function.name, [function])
        return lambda: make(RowFunctionCaller(TransformWorker(stage), self._input.groups))

    def end(self) -> None:
        """Stops all workers, also remote ones, because the interpreter exits."""
        if self._remote:
            self._remote.close()
        self.stop()
        self.ended = True

    def _read_tasks(self, position: Position, epochs: int) -> Iterator[ReadTask]:
        """Yields the reads of this rank from `position` on, in the order of need."""
        plan, share, first = self._input.plan, self._share, 0
        for epoch in range(position.epoch, max(epochs, position.epoch + 1)):
            step = position.step if epoch == position.epoch else 0
            schedule = plan.schedule(epoch, share.reader, share.readers, step)
            for read in plan.reads_of(schedule, self._input.groups.cut):
                yield ReadTask(schedule, read, first=first)
                first = (first + read.rows) % 2**32

    def _transform_step(self, name: str, transforms: Sequence[Transform]) -> list[TransformStage]:
        """Makes the stage of a transform, or of transforms that run as one, for this run."""
        stages = self._transform_stages[name] = [
            TransformStage(
                transform,
                backend=self.knobs.backend.get(name, "thread"),
                counters=self._counters[name],
                governor=self._governor,
                restarted=self._note_restart,
                leave_processes=functools.partial(self._leave_processes, name),
                running=self._transform_stages,
                burden=self._burden,
                remote=self._remote,
            )
            for transform in transforms
        ]
        return stages

    def _note_restart(self) -> None:
        with self._lock:
            self.restarts += 1

    def _leave_processes(self, name: str, transform: str, why: SlowStart) -> None:
        """Runs a stage in threads from now on. Its limits no longer have processes."""
        with self._lock:
            for stage in self._transform_stages.get(name, ()):
                stage.slow_start = why
            spec, backends = self._specs[name], self.knobs.backend
            if "process" not in spec.backends:
                return
            left = tuple(kind for kind in spec.backends if kind != "process")
            self._specs[name] = replace(spec, backends=left)
            if backends.get(name) == "process":
                self.apply(replace(self.knobs, backend={**backends, name: "thread"}))
        warn(
            f"stage {name!r}: a process for transform {transform!r} did not start: {' '.join(str(why).split())[:300]}. "
            "The stage goes on in threads until the loader is closed"
        )

    # ---- counters and reports

    @property
    def worker_pids(self) -> list[int]:
        """The ids of the worker processes of all stages now."""
        return [pid for _, worker in self._workers() if (pid := worker.pid)]

    def stacks(self) -> str:
        """Returns the stack of every worker process, for a person who looks for a hang."""
        return "\n".join(
            f"worker {worker.pid} of {name}:\n{worker.stack()}" for name, worker in self._workers()
        )

    def _workers(self) -> list[tuple[str, WorkerProcess]]:
        return [
            (name, worker)
            for name, stages in list(self._transform_stages.items())
            for stage in stages
            for worker in stage.workers()
        ]

    @property
    def least_limit(self) -> int:
        """The smallest memory limit, in bytes, with which this pipeline runs. If the control group leaves less memory
        than this process's own limit, the number counts all memory of the group."""
        return self.memory.base + self.footprint.total

    @property
    def parts(self) -> dict[str, int]:
        """The parts of `least_limit`, by name, in bytes."""
        return {"in_use_at_the_start": self.memory.base, **asdict(self.footprint)}

    @property
    def throttled(self) -> int:
        """How many requests stores refused, because there were too many."""
        return super().throttled + (self._remote.counts["throttled"] if self._remote else 0)

    @property
    def overhead(self) -> int:
        """The bytes of memory in use that belong to no item of work."""
        return self._governor.overhead

    def _steps_a_series(self) -> int:
        """Returns how many batches a series may have now, by the measured time of transforms."""
        # Functions over rows get those of all ranks that share a stream.
        stages = [(function.name, self._share.parts) for function in self._late]
        stages += [(name, 1) for name, _ in self._called]
        counted = ((self._counters[name], parts) for name, parts in stages)
        return series_steps(
            self._finisher.most_steps,
            self._share.rows,
            [
                (stage.busy_s, stage.rows // parts, self.knobs.workers[stage.name])
                for stage, parts in counted
            ],
        )


def _size_of_read(read: Decoded | Placed) -> tuple[int, int]:
    return read.task.read.rows, read.nbytes


def _rows_and_bytes(series: BatchSeries) -> tuple[int, int]:
    return sum(series.rows), series.nbytes
