"""The set of workers that a loader can ask: `Fleet` for workers at given addresses, `StartedFleet` for workers that the
loader starts itself."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from sluice.common import interpreter
from sluice.ingest.errors import warn
from sluice.ingest.knobs import REQUESTS_A_CORE
from sluice.ingest.machine import WORKER_PROCESS_BYTES
from sluice.ingest.process.worker import anonymous_bytes
from sluice.ingest.remote.connection import Connection
from sluice.ingest.remote.messages import RemoteError
from sluice.ingest.remote.unit import RemoteJob

_PROGRAM = "sluice.ingest.remote.worker:local"
_FAILED_STARTS = 3  # processes in a row that may end before they listen
_LEAVE_S = 5.0
_REST_MOST_S = 30.0


class RunningWorker(contextlib.AbstractContextManager[Any], Protocol):
    """A local or remote process with the interface of `subprocess.Popen`."""

    stdout: Any

    def wait(self) -> int: ...

    def kill(self) -> None: ...


@dataclass(eq=False)
class RemoteWorker:
    """One worker and the state of its requests."""

    connection: Connection
    process: RunningWorker | None = None
    pid: int = 0
    threads: int = 0
    """How many units it makes at once. 0: not known yet."""
    asked: int = 0
    """The requests that it has not answered yet."""
    leaving: bool = False
    answered: bool = False
    """Whether it has answered since it was last lost."""
    lost: str = ""
    """Why it was lost. Empty: it answers. Other workers are asked until it answers a ping."""
    heard: float = float("-inf")
    """When it last answered."""
    pinged: bool = False
    silent: int = 0
    """Unanswered pings in a row. Above 0, other workers are asked instead."""
    bytes: int = 0
    """The memory that it is charged with on this host."""

    @property
    def is_there(self) -> bool:
        return not (self.silent or self.lost)


class Fleet:
    """Workers that somebody else has started. `changed` is notified when a worker may be free, or at the end."""

    def __init__(
        self, connections: Sequence[Connection] = (), *, clock: Callable[[], float] = time.monotonic
    ):
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.workers = [RemoteWorker(connection) for connection in connections]
        self.requests = REQUESTS_A_CORE * len(self.workers)
        """How many units may be requested at once at the start."""
        self.error: BaseException | None = None
        """Why no more workers will start."""
        self.last_lost = ""
        self.starting = 0
        self.closed = False
        self._reads = False
        self._core_s = 0.0
        self._counted_at = clock()
        self._clock = clock
        self.charge: Callable[[int], None] = lambda _: None
        self.scale: dict[str, float] = {}
        """For fleets that start their own workers: requests a core, and the seconds that a worker takes to start."""

    def use(self, requests: int) -> None:
        """Announces how many units will be requested at once."""

    def core_s(self) -> float:
        """Returns the cost of all workers so far: cores held, busy or idle, times seconds. Call it with the lock held,
        and before the number of workers changes."""
        now = self._clock()
        self._core_s += sum(max(1, worker.threads) for worker in self.workers) * (
            now - self._counted_at
        )
        self._counted_at = now
        return self._core_s

    def report_lost(self, why: str) -> None:
        """Prints a line that a worker is lost."""
        self.last_lost = why
        if not self.closed:
            warn(f"{why}; other workers get its requests")

    @property
    def why_none_answers(self) -> str:
        """Why no worker answers, for messages."""
        return self.last_lost or "none has answered yet"

    def lease(
        self, others_than: Collection[RemoteWorker], reads: bool = False
    ) -> RemoteWorker | None:
        """Returns the least busy worker for one more request, or None if none is free. If several are equally busy, it
        is the one that answered longest ago. `reads`: the request is a read, so workers that start later open the
        table. Call it with the lock held."""
        now = self._clock()
        free = [w for w in self.workers if w.is_there and not w.leaving and w not in others_than]
        worker = min(free, default=None, key=lambda w: (w.asked / max(1, w.threads), w.heard))
        self._reads = self._reads or reads
        if worker is not None:
            if not worker.asked:
                worker.heard = now
            worker.asked += 1
        return worker

    def give_back(self, worker: RemoteWorker, lost: str = "") -> None:
        """Ends a lease. `lost` is the reason if the worker did not answer."""
        with self.lock:
            worker.asked -= 1
            if not lost:
                worker.heard = self._clock()
                worker.answered = True
                worker.lost = ""
            else:
                if not worker.lost:
                    self.report_lost(lost)
                worker.lost = lost
                worker.answered = False
            self.changed.notify_all()

    @property
    def here(self) -> dict[int, RemoteWorker]:
        """The workers that are processes of this host, by process id."""
        return {}

    def measure_memory(self) -> None:
        """Charges each worker of this host with the most memory that it was seen to use. Call it without the lock,
        because the pipeline's account has a lock of its own."""
        for pid, worker in self.here.items():
            size = max(WORKER_PROCESS_BYTES, anonymous_bytes(pid))
            with self.lock:
                more = max(0, size - worker.bytes) if worker in self.workers else 0
                worker.bytes += more
            if more:
                self.charge(more)

    def close(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.connection.close()


@dataclass(eq=False)
class StartedFleet(Fleet):
    """Worker processes that the loader starts, each with one core. They are started when needed, replaced when they
    die, and end with the loader."""

    start: Callable[[dict[str, Any]], RunningWorker]
    job: RemoteJob
    table: str | list[str]
    """The feature table or the files that each worker opens."""
    functions: list[str]
    """The functions that workers may call."""
    _: KW_ONLY
    most: int
    """How many workers may run."""
    first: int
    """How many run at the start."""
    at_once: int
    """How many may start at the same time, because each takes a core to start."""
    local: bool
    """Whether they are processes of this host. If they cannot start, the run ends. Others are tried again."""
    leave: Callable[[], None] = lambda: None
    """Called at the end."""

    def __post_init__(self) -> None:
        super().__init__()
        self.requests = REQUESTS_A_CORE * self.first
        self._processes: dict[threading.Thread, RunningWorker | None] = {}
        self._failed = self._target = 0
        self.scale = {"requests_a_core": REQUESTS_A_CORE}

    @property
    def here(self) -> dict[int, RemoteWorker]:
        with self.lock:
            return {w.pid: w for w in self.workers if self.local}

    def use(self, requests: int) -> None:
        """Announces how many units will be requested at once. If fewer workers are needed, the least busy ones leave
        after they have answered."""
        with self.lock:
            self._target = min(self.most, -(-requests // REQUESTS_A_CORE))
            staying = sorted((w for w in self.workers if not w.leaving), key=lambda w: -w.asked)
            for worker in staying[max(0, self._target - self.starting) :]:
                worker.leaving = True
                self._end_if_idle(worker)
            self._start_missing()
            self.changed.notify_all()

    def give_back(self, worker: RemoteWorker, lost: str = "") -> None:
        with self.lock:
            super().give_back(worker, lost)
            worker.leaving = worker.leaving or bool(lost)  # it may hang, so it is replaced
            self._end_if_idle(worker)

    def close(self) -> None:
        with self.lock:
            self.closed, self._target = True, 0
            for process in self._processes.values():
                if process is not None:
                    process.kill()
            self.changed.notify_all()
            threads = self._processes.keys() - {threading.current_thread()}
        end = time.monotonic() + _LEAVE_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        self.leave()

    @property
    def why_none_answers(self) -> str:
        waiting = (
            f"{self.starting} are starting"
            if self.local
            else f"{self.starting} wait for a free core of the Ray cluster; `ray status` shows what it has"
        )
        return "; ".join(
            [*([waiting] if self.starting else []), *([self.last_lost] if self.last_lost else [])]
        )

    def _start_missing(self) -> None:
        """Starts missing workers. A thread follows each from start to end. Call it with the lock held."""
        while (
            not self.closed
            and self.error is None
            and self.starting < self.at_once
            and self.starting + sum(not w.leaving for w in self.workers) < self._target
        ):
            self.starting += 1
            thread = threading.Thread(
                target=self._run_worker, daemon=True, name="sluice-remote-worker"
            )
            self._processes[thread] = None
            thread.start()

    def _run_worker(self) -> None:
        """Runs one worker from its start to its end."""
        worker = None
        token = secrets.token_hex(16)
        me = threading.current_thread()
        began = self._clock()
        try:
            with self.lock:
                if self._failed and not self.local:  # earlier workers could not start
                    wait_s = min(_REST_MOST_S, 2.0**self._failed)
                    self.changed.wait_for(lambda: self.closed, wait_s)
                job = self.job.values if self._reads else None
            with self.start(
                {"table": self.table, "functions": self.functions, "token": token, "job": job}
            ) as process:
                with self.lock:
                    self._processes[me] = process
                    if self.closed:
                        process.kill()
                line = process.stdout.readline().strip()
                with self.lock:
                    if line:
                        self.core_s()
                        told = json.loads(line)
                        address, pid = str(told["listening"]), int(told["pid"])
                        if ":" not in address:
                            raise ValueError(f"{address!r} is not HOST:PORT")
                        worker = RemoteWorker(
                            Connection(address, token),
                            process,
                            pid,
                            threads=1,
                            answered=True,
                        )
                        self.workers.append(worker)
                        self._failed, self.starting = 0, self.starting - 1
                        took = self._clock() - began
                        self.scale["start_s"] = took + 0.75 * (
                            self.scale.get("start_s", took) - took
                        )
                        self._start_missing()
                        self.changed.notify_all()
                self.measure_memory()
                code = process.wait()
            why = f"a worker process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        except Exception as error:  # also a line that is no announcement
            why = f"a worker process could not be started: {type(error).__name__}: {error}"
        with self.lock:
            self._processes.pop(me)
            self._note_end(worker, why)
        if worker is not None:
            worker.connection.close()
            self.charge(-worker.bytes)

    def _note_end(self, worker: RemoteWorker | None, why: str) -> None:
        if worker is not None:
            self.core_s()
            self.workers.remove(worker)
        else:
            self._failed, self.starting = self._failed + 1, self.starting - 1
        if not self.closed and (worker is None or not worker.leaving or worker.lost):
            if why != self.last_lost if worker is None else not worker.lost:
                self.report_lost(why)
            if self._failed >= _FAILED_STARTS and self.local:
                self.error = RemoteError(
                    f"{_FAILED_STARTS} worker processes in a row could not start; the last: "
                    f"{why}. Standard error has its reason"
                )
        self._start_missing()
        self.changed.notify_all()

    @staticmethod
    def _end_if_idle(worker: RemoteWorker) -> None:
        if worker.leaving and worker.process is not None and (worker.lost or not worker.asked):
            worker.process.kill()


def started(given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts a worker process. It prints its address on standard output, and ends when its input is closed."""
    process = subprocess.Popen(
        interpreter.command(_PROGRAM, os.getpid()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdin is not None
    # This fails if the process has ended. Reading its output shows that.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
    return process
