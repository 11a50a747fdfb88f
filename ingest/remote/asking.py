"""Asks workers for units and calls, another one when the first is slow, silent, lost or wrong: `Asking`."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.ingest.read.reader import SourceError
from sluice.ingest.remote.calls import Call
from sluice.ingest.remote.client import WorkerLost
from sluice.ingest.remote.fleet import Fleet, RemoteWorker
from sluice.ingest.remote.unit import RemoteError, Unit, WrongAnswer
from sluice.ingest.stages.pool import Closed

_FEW, _FIRST_S, _LEAST_S, _TIMES = 8, 10.0, 0.5, 4
_TRIES = {SourceError: 2, WrongAnswer: 3, WorkerLost: 20}
"""How often a unit may fail in which way. A store that one worker cannot see may be seen by another. So many workers
that answered before, and are lost one after the other with the same unit, are lost by it."""
_TIMEOUT_S, _LOOK_S = 60.0, 0.25
_NOBODY_S = 60.0  # how long a request waits while no worker is there at all, or none answers
_QUIET_S, _PING_S = 0.5, 0.75  # whoever has not answered for so long is asked whether it is there, and has so long
_TELL = 3  # pings in a row that are not answered: a busy host may miss one


def slow_after(seconds_a_row: Sequence[float], rows: int) -> float:
    """How long an answer of so many rows may take before another worker is asked as well: four times what nearly all of
    the recent ones took."""
    if len(seconds_a_row) < _FEW:
        return _FIRST_S
    usual = sorted(seconds_a_row)[int(0.95 * (len(seconds_a_row) - 1))]
    return max(_LEAST_S, _TIMES * usual * rows)


@dataclass(eq=False)
class _Race:
    """One unit or call, and whoever was asked for it. The first right answer counts."""

    changed: threading.Condition
    asked: set[RemoteWorker] = field(default_factory=set)
    failed: set[RemoteWorker] = field(default_factory=set)
    failures: Counter[type[Exception]] = field(default_factory=Counter)
    slow_at: float = float("-inf")
    answer: Any = None
    error: BaseException | None = None
    over: bool = False


class Asking:
    """Gets units from a fleet, and has functions called there, for any number of threads."""

    def __init__(self, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic,
                 patience: Callable[[Sequence[float], int], float] = slow_after):
        self._fleet, self._clock, self._patience = fleet, clock, patience
        self._rates: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=64))
        self._over, self._watcher = threading.Event(), threading.Thread(
            target=self._watch, daemon=True, name="sluice-remote-watch")
        self.counts: Counter[str] = Counter()
        """Units, calls, bytes; `retries`: requests made again as a worker was lost, wrong or failed; `hedges`: another
        worker asked as the first was slow or silent; `late`: right answers to what was there already."""

    def get(self, unit: Unit | Call) -> Any:
        """The rows of a unit, or the columns of a call. `Closed`, if this was closed meanwhile."""
        fleet, race, alone_since = self._fleet, _Race(threading.Condition(self._fleet.lock)), self._clock()
        try:
            while True:
                with fleet.lock:
                    if self._watcher.ident is None:
                        self._watcher.start()
                    if race.answer is not None:
                        return race.answer
                    if self._over.is_set():
                        raise Closed
                    if error := race.error or fleet.error:
                        raise error
                    now = self._clock()
                    if fleet.starting or any(worker.is_there for worker in fleet.workers):
                        alone_since = now
                    elif now - alone_since > _NOBODY_S:
                        raise RemoteError(f"no worker was there for {_NOBODY_S:g} s; the last: "
                                          f"{fleet.last_lost or 'there was none'}")
                    wait_s = race.slow_at - now if any(not w.silent for w in race.asked) else 0.0
                    if wait_s > 0:  # all but the answer is seen at the next look: there may be many who wait
                        race.changed.wait(min(_LOOK_S, wait_s))
                        continue
                    worker = fleet.lease(race.asked | race.failed, unit.key) or fleet.lease(race.asked, unit.key)
                    if worker is None:
                        fleet.changed.wait(_LOOK_S)
                        continue
                    patience_s = self._patience(self._rates[unit.kind], unit.rows)
                    self.counts["hedges"] += bool(race.asked)
                    race.asked.add(worker)
                    race.slow_at = now + patience_s * len(race.asked)
                threading.Thread(target=self._ask, args=(race, worker, unit, max(_TIMEOUT_S, 20 * patience_s)),
                                 daemon=True, name="sluice-remote-ask").start()
        finally:
            race.over = True

    def close(self) -> None:
        """Ends all waiting."""
        with self._fleet.changed:
            self._over.set()
            self._fleet.changed.notify_all()

    def _watch(self) -> None:
        """Asks workers from whom nothing came for a while whether they are there."""
        while not self._over.wait(_QUIET_S):
            self._fleet.weigh()
            with self._fleet.lock:
                since = self._clock() - _QUIET_S
                quiet = [w for w in self._fleet.workers
                         if (w.asked or w.silent or not w.threads) and not w.pinged and w.heard <= since]
                for worker in quiet:
                    worker.pinged = True
            for worker in quiet:
                threading.Thread(target=self._ping, args=(worker,), daemon=True, name="sluice-remote-ping").start()

    def _ping(self, worker: RemoteWorker) -> None:
        threads = worker.connection.ping(_PING_S)
        with self._fleet.lock:
            worker.pinged, worker.silent = False, 0 if threads else worker.silent + 1
            if threads:
                self._fleet.core_s()
                worker.heard, worker.threads = self._clock(), threads
            else:
                self._fleet.last_lost = worker.lost or f"worker {worker.connection.address} does not even answer a ping"
                if worker.silent == _TELL:
                    self._fleet.tell(self._fleet.last_lost)
            self._fleet.changed.notify_all()

    def _ask(self, race: _Race, worker: RemoteWorker, unit: Unit | Call, timeout_s: float) -> None:
        """Asks one worker, on a thread of its own."""
        began, answer, failed = self._clock(), None, Exception()
        try:
            answer = worker.connection.ask(unit, timeout_s)
        except Exception as error:
            failed = error
        with self._fleet.lock:
            if answer is None:
                self._failed(race, worker, unit, failed)
            else:
                if race.over or race.answer is not None:
                    self.counts["late"] += 1
                else:
                    race.answer = answer
                    self.counts[unit.counted] += 1
                    self.counts["bytes"] += sum(array.nbytes for array in answer.values()) \
                        if isinstance(answer, dict) else answer.nbytes
                self._rates[unit.kind].append((self._clock() - began) / max(1, unit.rows))
            self._fleet.give_back(worker, str(failed) if isinstance(failed, WorkerLost) else "")
            race.changed.notify()

    def _failed(self, race: _Race, worker: RemoteWorker, unit: Unit | Call, error: Exception) -> None:
        race.asked.discard(worker)
        race.failed.add(worker)
        if race.over or race.answer is not None or self._over.is_set():
            return
        kind = type(error)
        race.failures[kind] += kind is not WorkerLost or worker.answered
        if race.failures[kind] < _TRIES.get(kind, 1):
            self.counts["retries"] += 1
            race.slow_at = float("-inf")
        elif kind not in (WorkerLost, WrongAnswer):
            race.error = error
        elif kind is WrongAnswer or not race.asked:  # whoever else was asked may answer yet
            race.error = RemoteError(f"worker {worker.connection.address}: {unit.said} was asked for "
                                     f"{race.failures[kind]} times in vain; the last time: {error}")
