"""Runs the workers of one stage: `Pool`, an iterator over results in the order of the input.

Workers pull their own input, one at a time and in order, so stages need no threads between them. Only the pull is
serial. If one item takes long, later items still complete, up to the limit on waiting bytes. Memory for a result is
reserved in order, before its work begins, so a later item never takes memory that an earlier one needs.

With a `Gatherer`, a pool yields other items that its results complete. A worker that completes one also finishes it.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sluice.ingest.errors import Closed
from sluice.ingest.memory.governor import Charge, Governor
from sluice.ingest.stages.counters import StageCounters, WorkerClock

EXIT_WAIT_S = 30.0
"""How long the interpreter waits at exit for workers that are in the middle of an item."""
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@dataclass
class _Task:
    """An item that a worker is working on."""

    sequence: int
    item: Any
    expected: int
    reserved: int
    charge: Charge


@dataclass(frozen=True)
class Gatherer:
    """Makes other items of the results of a pool."""

    add: Callable[[Any], Iterable[Any]]
    """Returns the items that one more result completes. Results come in order, and one at a time."""
    size: Callable[[Any], int]
    """Returns the bytes to reserve before an item is finished."""
    finish: Callable[[Any, Charge], Any]
    """Turns an item and its charge, which it corrects, into what the consumer gets."""


class Pool:
    """A pool of threads whose number may change while it runs."""

    def __init__(
        self,
        counters: StageCounters,
        upstream: Iterator[Any],
        make_work: Callable[[], Callable[[Any, Charge], Any]],
        *,
        workers: int,
        limit_bytes: int,
        governor: Governor,
        size: Callable[[Any], int],
        measure: Callable[[Any], tuple[int, int]],
        gatherer: Gatherer | None = None,
    ):
        """- `make_work` is called once in each worker. It returns the function that turns an item and its charge into a
          result.
        - `size` returns the bytes to reserve for an item. The pool reserves more if recent results were larger.
        - `measure` returns the rows and bytes of a result. The consumer of a result takes over its charge."""
        self._counters, self._upstream, self._make_work = counters, upstream, make_work
        self._limit, self._governor = limit_bytes, governor
        self._size, self._measure, self._gatherer = size, measure, gatherer
        self._pull = threading.Lock()
        self._lock = governor.lock
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._results: dict[int, tuple[Any, int]] = {}
        self._growth: deque[float] = deque(maxlen=32)
        """The actual size of recent results, divided by the expected size."""
        self._next_in = self._next_out = 0
        self._placed: dict[int, tuple[Any, int]] = {}
        """Results that wait until those before them are there."""
        self._complete: deque[tuple[int, Any, int]] = deque()
        """What results have completed, and no worker finishes yet."""
        self._next_placed = self._made = self._made_before = 0
        """The number of the next result that the gatherer gets. How many items it has made, and had made before the
        last result."""
        self._outstanding = self.waiting_bytes = 0
        self._end = math.inf
        self._closed = False
        self._wanted_workers = self._live_workers = self._started = 0
        self._threads: list[threading.Thread] = []
        _pools.add(self)
        self.resize(workers)

    # ---- changes while the pool runs

    def resize(self, workers: int) -> None:
        """Changes the number of workers. New ones start at once. Surplus ones leave after their current item."""
        with self._lock:
            self._wanted_workers = workers
            self._threads = [t for t in self._threads if t.is_alive()]
            while self._live_workers < workers and not self._closed:
                name = f"sluice-{self._counters.name}-{self._started}"
                thread = threading.Thread(target=self._work, daemon=True, name=name)
                self._live_workers += 1
                self._started += 1
                self._threads.append(thread)
                thread.start()
            self._room.notify_all()

    def limit(self, limit_bytes: int) -> None:
        """Sets how many bytes of results may wait, in addition to one item for each worker."""
        with self._lock:
            self._limit = limit_bytes
            self._room.notify_all()

    # ---- called by the consumer

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            while not self._closed and self._next_out not in self._results:
                if self._end <= self._next_left and self._made <= self._next_out:
                    raise StopIteration
                self._ready.wait()
            if self._closed:  # also if a worker has ended its item since
                raise Closed
            result, size = self._results.pop(self._next_out)
            self._next_out += 1
            self._outstanding -= size
            self.waiting_bytes -= size
            self._room.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result

    @property
    def _next_left(self) -> int:
        """The number of the first result that the gatherer, or else the consumer, has not got yet."""
        return self._next_placed if self._gatherer else self._next_out

    def close(self) -> None:
        """Stops all workers. Call `join` when all pools of a pipeline are closed."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._ready.notify_all()

    def join(self, timeout_s: float) -> None:
        """Waits for the workers, at most `timeout_s`."""
        end = time.monotonic() + timeout_s
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        # A reference cycle may keep a pool alive for long. The pool's items must be freed now.
        if self._closed and self.gone and self._pull.acquire(blocking=False):
            for left in (self._results, self._placed, self._complete):
                left.clear()
            self._gatherer = None
            self._upstream, self._make_work = iter(()), None  # type: ignore[assignment]
            self._pull.release()

    @property
    def gone(self) -> bool:
        """Whether no worker is left."""
        return not any(thread.is_alive() for thread in self._threads)

    def interrupt(self) -> None:
        """Raises SystemExit in each worker, which it sees before its next line of Python."""
        for thread in self._threads:
            if thread.is_alive() and thread.ident:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
                )

    # ---- called by workers

    def _work(self) -> None:
        work = failed = None
        try:
            work = self._make_work()
            if prepare := getattr(work, "prepare", None):
                prepare()
        except BaseException as error:  # the consumer gets it in the place of the first item
            failed = error
        clock = WorkerClock(self._counters)
        self._counters.change(waiting=1)
        try:
            while True:
                with self._pull:
                    task = self._take()
                if task is None:
                    return
                clock.begin()
                try:
                    if failed is not None:
                        raise failed
                    assert work
                    result = work(task.item, task.charge)
                    rows, size = self._measure(result)
                    task.charge.correct(size)
                except BaseException as error:  # the consumer gets the error in the item's place
                    result, rows, size = error, 0, 0
                    task.charge.release()
                with self._lock:
                    clock.end()
                    self._put(task, result, rows, size)
                del task, result
                self._finish_complete(clock)
        finally:
            with self._lock:
                self._counters.change(waiting=-1)
            if close := getattr(work, "close", None):  # some work holds processes
                close()

    def _take(self) -> _Task | None:
        """Takes the next item and reserves memory for its result. None: the worker must leave."""
        with self._lock:
            if self._closed or self._end < math.inf or self._live_workers > self._wanted_workers:
                # Counted under the lock, so that no second worker leaves for the same reason.
                self._live_workers -= 1
                return None
        try:
            item = next(self._upstream)
            expected = self._size(item)
        except Closed:
            self.close()  # a generator upstream has ended by this error and would seem exhausted
            return None
        except BaseException as error:
            self._finish(None if isinstance(error, StopIteration) else error)
            return None
        with self._lock:
            size = math.ceil(expected * max(1.0, 1.0, *self._growth))
            try:
                charge = self._reserve(size)  # it measures this process and its control groups
            except BaseException as error:
                self._finish(error)
                return None
            if not charge:
                return None
            self._outstanding += size
            self._next_in += 1
            return _Task(self._next_in - 1, item, expected, size, charge)

    def _reserve(self, size: int, made: int | None = None) -> Charge | None:
        """Reserves memory for the next item, or to finish item `made` of the gatherer. None: the pool was closed
        meanwhile."""
        blocked = held_back = False
        try:
            while not self._closed:
                if made is None:
                    due = self._next_in == self._next_left and self._next_out >= self._made_before
                    # In addition to the limit, each worker may have one item.
                    room = self._limit + self._wanted_workers * size
                    fits = due or self._outstanding + size <= room
                else:
                    due, fits = made == self._next_out, True
                charge = self._governor.admit(size, due) if fits else None
                if charge:
                    return charge
                if not blocked:
                    blocked = True
                    self._counters.change(blocked=1)
                if fits:
                    self._governor.wait_on(self._room, again=held_back)
                    held_back = True
                else:
                    self._room.wait()
            return None
        finally:
            if blocked:
                self._counters.change(blocked=-1)

    def _finish(self, error: BaseException | None) -> None:
        """Notes the end of the input, or an error that ends it."""
        with self._lock:
            if error:
                self._store(self._next_in, error, 0)
                self._next_in += 1
            self._end = self._next_in
            self._ready.notify_all()

    def _put(self, task: _Task, result: Any, rows: int, size: int) -> None:
        """Takes what the work returned, or the error that it raised."""
        if isinstance(result, BaseException):
            self._end = self._next_in  # items that workers have already taken still come
        else:
            self._counters.passed(rows, size)
            self._growth.append(size / max(1, task.expected))
        self._outstanding += size - task.reserved
        self.waiting_bytes += size
        self._store(task.sequence, result, size)
        self._room.notify_all()

    def _store(self, sequence: int, result: Any, size: int) -> None:
        """Passes a result on. A gatherer gets all that are next, and after an error no more."""
        if not (gatherer := self._gatherer):
            self._results[sequence] = (result, size)
        else:
            self._placed[sequence] = (result, size)
        while gatherer and self._next_placed in self._placed:
            result, size = self._placed.pop(self._next_placed)
            self._next_placed += 1
            self._made_before = self._made
            self._outstanding -= size
            self.waiting_bytes -= size
            try:
                if isinstance(result, BaseException):
                    raise result
                for item in gatherer.add(result):
                    expected = gatherer.size(item)
                    self._complete.append((self._made, item, expected))
                    self._outstanding += expected
                    self._made += 1
            except BaseException as error:
                self._results[self._made] = (error, 0)
                self._made += 1
                self._end, self._next_placed = self._next_in, sys.maxsize
        self._ready.notify_all()

    def _finish_complete(self, clock: WorkerClock) -> None:
        """Finishes what is complete, also what other workers have completed."""
        while gatherer := self._gatherer:
            with self._lock:
                if self._closed or not self._complete:
                    return
                number, item, expected = self._complete.popleft()
                try:
                    charge = self._reserve(expected, number)
                except BaseException as error:
                    self._results[number] = (error, 0)
                    self._ready.notify_all()
                    continue
            if not charge:
                return
            clock.begin()
            try:
                result = gatherer.finish(item, charge)
            except BaseException as error:
                result = error
                charge.release()
            del item
            with self._lock:
                clock.end(is_item=False)
                self._results[number] = (result, charge.bytes)
                self._outstanding += charge.bytes - expected
                self.waiting_bytes += charge.bytes
                if number == self._next_out:
                    self._ready.notify_all()
                self._room.notify_all()
            del result


@atexit.register
def _end_all() -> None:
    """Stops all workers, also in the middle of an item. A thread that runs while the interpreter is taken down may
    abort the process, or hang it, in a library's native code."""
    pools = [pool for pool in _pools if not pool.gone]  # a fork has none of the threads
    for pool in pools:
        pool.close()
    end = time.monotonic() + EXIT_WAIT_S
    while not all(pool.gone for pool in pools) and time.monotonic() < end:
        for pool in pools:
            pool.interrupt()
            pool.join(0.1)
