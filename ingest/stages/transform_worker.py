"""Runs a transform's function: `TransformStage` is shared, and each worker of the pool has a `TransformWorker`.

A `TransformWorker` calls the function in its own thread, in a process that it owns, or on remote workers, as the
knob says at that moment. So the back end can change between two items, while the pool and its order stay. Rows on
which the function fails are found by halving the batch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sluice.ingest.choices import PROGRAM_ERRORS
from sluice.ingest.columns import Columns
from sluice.ingest.errors import Closed, LoadingError, NoWorkerAnswers
from sluice.ingest.knobs import REMOTE, format_bytes
from sluice.ingest.machine import WORKER_PROCESS_BYTES
from sluice.ingest.memory.governor import Governor
from sluice.ingest.process import protocol
from sluice.ingest.process.child_main import load, new_columns
from sluice.ingest.process.matrix_function import MATRIX, MatrixFunction, by_column
from sluice.ingest.process.protocol import ROWS
from sluice.ingest.process.row_call import decode_result, encode
from sluice.ingest.process.worker import (
    SlowStart,
    WorkerCrashed,
    WorkerProcess,
)
from sluice.ingest.stages.batch import BatchSeries, lengths_name
from sluice.ingest.stages.counters import StageCounters
from sluice.ingest.stages.quarantine import Quarantine, isolate, kinds_of
from sluice.ingest.stages.transform import (
    Arrays,
    Function,
    Given,
    Transform,
    TransformError,
    visible_columns,
)

if TYPE_CHECKING:
    from sluice.ingest.remote.asking import Asking

_LENGTHS = lengths_name("")


@dataclass(eq=False)
class TransformStage:
    """One transform in one run of a pipeline. The workers of its pool share it."""

    transform: Transform
    columns: Columns
    quarantine: Quarantine
    backend: str
    counters: StageCounters
    governor: Governor
    restarted: Callable[[], None]
    """Called when a process replaces one that died."""
    leave_processes: Callable[[str, SlowStart], None]
    """Called with the transform's name when a process took too long to start, so that threads go on."""
    running: Mapping[str, Sequence[TransformStage]]
    """All stages of the pipeline's run. Their processes share its memory."""
    remote: Asking | None = None
    """Remote workers that can also call the function."""
    burden: int = 1
    """How often the function runs for each batch. All calls but the last work on a copy."""
    worked_in_threads: bool = False
    """Whether its function has run in a thread, so that a worker without a process may go on in its thread."""
    slow_start: SlowStart | None = None
    """Why it runs no processes any more."""
    process_bytes: int = 0
    """The most memory of its own that one of the processes was seen to use. If one was killed while it started, at
    least what was free after that: it may have needed all of it."""

    def __post_init__(self) -> None:
        self.function = function_of(self.transform)
        self.names = self.transform.reads
        """The columns that the function gets. Empty: all."""
        self.matrix = slice(0)
        """The columns among all floats that a function over a matrix gets where they lie."""
        if isinstance(self.function, MatrixFunction):
            names = self.names = self.names or self.columns.dense
            floats, outputs = self.columns.floats, self.transform.outputs
            writable = (
                not outputs or outputs.keys() >= {*names}
            ) and self.columns.weight not in names
            for first in range(len(floats) * writable):
                if floats[first : first + len(names)] == names:
                    self.matrix = slice(first, first + len(names))
        self._workers: dict[WorkerProcess, None] = {}  # in the order of their start
        self._closed = False

    @property
    def cardinalities(self) -> dict[str, int]:
        """The known cardinalities of the columns that the function gets."""
        known = self.columns.cardinalities
        return {name: known[name] for name in self.names or known if name in known}

    def new_worker(self) -> WorkerProcess:
        """Makes a worker, whose first call starts its process."""
        assert isinstance(self.transform.function, str)
        with self.governor.lock:
            if self._closed:
                raise Closed
            worker = WorkerProcess(
                self.transform.function,
                limit_s=self.transform.limit_s,
                restarted=self.restarted,
                charge=self.governor.hold,
                expected_bytes=self.process_bytes or WORKER_PROCESS_BYTES,
            )
            self._workers[worker] = None
        return worker

    def start_worker(self) -> WorkerProcess | None:
        """Starts another process in the background. None: too little memory is free for it now."""
        with self.governor.lock:  # two stages must not take the same bytes
            free = self.governor.free
            if not self._has_room():
                return None
            worker = self.new_worker()
        worker.start_in_background(free)
        return worker

    def _has_room(self) -> bool:
        """Returns whether another process may start.

        The very first process may, because none was measured. It is ended if it does not fit. The first one of each
        other stage needs free memory for one, and is taken to be as large as the largest that was measured. Any other,
        and any of a measured stage, needs free memory for two. Until one of its stage was measured, it is taken to be
        as large as this program was before it loaded anything."""
        stages = list(itertools.chain(*self.running.values()))
        program_bytes = self.governor.base
        if not any(stage.workers() or stage.process_bytes for stage in stages):
            return True
        unmeasured = sum(len(stage.workers()) for stage in stages if not stage.process_bytes)
        free = self.governor.free - unmeasured * program_bytes
        if self._workers or self.process_bytes:
            return free >= 2 * (self.process_bytes or program_bytes)
        largest = max(stage.process_bytes for stage in stages)
        return free >= (largest or program_bytes)

    @property
    def starting(self) -> int:
        """The workers whose process has not started yet."""
        return sum(worker.is_starting for worker in self.workers())

    def end(self, worker: WorkerProcess) -> None:
        """Ends one process."""
        worker.close()
        with self.governor.lock:
            self._workers.pop(worker, None)

    def workers(self) -> list[WorkerProcess]:
        with self.governor.lock:
            return list(self._workers)

    def close(self) -> None:
        """Ends the processes, even in the middle of an item."""
        with self.governor.lock:
            self._closed = True
        for worker in self.workers():
            worker.kill()


class TransformWorker:
    """Applies the transform to batches, for one worker of the pool."""

    def __init__(self, stage: TransformStage):
        self.stage = stage
        self._worker: WorkerProcess | None = None
        self._in_thread = False
        self._backend = stage.backend
        """The back end for the current batch. The stage's may change meanwhile, but the batch and its copy must use the
        same one."""
        self._batch_copy: Arrays = {}

    def __call__(self, series: BatchSeries, number: int, arrays: Arrays, where: str) -> Given:
        self._backend = self._current_backend()
        own = self.stage.matrix
        in_place = bool(own.stop) and self._backend == "thread"
        arrays = (
            {MATRIX: series.floats[number, own].T} if in_place else self._select_columns(arrays)
        )
        before = self._copy_batch(arrays)
        try:
            given = self._call_as_often(arrays, before, where)
        except (Closed, LoadingError):
            raise
        except BaseException as error:  # also sys.exit() in the function
            given = self._quarantine_failing_rows(error, series, number, before, where)
        return by_column(self.stage.names, given[MATRIX]) if in_place and given else given

    def call_on_rows(self, rows: pa.RecordBatch, where: str) -> pa.RecordBatch:
        """Calls a function over rows, and returns the columns that it gives."""
        self._backend = self._current_backend()
        arrays: Any = {ROWS: rows if self._backend == "thread" else encode(rows)}
        given = self._call_as_often(arrays, arrays, where)
        assert given
        return decode_result(given, rows)

    def _call_as_often(self, arrays: Arrays, before: Arrays, where: str) -> Given:
        """Calls the function as often as the stage's burden says. If memory runs out, calls it again with all free
        memory, while no other work starts. `before` holds the arrays as they were."""
        try:
            for _ in range(self.stage.burden - 1):
                self._call({name: copy(array) for name, array in arrays.items()}, where)
            return self._call(arrays, where)
        except MemoryError:
            for name, array in arrays.items():
                if before[name] is not array:
                    np.copyto(array, before[name])
        with self.stage.governor.run_alone() as free:
            try:
                return self._call(arrays, where)
            except MemoryError as error:
                raise MemoryError(
                    f"{where}: out of memory, also when tried again alone with "
                    f"{format_bytes(free)} free: {getattr(error, 'text', error)}"
                ) from error

    def _current_backend(self) -> str:
        """Returns the back end for the next batch. A worker goes on in its thread until its process has started."""
        stage = self.stage
        if stage.backend == "process" and stage.worked_in_threads:
            self._worker = self._worker or stage.start_worker()
            if self._worker is None or self._worker.is_starting:
                return "thread"
            if self._worker.too_large:
                # Another one starts only if more memory is free than now, whatever was seen of this one.
                stage.process_bytes = max(
                    stage.process_bytes, self._worker.bytes, stage.governor.free
                )
                self.close()
                return "thread"
        return stage.backend

    def close(self) -> None:
        if self._worker is not None:
            self.stage.end(self._worker)
            self._worker = None

    def _call(self, arrays: Arrays, where: str) -> Given:
        stage, function = self.stage, self.stage.transform.function
        if stage.transform.added:  # the function does not get the columns that it must add
            arrays = {
                name: array
                for name, array in arrays.items()
                if name.removesuffix(_LENGTHS) not in stage.transform.added
            }
        if self._backend == "thread":
            if stage.backend == "thread":
                self.close()
            self._enter_thread()
            visible = visible_columns(stage.transform, arrays)
            given: Given = protocol.call_function(stage.function, visible)
            return given
        if self._backend == REMOTE and stage.remote is not None:
            size = 2 * sum(array.nbytes for array in arrays.values())  # sent and received
            stage.governor.hold(size)
            try:
                answer = stage.remote.call(str(function), arrays, where)
                self.close()
                return answer
            except NoWorkerAnswers:
                pass
            finally:
                stage.governor.hold(-size)
        try:
            return self._call_in_process(arrays, where)
        except SlowStart as slow:
            stage.leave_processes(stage.transform.name, slow)
        self._enter_thread()
        copies = {name: array.copy() for name, array in arrays.items()}
        return {**copies, **new_columns(stage.function, copies)}

    def _enter_thread(self) -> None:
        if not self._in_thread:
            _use_one_thread()
            self._in_thread = self.stage.worked_in_threads = True

    def _call_in_process(self, arrays: Arrays, where: str) -> Arrays:
        """Returns all columns, as a process left or returned them."""
        stage = self.stage
        if stage.slow_start is not None:
            raise stage.slow_start
        worker = self._worker = self._worker or stage.new_worker()
        try:
            return worker.call(arrays, where)
        finally:
            stage.process_bytes = max(stage.process_bytes, worker.bytes)
            cpu_s, core_wait_s = worker.spent()
            with stage.governor.lock:
                stage.counters.cpu_s += cpu_s
                stage.counters.core_wait_s += core_wait_s

    def _select_columns(self, arrays: Arrays) -> Arrays:
        """Returns the function's columns, in the order in which they are named."""
        stage = self.stage
        if not stage.names:
            return arrays
        missing = [name for name in stage.names if name not in arrays]
        if missing:
            raise TransformError(
                f"transform {stage.transform.name!r}: the table has no columns {missing}"
            )
        wanted = (
            part
            for name in (*stage.names, *stage.transform.added)
            for part in (name, lengths_name(name))
        )
        return {name: arrays[name] for name in wanted if name in arrays}

    def _copy_batch(self, arrays: Arrays) -> Arrays:
        """Copies the batch, because a function in a thread may write into it and then fail."""
        transform = self.stage.transform
        if self._backend != "thread" or transform.pure:
            return arrays
        copies = dict(arrays)
        for name, array in arrays.items():
            if (
                transform.outputs
                and name != MATRIX
                and name.removesuffix(_LENGTHS) not in transform.outputs
            ):
                continue  # the function cannot write there
            copy = self._batch_copy.get(name)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = self._batch_copy[name] = np.empty_like(array)
            np.copyto(copy, array)
            copies[name] = copy
        return copies

    def _quarantine_failing_rows(
        self, error: BaseException, series: BatchSeries, number: int, arrays: Arrays, where: str
    ) -> Given:
        """Returns the batch with weight 0 for the rows on which the function fails, which stay as they were. Raises
        QuarantineError if they may not be quarantined."""
        stage, rows = self.stage, series.floats.shape[2]
        weights = series.weights[number]
        attempted = 0

        def quarantine(error: BaseException, rows: Iterable[int]) -> None:
            stage.quarantine.quarantine_rows(
                error,
                f"transform {stage.transform.name!r}",
                series.schedule.epoch,
                series.step + number,
                [row for row in rows if weights[row]],  # no padding rows, and none twice
            )

        def attempt(start: int, stop: int) -> Arrays:
            nonlocal attempted
            attempted = start
            part = self._rows(arrays, start, stop)
            given = self._call(part, f"{where}, rows {start} to {stop}") or {}
            # Copies, because the next call may overwrite a result.
            return {**part, **{name: np.array(array) for name, array in given.items()}}

        if isinstance(error, WorkerCrashed) or PROGRAM_ERRORS.intersection(kinds_of(error)):
            quarantine(error, range(rows))
            return self._join_rows(arrays, [], range(rows), weights)
        try:
            good, failed = isolate(attempt, rows, rows if stage.quarantine.allowed else 0)
        except Closed:
            raise
        except BaseException as first:
            quarantine(first, [attempted])
            raise
        if not failed:  # no single row causes the error
            raise error
        by_error: dict[str, list[tuple[int, Exception]]] = {}
        for row, row_error in failed:
            by_error.setdefault(repr(row_error), []).append((row, row_error))
        for same in by_error.values():
            quarantine(same[0][1], [row for row, _ in same])
        return self._join_rows(arrays, good, [row for row, _ in failed], weights)

    def _join_rows(
        self,
        arrays: Arrays,
        good: Sequence[tuple[int, int, Arrays]],
        bad: Sequence[int],
        weights: npt.NDArray[Any],
    ) -> Arrays:
        """Joins the results of the good rows with the unchanged bad rows, which get weight 0."""
        parts = {start: part for start, _, part in good}
        parts |= {row: self._rows(arrays, row, row + 1) for row in bad}
        joined = {
            name: np.concatenate([np.asarray(parts[start][name]) for start in sorted(parts)])
            for name in arrays
        }
        weights[list(bad)] = 0
        if self.stage.columns.weight in joined:
            joined[self.stage.columns.weight][list(bad)] = 0
        return joined

    def _rows(self, arrays: Arrays, start: int, stop: int) -> Arrays:
        """Copies some rows."""
        part = {}
        for name, array in arrays.items():
            low, high = start, stop
            if name in self.stage.columns.bags:
                ends = np.concatenate(([0], np.cumsum(arrays[lengths_name(name)])))
                low, high = int(ends[start]), int(ends[stop])
            part[name] = array[low:high].copy()
        return part


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
