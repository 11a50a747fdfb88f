"""Reads row groups and calls functions on remote workers: `RemoteClient`.

If a worker is slow, silent, lost or wrong, the request goes to another one. Threads read what comes from outside only
inside of a `try`, and an error of any kind ends what waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sluice.ingest.errors import Closed, NoWorkerAnswers, SourceError, warn
from sluice.ingest.flow.decoded import Decoded, ReadTask
from sluice.ingest.memory.governor import Charge
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.remote.calls import request_call
from sluice.ingest.remote.connection import WorkerLost
from sluice.ingest.remote.fleet import Fleet, RemoteWorker
from sluice.ingest.remote.messages import RemoteError, Request, WrongAnswer
from sluice.ingest.remote.unit import RemoteJob, Unit
from sluice.ingest.stages.transform import Arrays

_FEW = 8
_FIRST_S = 10.0
_LEAST_S = 0.5
_TIMES = 4
_TRIES = {SourceError: 2, WrongAnswer: 3, WorkerLost: 20}
"""How often a unit may fail, for each kind of failure. One worker may reach a store that another cannot. If this many
working workers are lost in a row with the same unit, the unit is to blame."""
_TIMEOUT_S, _LOOK_S = 60.0, 0.25
_NOBODY_S = 20.0  # how long requests wait while no worker answers
# A worker that was silent for `_QUIET_S` is pinged, and has `_PING_S` to answer.
_QUIET_S, _PING_S = 0.5, 0.75
_TELL = 3  # unanswered pings in a row before the user is told; a busy host may miss one


def slow_after(seconds_a_row: Sequence[float], rows: int) -> float:
    """Returns how long an answer of `rows` rows may take before a second worker is asked too: four times the 95th
    percentile of recent answers."""
    if len(seconds_a_row) < _FEW:
        return _FIRST_S
    usual = sorted(seconds_a_row)[int(0.95 * (len(seconds_a_row) - 1))]
    return max(_LEAST_S, _TIMES * usual * rows)


@dataclass(eq=False)
class _Race:
    """One request, and the workers that got it. The first right answer is used."""

    changed: threading.Condition
    asked: set[RemoteWorker] = field(default_factory=set)
    failed: set[RemoteWorker] = field(default_factory=set)
    failures: Counter[type[Exception]] = field(default_factory=Counter)
    slow_at: float = float("-inf")
    answer: Any = None
    error: BaseException | None = None
    over: bool = False
    """Whether no thread waits for the answer any more."""


class RemoteClient:
    """Gets units from a fleet of workers, and calls functions there, for a pipeline. Many threads can use it. If no
    worker answers, `read` and `call` raise `NoWorkerAnswers`."""

    def __init__(
        self,
        fleet: Fleet,
        job: RemoteJob,
        groups: RowGroupReader,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """If a worker cannot read a file, the rescue of `groups` replaces its rows, as for local reads."""
        self.fleet = fleet
        self._job, self._groups = job, groups
        self._clock = clock
        self._pid = os.getpid()
        self._at_the_end: int | None = None
        self._alone_since: float | None = None
        self._is_alone = False
        self._rates: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=64))
        self._over = threading.Event()
        self.counts: Counter[str] = Counter()
        """Counts units, calls and bytes. `retries`: repeated requests after a worker was lost, wrong or failed.
        `hedges`: requests to a second worker because the first was slow or silent. `late`: right answers that came
        after another worker's. `throttled`: requests of workers that a store refused, because there were too many."""
        threading.Thread(target=self._watch, daemon=True, name="sluice-remote-watch").start()

    def read(self, task: ReadTask, charge: Charge) -> Decoded:
        unit = Unit.of(task)
        try:
            rows = pa.Table.from_batches([self.get(unit.request(self._job, charge.bytes))])
            return Decoded(task, rows, charge, in_order=[part.full for part in unit.parts])
        except SourceError as error:
            return Decoded(task, self._groups.replace_lost(task.read, error), charge)

    def call(self, function: str, arrays: Arrays, where: str) -> Arrays:
        answer: Arrays = self.get(request_call(function, arrays, where))
        return answer

    def get(self, request: Request) -> Any:
        """Returns the result of a request. Raises `Closed` if this was closed meanwhile, and `NoWorkerAnswers` if no
        worker has answered for a while."""
        fleet, race = self.fleet, _Race(threading.Condition(self.fleet.lock))
        try:
            while True:
                with fleet.lock:
                    if race.answer is not None:
                        return race.answer
                    if self._over.is_set():
                        raise Closed
                    if error := race.error or fleet.error:
                        raise error
                    now = self._clock()
                    self._look_for_workers(now)
                    if self._is_alone:
                        raise NoWorkerAnswers
                    wait_s = race.slow_at - now if any(not w.silent for w in race.asked) else 0.0
                    # Only the answer wakes this thread early. Everything else is seen at the next look.
                    if wait_s > 0:
                        race.changed.wait(min(_LOOK_S, wait_s))
                        continue
                    reads = request.action == "read"
                    worker = fleet.lease(race.asked | race.failed, reads) or fleet.lease(
                        race.asked, reads
                    )
                    if worker is None:
                        fleet.changed.wait(_LOOK_S)
                        continue
                    patience_s = slow_after(self._rates[request.kind], request.rows)
                    self.counts["hedges"] += bool(race.asked)
                    race.asked.add(worker)
                    race.slow_at = now + patience_s * len(race.asked)
                threading.Thread(
                    target=self._ask,
                    args=(race, worker, request, max(_TIMEOUT_S, 20 * patience_s)),
                    daemon=True,
                    name="sluice-remote-ask",
                ).start()
        finally:
            race.over = True

    def _look_for_workers(self, now: float) -> None:
        """Notes whether all workers have been gone for too long, and tells the user when that changes. Call it with
        the lock held."""
        if any(worker.is_there for worker in self.fleet.workers):
            if self._is_alone:
                warn("a worker answers again; row groups are read by workers again")
            self._alone_since, self._is_alone = None, False
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        if not self._is_alone and now - self._alone_since > _NOBODY_S:
            self._is_alone = True
            warn(
                f"no worker was there for {_NOBODY_S:g} s ({self.fleet.why_none_answers}); this loader "
                "reads the rows itself until one answers"
            )

    def stats(self) -> dict[str, Any]:
        with self.fleet.lock:
            return {
                "workers": len(self.fleet.workers)
                if self._at_the_end is None
                else self._at_the_end,
                **{
                    name: self.counts[name]
                    for name in ("units", "calls", "bytes", "retries", "hedges", "late")
                },
                "starting": self.fleet.starting,
                "core_s": round(self.fleet.core_s(), 3),
                **self.fleet.scale,
            }

    def close(self) -> None:
        """Ends all waiting and this process's own workers. Does nothing in a fork of the process."""
        if os.getpid() != self._pid:
            return
        with self.fleet.changed:
            if self._at_the_end is None:
                self._at_the_end = len(self.fleet.workers)
            self._over.set()
            self.fleet.changed.notify_all()
        self.fleet.close()

    def _watch(self) -> None:
        """Pings workers that have been silent for a while."""
        try:
            self._ping_quiet_workers()
        except Exception as error:
            with self.fleet.changed:
                self.fleet.error = error
                self.fleet.changed.notify_all()

    def _ping_quiet_workers(self) -> None:
        while not self._over.wait(_QUIET_S):
            self.fleet.measure_memory()
            with self.fleet.lock:
                since = self._clock() - _QUIET_S
                quiet = [
                    w
                    for w in self.fleet.workers
                    if (w.asked or not w.is_there or not w.threads)
                    and not w.pinged
                    and w.heard <= since
                ]
                for worker in quiet:
                    worker.pinged = True
            for worker in quiet:
                threading.Thread(
                    target=self._ping, args=(worker,), daemon=True, name="sluice-remote-ping"
                ).start()

    def _ping(self, worker: RemoteWorker) -> None:
        threads = 0
        with suppress(Exception):  # whatever it is, the worker has not answered as workers do
            threads = worker.connection.ping(_PING_S)
        with self.fleet.lock:
            worker.pinged, worker.silent = False, 0 if threads else worker.silent + 1
            if threads:
                self.fleet.core_s()
                worker.heard, worker.threads = self._clock(), threads
                if not worker.leaving:
                    worker.lost = ""
            else:
                self.fleet.last_lost = (
                    worker.lost or f"worker {worker.connection.address} does not answer a ping"
                )
                if worker.silent == _TELL:
                    self.fleet.report_lost(self.fleet.last_lost)
            self.fleet.changed.notify_all()

    def _ask(self, race: _Race, worker: RemoteWorker, request: Request, timeout_s: float) -> None:
        """Sends the request to one worker. Runs in its own thread."""
        began, failed = self._clock(), None
        answer: Any = None
        throttled = 0
        try:
            answer, throttled = worker.connection.ask(request, timeout_s)
        except Exception as error:
            failed = error
        with self.fleet.lock:
            if failed is not None:
                self._failed(race, worker, request, failed)
            else:
                self.counts["throttled"] += throttled
                if race.over:
                    self.counts["late"] += 1
                else:
                    race.answer, race.over = answer, True
                    self.counts["units" if request.action == "read" else "calls"] += 1
                    self.counts["bytes"] += (
                        sum(array.nbytes for array in answer.values())
                        if isinstance(answer, dict)
                        else answer.nbytes
                    )
                self._rates[request.kind].append((self._clock() - began) / max(1, request.rows))
            is_lost = isinstance(failed, (WorkerLost, WrongAnswer))
            self.fleet.give_back(worker, str(failed) if is_lost else "")
            race.changed.notify()

    def _failed(
        self, race: _Race, worker: RemoteWorker, request: Request, error: Exception
    ) -> None:
        race.asked.discard(worker)
        race.failed.add(worker)
        if race.over or self._over.is_set():
            return
        kind = type(error)
        race.failures[kind] += kind is not WorkerLost or worker.answered
        if race.failures[kind] < _TRIES.get(kind, 1):
            self.counts["retries"] += 1
            race.slow_at = float("-inf")
        elif kind not in (WorkerLost, WrongAnswer):
            race.error = error
        elif kind is WrongAnswer or not race.asked:
            # Other workers that were asked may still answer.
            race.error = RemoteError(
                f"{request.description}: {race.failures[kind]} requests to remote workers failed; "
                f"the last error: {error}"
            )
