"""Which workers there are: `Fleet`, those of other hosts by their addresses; `LocalFleet`, processes of this one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sluice.etl.common import interpreter
from sluice.ingest.machine import WORKER_PROCESS_BYTES
from sluice.ingest.process.worker import RestartBudget, RestartsExhausted
from sluice.ingest.remote.client import Connection
from sluice.ingest.remote.unit import RemoteError, RemoteJob
from sluice.ingest.stages.transform_worker import anonymous_bytes

_PROGRAM = "sluice.ingest.remote.worker:local"
_REST_S = 1.0  # how long a worker that could not be reached is left alone
_FAILED_STARTS = 3  # processes in a row that end before they listen
_LEAVE_S = 5.0


@dataclass(eq=False)
class RemoteWorker:
    """One worker, and what it was asked for and has not answered yet."""

    connection: Connection
    process: subprocess.Popen[bytes] | None = None
    asked: int = 0
    rests_until: float = float("-inf")
    leaving: bool = False
    answered: bool = False
    """Since it was last lost."""
    lost: str = ""
    heard: float = float("-inf")
    """When it was last known to be there."""
    pinged: bool = False
    silent: int = 0
    """How many pings it has not answered, since it did: others are asked instead, until it does."""
    bytes: int = 0
    """What it is charged with on this host."""

    @property
    def load(self) -> float:
        return self.asked / self.connection.threads

    @property
    def is_there(self) -> bool:
        return not (self.silent or self.lost)


class Fleet:
    """Workers that others have started. `changed` is notified when one may be free, or all waiting shall end."""

    slack = 1.0
    """How much busier a worker may be that other loaders ask for the same."""

    def __init__(self, connections: Sequence[Connection] = (), *, clock: Callable[[], float] = time.monotonic):
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.workers = [RemoteWorker(one) for one in connections]
        self.error: BaseException | None = None
        """Why there will be no workers any more."""
        self.last_lost = ""
        self.starting, self.closed, self.reads = 0, False, False
        self._core_s, self._counted_at = 0.0, clock()
        self.charge: Callable[[int], None] = lambda _: None
        self._clock = clock

    @property
    def requests(self) -> int:
        """How many units may be asked for at once to begin with: one is made while another is on its way."""
        return 2 * len(self.workers)

    def use(self, requests: int) -> None:
        """Says how many units will be asked for at once."""

    def core_s(self) -> float:
        """The cores that workers have held until now, at work or not, times seconds: what they cost. Call it with
        `changed` held, and before there are more of them or fewer."""
        now = self._clock()
        self._core_s += sum(worker.connection.threads for worker in self.workers) * (now - self._counted_at)
        self._counted_at = now
        return self._core_s

    def tell(self, why: str) -> None:
        """Tells the user that a worker is lost, in a line."""
        self.last_lost = why
        if not self.closed:
            print(f"sluice: {why}; what it was asked for is asked of others", file=sys.stderr, flush=True)

    def lease(self, others_than: Collection[RemoteWorker], key: str = "") -> RemoteWorker | None:
        """The least busy worker, with one more request; of those that are hardly busier the one that other loaders ask
        for the same `key`, too. None: there is none now. Call it with `changed` held."""
        now = self._clock()
        free = [w for w in self.workers
                if not (w.leaving or w.silent) and w not in others_than and w.rests_until <= now]
        least = min((w.load for w in free), default=0.0)
        worker = min((w for w in free if w.load <= least + (self.slack if key else 0.0)), default=None,
                     key=lambda w: blake2b(f"{w.connection.address} {key}".encode()).digest())
        self.reads = self.reads or bool(key)
        if worker is not None:
            if not worker.asked:
                worker.heard = now
            worker.asked += 1
        return worker

    def give_back(self, worker: RemoteWorker, lost: str = "") -> None:
        """Ends a lease. `lost` says why the worker did not answer."""
        with self.changed:
            worker.asked -= 1
            if not lost:
                worker.heard, worker.answered, worker.lost = self._clock(), True, ""
            else:
                if not worker.lost:
                    self.tell(lost)
                worker.lost, worker.answered = lost, False
                worker.rests_until = self._clock() + _REST_S
            self.changed.notify_all()

    @property
    def pids(self) -> list[int]:
        return []

    def weigh(self) -> None:
        """Charges this host's memory with that of workers which are on it. Call it without the lock: the account is the
        pipeline's."""

    def close(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.connection.close()


class LocalFleet(Fleet):
    """Processes of this host, at most so many. They are started when they are needed, replaced when they die, and end
    with this process, however it ends."""

    slack = 0.0

    def __init__(self, most: int, job: RemoteJob, table: str | list[str], functions: Sequence[str] = ()):
        """A worker opens the `table`, or the files, and may call the `functions`."""
        super().__init__()
        self._most, self._job, self._given = most, job, {"table": table, "functions": list(functions)}
        self._target = 0
        self._threads: list[threading.Thread] = []
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._failed = 0
        self._at_once = len(os.sched_getaffinity(0))  # to start takes a core, and the first shall be at work soon
        self._budget = RestartBudget(limit=60)

    @property
    def requests(self) -> int:
        return 2 * self._most

    def use(self, requests: int) -> None:
        """Two requests keep a worker busy. Fewer are wanted: the least busy ones leave, once they have answered."""
        with self.changed:
            self._target = min(self._most, -(-requests // 2))
            staying = sorted((w for w in self.workers if not w.leaving), key=lambda w: -w.asked)
            for worker in staying[max(0, self._target - self.starting):]:
                worker.leaving = True
                self._let_go(worker)
            self._staff()
            self.changed.notify_all()

    def give_back(self, worker: RemoteWorker, lost: str = "") -> None:
        super().give_back(worker, lost)
        with self.changed:
            if lost:  # it may hang: another takes its place
                worker.leaving = True
                _kill(worker.process)
            self._let_go(worker)

    @property
    def pids(self) -> list[int]:
        with self.changed:
            return [worker.process.pid for worker in self.workers if worker.process is not None]

    def weigh(self) -> None:
        """A worker is charged with the most memory that it was seen to have."""
        with self.lock:
            workers = list(self.workers)
        for worker in workers:
            size = max(WORKER_PROCESS_BYTES, anonymous_bytes(worker.process.pid if worker.process else None))
            with self.lock:
                more = max(0, size - worker.bytes) if worker in self.workers else 0
                worker.bytes += more
            if more:
                self.charge(more)

    def close(self) -> None:
        with self.changed:
            self.closed, self._target = True, 0
            for process in self._processes:
                _kill(process)
            threads = list(self._threads)
            self.changed.notify_all()
        end = time.monotonic() + _LEAVE_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _staff(self) -> None:
        """Starts the workers that are missing, each by a thread that sees it through. Call it with `changed` held."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while not self.closed and self.error is None and self.starting < self._at_once and \
                self.starting + sum(not w.leaving for w in self.workers) < self._target:
            self.starting += 1
            thread = threading.Thread(target=self._life, daemon=True, name="sluice-remote-worker")
            self._threads.append(thread)
            thread.start()

    def _life(self) -> None:
        """One worker, from its start to its end."""
        worker, token = None, secrets.token_hex(16)
        try:
            process, lifeline, announced = _started({**self._given, "token": token})
        except OSError as error:
            self._gone(None, f"a worker process could not be started: {error}")
            return
        with self.changed:
            self._processes.add(process)
            if self.closed:
                _kill(process)
        with announced:
            line = announced.readline()
        connection = Connection(json.loads(line)["listening"], token, self._job) if line else None
        if connection is not None and self.reads:  # opening takes seconds, and others can answer meanwhile
            with contextlib.suppress(Exception):  # whoever asks it is told
                connection.open()
        with self.changed:
            if connection is not None:
                worker = RemoteWorker(connection, process, answered=True)
                self.core_s()
                self.workers.append(worker)
                self._failed, self.starting = 0, self.starting - 1
                self._staff()
                self.changed.notify_all()
        self.weigh()
        why = f"a worker process ended with {_how(process.wait())}"
        os.close(lifeline)
        with self.changed:
            self._processes.discard(process)
        self._gone(worker, why)

    def _gone(self, worker: RemoteWorker | None, why: str) -> None:
        if worker is not None:
            worker.connection.close()
            self.charge(-worker.bytes)
            worker.bytes = 0
        with self.changed:
            if worker is not None:
                self.core_s()
                self.workers.remove(worker)
            else:
                self._failed, self.starting = self._failed + 1, self.starting - 1
            if not self.closed and (worker is None or not worker.leaving or worker.lost):
                if worker is None or not worker.lost:
                    self.tell(why)
                if self._failed >= _FAILED_STARTS:
                    self.error = RemoteError(f"{_FAILED_STARTS} worker processes in a row could not start; the last: "
                                             f"{why}, and said why on standard error")
                try:
                    self._budget.take(why)
                except RestartsExhausted as error:
                    self.error = error
            self._staff()
            self.changed.notify_all()

    def _let_go(self, worker: RemoteWorker) -> None:
        if worker.leaving and not worker.asked:
            _kill(worker.process)


def _started(given: dict[str, Any]) -> tuple[subprocess.Popen[bytes], int, Any]:
    """A process, the end of a pipe whose closing ends it, and what it says once it listens."""
    lifeline, ours = os.pipe()
    announced, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            interpreter.command(_PROGRAM, os.getpid(), lifeline, theirs), pass_fds=(lifeline, theirs),
            stdin=subprocess.PIPE, stdout=2, process_group=0)
    finally:
        os.close(lifeline)
        os.close(theirs)
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(json.dumps(given).encode())
    except BrokenPipeError:
        pass  # it has ended: who waits for its announcement finds out
    return process, ours, os.fdopen(announced, "rb")


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.returncode is None:
        process.kill()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
