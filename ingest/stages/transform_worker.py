"""Where a transform's function runs: `TransformStage` has its processes, and `TransformWorker` calls it.

The workers of a pool share the stage. A `TransformWorker` calls the function in its own thread, in a process that it
owns, or on remote workers, as the knob says at that moment. So the back end can change between two items, while the
pool and its order stay.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from sluice.ingest.columns import column_of
from sluice.ingest.errors import Closed, NoWorkerAnswers
from sluice.ingest.knobs import REMOTE, format_bytes
from sluice.ingest.machine import WORKER_PROCESS_BYTES
from sluice.ingest.memory.governor import Governor
from sluice.ingest.process import protocol
from sluice.ingest.process.child_main import new_columns
from sluice.ingest.process.protocol import ROWS
from sluice.ingest.process.row_call import decode_result, encode
from sluice.ingest.process.worker import SlowStart, WorkerError, WorkerProcess
from sluice.ingest.stages.counters import StageCounters
from sluice.ingest.stages.transform import (
    Arrays,
    Given,
    Transform,
    function_of,
    visible_columns,
)

if TYPE_CHECKING:
    from sluice.ingest.remote.client import RemoteClient


@dataclass(eq=False)
class TransformStage:
    """One transform in one run of a pipeline, and its processes. The workers of its pool share it."""

    transform: Transform
    backend: str
    counters: StageCounters
    governor: Governor
    restarted: Callable[[], None]
    """Called when a process replaces one that died."""
    leave_processes: Callable[[str, SlowStart], None]
    """Called with the transform's name when a process took too long to start, so that threads go on."""
    running: Mapping[str, Sequence[TransformStage]]
    """All stages of the pipeline's run. Their processes share its memory."""
    remote: RemoteClient | None = None
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
        self._workers: dict[WorkerProcess, None] = {}  # in the order of their start
        self._closed = False

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
    """Calls the function, for one worker of the pool."""

    def __init__(self, stage: TransformStage):
        self.stage = stage
        self._worker: WorkerProcess | None = None
        self._in_thread = False
        self._backend = stage.backend

    def prepare(self) -> None:
        """Starts the process before the first item, which would wait for it and seem dear. What fails here fails again
        in a call, which reports it."""
        stage = self.stage
        if stage.backend != "process" or stage.slow_start is not None:
            return
        with contextlib.suppress(WorkerError, OSError):
            if stage.worked_in_threads:
                self._worker = stage.start_worker()
                if self._worker is not None:
                    self._worker.wait_for_start()
            else:
                self._worker = stage.new_worker()
                self._worker.start()

    def choose_backend(self) -> str:
        """Chooses the back end for the calls up to the next choice. The stage's may change meanwhile, but a batch and
        its copy must use the same one. A worker goes on in its thread until its process has started."""
        stage = self.stage
        self._backend = stage.backend
        if self._backend == "process" and stage.worked_in_threads and not self._has_process():
            self._backend = "thread"
        return self._backend

    def call_on_rows(self, rows: pa.RecordBatch, where: str) -> pa.RecordBatch:
        """Calls a function over rows, and returns the columns that it gives."""
        arrays: Any = {ROWS: rows if self.choose_backend() == "thread" else encode(rows)}
        given = self.call_as_often(arrays, arrays, where)
        assert given
        return decode_result(given, rows)

    def call_as_often(self, arrays: Arrays, before: Arrays, where: str) -> Given:
        """Calls the function as often as the stage's burden says. If memory runs out, calls it again with all free
        memory, while no other work starts. `before` holds the arrays as they were."""
        try:
            for _ in range(self.stage.burden - 1):
                self.call({name: copy(array) for name, array in arrays.items()}, where)
            return self.call(arrays, where)
        except MemoryError:
            for name, array in arrays.items():
                if before[name] is not array:
                    np.copyto(array, before[name])
        with self.stage.governor.run_alone() as free:
            try:
                return self.call(arrays, where)
            except MemoryError as error:
                raise MemoryError(
                    f"{where}: out of memory, also when tried again alone with "
                    f"{format_bytes(free)} free: {getattr(error, 'text', error)}"
                ) from error

    def _has_process(self) -> bool:
        """Whether its process has started. Starts one in the background if there is memory for it."""
        stage = self.stage
        worker = self._worker = self._worker or stage.start_worker()
        if worker is None or worker.is_starting:
            return False
        if worker.too_large:
            # Another one starts only if more memory is free than now, whatever was seen of this one.
            stage.process_bytes = max(stage.process_bytes, worker.bytes, stage.governor.free)
            self.close()
            return False
        return True

    def close(self) -> None:
        if self._worker is not None:
            self.stage.end(self._worker)
            self._worker = None

    def call(self, arrays: Arrays, where: str) -> Given:
        stage, function = self.stage, self.stage.transform.function
        if stage.transform.added:  # the function does not get the columns that it must add
            arrays = {
                name: array
                for name, array in arrays.items()
                if column_of(name) not in stage.transform.added
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
