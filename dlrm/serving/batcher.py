"""Works on requests that wait at the same time together: `Batcher`.

There is no timer: once a batch is done, all requests that came meanwhile are the next one. So a single request waits
for nobody, and the more there are, the larger the batches grow, up to what is done within BATCH_S. A short batch runs
on the event loop's own thread: in another thread, each answer that was sent would hand the interpreter's lock to
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
_TURNS_BEFORE_BATCH = 3
"""Turns of the event loop before a batch: in them it sends answers that are ready, and reads what has come."""

Q = TypeVar("Q")
A = TypeVar("A")


class Full(Exception):
    """More requests wait already than may, or than can be answered in time; `retry_after` is the number of seconds
    after which to ask again."""

    def __init__(self, text: str, retry_after: int = 1) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Batcher(Generic[Q, A]):
    """Collects requests into batches on one event loop; `work` answers each request of a list."""

    def __init__(
        self,
        work: Callable[[Sequence[Q]], Sequence[A]],
        *,
        size: Callable[[Q], int],
        size_limit: int,
        request_limit: int,
        waiting_limit: int,
        units: Callable[[Q], int] = lambda _: 1,
        answer_s: float = float("inf"),
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A batch has at most `request_limit` requests. If it has several, their total `size` is at most `size_limit`.
        Their `units` of work take at most BATCH_S at the `pace` of earlier batches. At most `waiting_limit` requests
        wait. A request that would not be answered within `answer_s` seconds is refused."""
        self._work = work
        self._size = size
        self._units = units
        self._clock = clock
        self._size_limit = size_limit
        self._request_limit = request_limit
        self._waiting_limit = waiting_limit
        self._answer_s = answer_s
        self.pace = pace or Pace()
        self._queue: deque[tuple[Q, int, asyncio.Future[A]]] = deque()
        self._queued_units = 0
        self._running: tuple[float, float] | None = None
        """When the batch that is worked on began, and the seconds that it is expected to take."""
        self._busy = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_batch: Callable[[int], None] = lambda _: None
        """Called with the number of requests in each batch."""

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    @property
    def ahead_s(self) -> float:
        """The seconds until all work is done that waits or has begun."""
        begun_at, expected_s = self._running or (self._clock(), 0.0)
        return self.pace.seconds(self._queued_units) + max(
            0.0, begun_at + expected_s - self._clock()
        )

    async def ask(self, request: Q) -> A:
        """The answer to a request; raises Full at once, or what `work` raised. A request whose caller stops waiting is
        left out, unless its batch has begun."""
        if len(self._queue) >= self._waiting_limit:
            raise Full(f"{self._waiting_limit} requests wait already")
        units = max(1, self._units(request))
        if wait := self.pace.retry_after(self.ahead_s, units, self._answer_s):
            raise Full(
                f"what waits already takes longer than {self._answer_s:g} s; try again in {wait} s",
                wait,
            )
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._queue.append((request, units, future))
        self._queued_units += units
        if not self._busy:
            self._busy = True
            task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _run(self) -> None:
        try:
            while True:
                for _ in range(_TURNS_BEFORE_BATCH):
                    await asyncio.sleep(0)
                batch, units = self._next_batch()
                if not batch:
                    return
                self.on_batch(len(batch))
                requests = [request for request, _ in batch]
                begun_at, expected_s = self._clock(), self.pace.seconds(units)
                self._running = begun_at, expected_s
                try:
                    if expected_s <= INLINE_S:
                        answers = self._work(requests)
                    else:
                        answers = await asyncio.to_thread(self._work, requests)
                except Exception as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                finally:
                    self._running = None
                    self.pace = self.pace.after(units, self._clock() - begun_at)
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._busy = False

    def _next_batch(self) -> tuple[list[tuple[Q, asyncio.Future[A]]], int]:
        """Takes the next batch from the queue; returns it with its units of work."""
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        batch_size = batch_units = 0
        unit_limit = self.pace.units_within(BATCH_S)
        while self._queue and len(batch) < self._request_limit:
            request, units, future = self._queue[0]
            if future.done():  # nobody waits for it any more
                self._queue.popleft()
                self._queued_units -= units
                continue
            batch_size, batch_units = batch_size + self._size(request), batch_units + units
            if batch and (batch_size > self._size_limit or batch_units > unit_limit):
                batch_units -= units
                break
            self._queue.popleft()
            self._queued_units -= units
            batch.append((request, future))
        return batch, batch_units
