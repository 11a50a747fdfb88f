"""Runs a transform's function: `TransformStage` is shared, and each worker of the pool has a `TransformWorker`.

A `TransformWorker` calls the function in its own thread, in a process that it owns, or on remote workers, as the
knob says at that moment. So the back end can change between two items, while the pool and its order stay. Rows on
which the function fails are found by halving the batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import torch

from sluice.ingest.choices import PROGRAM_ERRORS
from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoadingError
from sluice.ingest.knobs import REMOTE, format_bytes
from sluice.ingest.machine import WORKER_PROCESS_BYTES
from sluice.ingest.process import protocol
from sluice.ingest.process.child_main import load
from sluice.ingest.process.matrix_function import MATRIX, MatrixFunction
from sluice.ingest.process.protocol import ROWS
from sluice.ingest.process.row_call import decode, encode
from sluice.ingest.process.worker import (
    RestartBudget,
    RestartsExhausted,
    WorkerClosed,
    WorkerCrashed,
    WorkerError,
    WorkerProcess,
)
from sluice.ingest.stages.batch import BatchSeries, lengths_name
from sluice.ingest.stages.completed_windows import NoWorkerAnswers, RemoteWork
from sluice.ingest.stages.matrix import MatrixPlace
from sluice.ingest.stages.pool import Closed
from sluice.ingest.stages.quarantine import RowQuarantine, isolate, kinds_of, weights_of
from sluice.ingest.stages.transform import (
    Arrays,
    Function,
    Given,
    Transform,
    TransformError,
    visible_columns,
)

# If a user's function raises one of these, it counts as an error of the function and does not end the trainer. Signals
# do not reach workers.
_EXIT_ERRORS = (SystemExit, KeyboardInterrupt, GeneratorExit)


class TooLarge(MemoryError):
    """A batch does not fit into memory, even if nothing else runs."""


class ProcessMemory:
    """The memory for the worker processes of all stages of a pipeline.

    - `free` returns the bytes that are free.
    - `stages` returns the stages that run.
    - `program_bytes` returns what this program held before it loaded anything."""

    def __init__(
        self,
        free: Callable[[], int],
        stages: Callable[[], Iterable[TransformStage]],
        program_bytes: Callable[[], int],
    ) -> None:
        self._free = free
        self._stages = stages
        self._program_bytes = program_bytes
        self.lock = threading.Lock()
        """It is held while a process is added, so that two stages do not take the same bytes."""

    def has_room_for(self, stage: TransformStage) -> bool:
        """Returns whether another process of a stage may start.

        The very first process may, because none was measured. The first one of each other stage needs free memory for
        one, and is taken to be as large as the largest that was measured. Any other needs free memory for two. Until
        one of its stage was measured, it is taken to be as large as this program."""
        stages = list(self._stages())
        program_bytes = self._program_bytes()
        if not any(each.workers() for each in stages):
            return True
        unmeasured = sum(len(each.workers()) for each in stages if not each.process_bytes)
        free = self._free() - unmeasured * program_bytes
        if stage.workers():
            return free >= 2 * (stage.process_bytes or program_bytes)
        largest = max(each.process_bytes for each in stages)
        return free >= (stage.process_bytes or largest or program_bytes)


class TransformStage:
    """One transform in one run of a pipeline. The workers of its pool share it."""

    def __init__(
        self,
        transform: Transform,
        columns: Columns,
        quarantine: RowQuarantine,
        *,
        backend: str,
        budget: RestartBudget,
        charge: Callable[[int, bool], None],
        spent: Callable[[float, float], None],
        run_alone: Callable[[], AbstractContextManager[int]],
        memory: ProcessMemory,
        burden: int = 1,
        remote: RemoteWork | None = None,
    ):
        """- `charge` is called with memory taken (+) or given back (-), and whether it is a process's own.
        - `spent` is called with a process's seconds on a core, and its seconds of waiting for one.
        - `run_alone` is the governor's context for one holder.
        - `memory` is what the worker processes of all stages share.
        - `burden`: how often the function runs for each batch. All calls but the last work on a copy.
        - `remote`: remote workers that can also call the function."""
        self.transform = transform
        self.columns = columns
        self.quarantine = quarantine
        self.backend = backend
        self.hidden = frozenset(of for name in transform.added for of in (name, lengths_name(name)))
        """The columns that the function must add. It does not get them."""
        self.burden = burden
        self.function = function_of(transform)
        self.matrix = (
            MatrixPlace.of(transform, columns)
            if isinstance(self.function, MatrixFunction)
            else None
        )
        self.spent = spent
        self.run_alone = run_alone
        self.worked_in_threads = False
        """Whether its function has run in a thread, so that a worker without a process may go on in its thread."""
        self._budget = budget
        self._charge = charge
        self._memory = memory
        self._remote = remote
        # The garbage collector may close an abandoned loader's stages while this thread already has the lock.
        self._lock = threading.RLock()
        self._workers: dict[Worker, None] = {}  # in the order of their start
        self.process_bytes = 0
        """The most memory of its own that one of the processes was seen to use."""
        self._closed = False

    def runner(self) -> TransformWorker:
        """Returns the transform's caller for one worker of the pool."""
        return TransformWorker(self)

    def worker(self) -> Worker:
        """Starts a new process."""
        assert isinstance(self.transform.function, str)
        with self._lock:
            if self._closed:
                raise Closed
            worker = Worker(
                WorkerProcess(
                    self.transform.function,
                    limit_s=self.transform.limit_s,
                    memory_limit=self.transform.memory_limit,
                    budget=self._budget,
                    charge=lambda size: self._charge(size, False),
                ),
                self._charge,
                self.process_bytes or WORKER_PROCESS_BYTES,
            )
            self._workers[worker] = None
        return worker

    def call_remotely(self, arrays: Arrays, where: str) -> Given:
        """Calls the function on a remote worker, and charges the memory of the messages."""
        assert self._remote is not None
        assert isinstance(self.transform.function, str)
        size = 2 * sum(array.nbytes for array in arrays.values())  # sent and received
        self._charge(size, False)
        try:
            return self._remote.call(self.transform.function, arrays, where)
        finally:
            self._charge(-size, False)

    def add_worker(self) -> Worker | None:
        """Starts another process in the background. None: too little memory is free for it now."""
        with self._memory.lock:
            if not self._memory.has_room_for(self):
                return None
            worker = self.worker()
        worker.start()
        return worker

    @property
    def starting(self) -> int:
        """The workers whose process has not started yet."""
        return sum(worker.is_starting for worker in self.workers())

    def end(self, worker: Worker) -> None:
        """Ends one process."""
        worker.close()
        with self._lock:
            self._workers.pop(worker, None)

    def workers(self) -> list[Worker]:
        with self._lock:
            return list(self._workers)

    def close(self) -> None:
        """Ends the processes, even in the middle of an item."""
        with self._lock:
            self._closed = True
        for worker in self.workers():
            worker.process.kill()


class Worker:
    """A process, and the memory of its own that it is charged with."""

    def __init__(self, process: WorkerProcess, charge: Callable[[int, bool], None], expected: int):
        self.process = process
        self._charge = charge
        self._charged = self.bytes = 0
        self._spent = (-1, 0.0, 0.0)
        self._starter: threading.Thread | None = None
        self._correct_charge(expected)

    def start(self) -> None:
        """Starts the process in the background. If it cannot start, the next call raises the error."""

        def start() -> None:
            with contextlib.suppress(WorkerError):
                self.process.start()

        self._starter = threading.Thread(target=start, daemon=True, name="sluice-start")
        self._starter.start()

    @property
    def is_starting(self) -> bool:
        """Whether the process is being started in the background."""
        return self._starter is not None and self._starter.is_alive()

    def call(self, arrays: Arrays, label: str, memory_limit: int | None) -> Given:
        result = self.process.call(arrays, label, memory_limit)
        self.bytes = max(self.bytes, anonymous_bytes(self.process.pid))
        self._correct_charge(max(self._charged, self.bytes))
        return result

    def spent(self) -> tuple[float, float]:
        """Returns the seconds on a core and of waiting for one, since the last call."""
        pid = self.process.pid
        if pid is None:
            return 0.0, 0.0
        cpu, waited = core_seconds(pid)
        before, self._spent = self._spent, (pid, cpu, waited)
        return (cpu - before[1], waited - before[2]) if before[0] == pid else (cpu, waited)

    def close(self) -> None:
        self.process.close()
        self._correct_charge(0)

    def _correct_charge(self, size: int) -> None:
        if size != self._charged:
            self._charge(size - self._charged, True)
            self._charged = size


class TransformWorker:
    """Applies the transform to batches, for one worker of the pool."""

    def __init__(self, stage: TransformStage):
        self._stage = stage
        self._worker: Worker | None = None
        self._in_thread = False
        self._backend = stage.backend
        """The back end for the current batch. The stage's may change meanwhile, but the batch and its copy must use the
        same one."""
        self._batch_copy: dict[str, npt.NDArray[Any]] = {}

    def __call__(self, series: BatchSeries, number: int, arrays: Arrays, where: str) -> Given:
        self._backend = self._current_backend()
        place = self._stage.matrix
        matrix = place.matrix(series, number) if place and self._backend == "thread" else None
        if place is None or matrix is None:
            return self._run(series, number, self._select_columns(arrays), where)
        given = self._run(series, number, {MATRIX: matrix}, where)
        return dict(zip(place.names, given[MATRIX].T, strict=True)) if given else None

    @property
    def quarantine(self) -> RowQuarantine | None:
        """Where bad rows go. None: an error ends the run."""
        return self._stage.quarantine if self._stage.quarantine.allowed else None

    def call_on_rows(self, rows: pa.RecordBatch, where: str) -> pa.RecordBatch:
        """Calls a function over rows, and returns the columns that it gives."""
        self._backend = self._current_backend()
        arrays: Any = {ROWS: rows if self._backend == "thread" else encode(rows)}
        try:
            for _ in range(self._stage.burden):
                given = self._call_function(arrays, where, None)
        except MemoryError:
            given = self._call_with_all_memory(arrays, arrays, where)
        assert given
        return decode(given[ROWS])

    def _run(self, series: BatchSeries, number: int, arrays: Arrays, where: str) -> Given:
        stage = self._stage
        before = self._copy_batch(arrays)
        try:
            try:
                for _ in range(stage.burden - 1):
                    self._call({name: array.copy() for name, array in arrays.items()}, where)
                return self._call(arrays, where)
            except MemoryError:
                return self._call_with_all_memory(arrays, before, where)
        except (WorkerClosed, Closed, RestartsExhausted, LoadingError):
            raise
        except (Exception, *_EXIT_ERRORS) as error:
            return _FailedBatch(stage, self._call, series, number, where).quarantine_failing_rows(
                error, before
            )

    def _current_backend(self) -> str:
        """Returns the back end for the next batch. A worker goes on in its thread until its process has started."""
        stage = self._stage
        if stage.backend == "process" and stage.worked_in_threads:
            self._worker = self._worker or stage.add_worker()
            if self._worker is None or self._worker.is_starting:
                return "thread"
        return stage.backend

    def close(self) -> None:
        if self._worker is not None:
            self._stage.end(self._worker)
            self._worker = None

    def _call_with_all_memory(self, arrays: Arrays, before: Arrays, where: str) -> Given:
        """Calls the function again with all free memory, while no other work starts."""
        for name, array in arrays.items():
            if before[name] is not array:
                np.copyto(array, before[name])
        with self._stage.run_alone() as free:
            try:
                return self._call(arrays, where, free)
            except MemoryError as error:
                raise TooLarge(
                    f"{where}: out of memory, also when tried again alone with "
                    f"{format_bytes(free)} free: {getattr(error, 'text', error)}"
                ) from error

    def _call(self, arrays: Arrays, where: str, free: int | None = None) -> Given:
        given = self._call_function(arrays, where, free)
        if self._stage.matrix is not None:
            self._stage.matrix.check_result(given, arrays, where)
        return given

    def _call_function(self, arrays: Arrays, where: str, free: int | None) -> Given:
        stage = self._stage
        if stage.hidden:
            arrays = {name: array for name, array in arrays.items() if name not in stage.hidden}
        if self._backend == "thread":
            if stage.backend == "thread":
                self.close()
            if not self._in_thread:
                _use_one_thread()
                self._in_thread = stage.worked_in_threads = True
            given: Given = protocol.call_function(
                stage.function, visible_columns(stage.transform, arrays)
            )
            return given
        if self._backend == REMOTE:
            with contextlib.suppress(NoWorkerAnswers):
                found = stage.call_remotely(arrays, where)
                self.close()
                return found
        if self._worker is None:
            self._worker = stage.worker()
        try:
            limit = stage.transform.memory_limit
            return self._worker.call(arrays, where, limit and free and max(limit, free))
        finally:
            stage.process_bytes = max(stage.process_bytes, self._worker.bytes)
            stage.spent(*self._worker.spent())

    def _select_columns(self, arrays: Arrays) -> Arrays:
        """Returns the function's columns, in the order in which they are named."""
        stage = self._stage
        names = stage.matrix.names if stage.matrix else stage.transform.reads
        if not names:
            return arrays
        missing = [name for name in names if name not in arrays]
        if missing:
            raise TransformError(
                f"transform {stage.transform.name!r}: the table has no columns {missing}"
            )
        wanted = (
            of for name in (*names, *stage.transform.added) for of in (name, lengths_name(name))
        )
        return {name: arrays[name] for name in wanted if name in arrays}

    def _copy_batch(self, arrays: Arrays) -> Arrays:
        """Copies the batch, because a function in a thread may write into it and then fail."""
        transform = self._stage.transform
        if self._backend != "thread" or transform.pure:
            return arrays
        found = dict(arrays)
        for name, array in arrays.items():
            if (
                transform.outputs
                and name != MATRIX
                and name.removesuffix(".lengths") not in transform.outputs
            ):
                continue  # the function cannot write there
            copy = self._batch_copy.get(name)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = self._batch_copy[name] = np.empty_like(array)
            np.copyto(copy, array)
            found[name] = copy
        return found


class _FailedBatch:
    """A batch on which a function failed. It keeps the good rows and quarantines the others."""

    def __init__(
        self,
        stage: TransformStage,
        call: Callable[[Arrays, str], Given],
        series: BatchSeries,
        number: int,
        where: str,
    ):
        self._stage = stage
        self._call = call
        self._series = series
        self._number = number
        self._where = where
        self._attempted = 0

    def quarantine_failing_rows(self, error: BaseException, arrays: Arrays) -> Given:
        """Returns the batch with the failing rows quarantined, or raises QuarantineError."""
        rows = self._series.floats.shape[2]
        if isinstance(error, WorkerCrashed) or PROGRAM_ERRORS.intersection(kinds_of(error)):
            self._quarantine(error, range(rows))
            return self._join_rows(arrays, [], list(range(rows)))
        try:
            good, failed = isolate(
                lambda start, stop: self._attempt(arrays, start, stop),
                rows,
                rows if self._stage.quarantine.allowed else 0,
            )
        except (Exception, *_EXIT_ERRORS) as first:
            self._quarantine(first, [self._attempted])
            raise
        if not failed:  # no single row causes the error
            raise error
        by_error: dict[str, list[tuple[int, Exception]]] = {}
        for row, row_error in failed:
            by_error.setdefault(repr(row_error), []).append((row, row_error))
        for same in by_error.values():
            self._quarantine(same[0][1], [row for row, _ in same])
        return self._join_rows(arrays, good, [row for row, _ in failed])

    def _quarantine(self, error: BaseException, rows: Any) -> None:
        """Quarantines rows, except padding rows and rows that already have weight 0."""
        weights = weights_of(self._series, self._number, self._stage.columns)
        self._stage.quarantine.quarantine_rows(
            error,
            f"transform {self._stage.transform.name!r}",
            self._series.schedule.epoch,
            self._series.step + self._number,
            [row for row in rows if weights[row]],
        )

    def _attempt(self, arrays: Arrays, start: int, stop: int) -> Arrays:
        self._attempted = start
        part = self._rows(arrays, start, stop)
        return {**part, **(self._call(part, f"{self._where}, rows {start} to {stop}") or {})}

    def _rows(self, arrays: Arrays, start: int, stop: int) -> Arrays:
        """Copies some rows."""
        part = {}
        for name, array in arrays.items():
            low, high = start, stop
            if name in self._stage.columns.bags:
                ends = np.concatenate(([0], np.cumsum(arrays[lengths_name(name)])))
                low, high = int(ends[start]), int(ends[stop])
            part[name] = array[low:high].copy()
        return part

    def _join_rows(
        self, arrays: Arrays, good: list[tuple[int, int, Arrays]], bad: list[int]
    ) -> Arrays:
        """Joins the results of the good rows with the unchanged bad rows, which get weight 0."""
        parts = sorted(
            [*good, *((row, row + 1, self._rows(arrays, row, row + 1)) for row in bad)],
            key=lambda part: part[0],
        )
        joined = {
            name: np.concatenate([np.asarray(part[name]) for _, _, part in parts])
            for name in arrays
        }
        weights_of(self._series, self._number, self._stage.columns)[bad] = 0
        if self._stage.columns.weight in joined:
            joined[self._stage.columns.weight][bad] = 0
        return joined


_TORCH_THREADS = threading.Lock()


def _use_one_thread() -> None:
    """Makes torch compute only in the calling thread, as in a worker process. The pool's size decides how many cores a
    stage uses. Torch's own threads would wait for each other if other stages use their cores."""
    with _TORCH_THREADS:
        threads = torch.get_num_threads()
        if threads > 1:
            torch.set_num_threads(1)
            # This also sets the default for new threads. Another thread restores that default.
            others = threading.Thread(
                target=torch.set_num_threads, args=(threads,), name="sluice-torch"
            )
            others.start()
            others.join()


def function_of(transform: Transform) -> Function:
    """Returns the function itself. Imports it if it is given by name."""
    if not isinstance(transform.function, str):
        return transform.function
    try:
        return load(transform.function)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise TransformError(
            f"transform {transform.name!r}: {transform.function}: {type(error).__name__}: {error}"
        ) from error


def anonymous_bytes(pid: int | None) -> int:
    """Returns the bytes of a process's own memory. 0: it has ended."""
    if pid is None:  # psutil would use this process
        return 0
    try:
        sizes = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(sizes.rss - sizes.shared)


def core_seconds(pid: int) -> tuple[float, float]:
    """Returns the seconds on a core and of waiting for one since a process's start. Zeros if it has ended, or if the
    kernel does not count them. psutil does not read the time of waiting for a core."""
    try:
        with open(f"/proc/{pid}/schedstat") as text:
            cpu, waited, *_ = text.read().split()
            return int(cpu) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0
