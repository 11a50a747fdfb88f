"""Works on requests that wait at the same time together: `Batcher`.

There is no timer: once a batch is done, all requests that came meanwhile are the next one. So a single request waits
for nobody, and the more there are, the larger the batches grow, up to what is done within BATCH_S. A short batch runs
on the event loop's own thread: in a thread beside it, each answer that was sent would hand the interpreter's lock to
that thread, and take it back milliseconds later. One that takes longer than INLINE_S goes to a thread, so that the
loop goes on to answer what needs no model.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sluice.dlrm.serving.pace import Pace

INLINE_S = 0.01
BATCH_S = 0.1
_TURNS = 3
"""Turns of the event loop before a batch: in them it sends answers that are ready, and reads what has come."""

Q = TypeVar("Q")
A = TypeVar("A")


class Turns:
    """Lets `most` callers pass in each turn of the event loop: however many come at once, others have turns in
    between."""

    def __init__(self, most: int) -> None:
        self._most, self._passed = most, 0

    async def mine(self) -> None:
        while self._passed >= self._most:
            await asyncio.sleep(0)
        if not self._passed:
            asyncio.get_running_loop().call_soon(self._begin)
        self._passed += 1

    def _begin(self) -> None:
        self._passed = 0


class Full(Exception):
    """More waits already than may, or than can be answered in time; `retry_after` says in how many seconds to ask."""

    def __init__(self, text: str, retry_after: int = 1) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Batcher(Generic[Q, A]):
    """Collects requests into batches on one event loop; `work` answers each request of a list."""

    def __init__(self, work: Callable[[Sequence[Q]], Sequence[A]], *, size: Callable[[Q], int], most: int,
                 together: int, waiting: int, units: Callable[[Q], int] = lambda _: 1, within: float = float("inf"),
                 pace: Pace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """A batch has at most `together` requests. If it has several, their `size` is at most `most` in all, and they
        have at most as many `units` of work as take BATCH_S at the `pace` of earlier batches. At most `waiting`
        requests wait, and none that would not be answered `within` seconds."""
        self._work, self._size, self._most, self._together, self._limit = work, size, most, together, waiting
        self._units, self._within, self._clock = units, within, clock
        self.pace = pace or Pace()
        self._queue: deque[tuple[Q, int, asyncio.Future[A]]] = deque()
        self._queued = 0
        self._begun: tuple[float, float] | None = None
        self._busy = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.sizes: Callable[[int], None] = lambda _: None
        """Called with the number of requests in each batch."""

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def ahead_s(self) -> float:
        """The seconds that all work will take that waits or has begun."""
        began, takes = self._begun or (self._clock(), 0.0)
        return self.pace.seconds(self._queued) + max(0.0, began + takes - self._clock())

    async def ask(self, request: Q) -> A:
        """The answer to a request; raises Full at once, or what `work` raised. A request whose caller stops waiting is
        left out, unless its batch has begun."""
        if len(self._queue) >= self._limit:
            raise Full(f"{self._limit} requests wait already")
        units = max(1, self._units(request))
        if wait := self.pace.retry_after(self.ahead_s, units, self._within):
            raise Full(f"what waits already takes longer than {self._within:g} s; try again in {wait} s", wait)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._queue.append((request, units, future))
        self._queued += units
        if not self._busy:
            self._busy = True
            task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _run(self) -> None:
        try:
            while True:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                batch, units = self._next()
                if not batch:
                    return
                self.sizes(len(batch))
                requests = [request for request, _ in batch]
                began, takes = self._clock(), self.pace.seconds(units)
                self._begun = began, takes
                try:
                    if takes <= INLINE_S:
                        answers = self._work(requests)
                    else:
                        answers = await asyncio.to_thread(self._work, requests)
                except Exception as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                finally:
                    self._begun = None
                    self.pace = self.pace.after(units, self._clock() - began)
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._busy = False

    def _next(self) -> tuple[list[tuple[Q, asyncio.Future[A]]], int]:
        """Takes the next batch from the queue; returns it with its units of work."""
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        size = held = 0
        room = self.pace.units_within(BATCH_S)
        while self._queue and len(batch) < self._together:
            request, units, future = self._queue[0]
            if future.done():  # nobody waits for it any more
                self._queue.popleft()
                self._queued -= units
                continue
            size, held = size + self._size(request), held + units
            if batch and (size > self._most or held > room):
                held -= units
                break
            self._queue.popleft()
            self._queued -= units
            batch.append((request, future))
        return batch, held
