"""Collects waiting requests into batches: `Batcher`.

There is no timer. When a batch is done, all requests that came meanwhile form the next one. A single request does not
wait. With more requests the batches grow, up to the work of BATCH_S. A short batch runs on the event loop's own thread:
with another thread, each answer would pass the interpreter's lock to that thread for milliseconds. A batch longer than
INLINE_S runs in another thread, so that the loop still answers requests that need no model.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

from sluice.dlrm.serving.pace import Pace

INLINE_S = 0.01
BATCH_S = 0.1
_TURNS_BEFORE_BATCH = 4
"""Turns of the event loop before a batch, in which it sends finished answers and reads new requests."""

Q = TypeVar("Q")
A = TypeVar("A")


class Full(Exception):
    """Too many requests are waiting. The client may try again after `retry_after` seconds."""

    def __init__(self, text: str, retry_after: int = 1) -> None:
        super().__init__(text)
        self.retry_after = retry_after


@dataclass(eq=False)
class Batcher(Generic[Q, A]):
    """Collects requests into batches on one event loop. `work` answers each request of a list."""

    work: Callable[[Sequence[Q]], Sequence[A]]
    _: KW_ONLY
    size: Callable[[Q], int]
    size_limit: int
    """The largest sum of `size` over several requests in one batch."""
    request_limit: int
    """The most requests in one batch."""
    waiting_limit: int
    """The most requests that wait."""
    units: Callable[[Q], int] = lambda _: 1
    """Units of work. A batch has as many as take BATCH_S at the `pace` of earlier batches."""
    answer_s: float = float("inf")
    """A request that would not be answered within this time is refused."""
    pace: Pace = field(default_factory=Pace)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._queue: deque[tuple[Q, int, asyncio.Future[A]]] = deque()
        self._queued_units = 0
        self._running: tuple[float, float] | None = None
        """The start of the current batch, and its expected time in seconds."""
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
        started_at, expected_s = self._running or (self.clock(), 0.0)
        return self.pace.seconds(self._queued_units) + max(
            0.0, started_at + expected_s - self.clock()
        )

    async def ask(self, request: Q) -> A:
        """Returns the answer to a request. Raises Full at once, or the error of `work`. If the caller stops waiting
        before the batch starts, the request is dropped."""
        if len(self._queue) >= self.waiting_limit:
            raise Full(f"{self.waiting_limit} requests wait already")
        units = max(1, self.units(request))
        if wait := self.pace.retry_after(self.ahead_s, units, self.answer_s):
            raise Full(
                f"what waits already takes longer than {self.answer_s:g} s; try again in {wait} s",
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
                started_at, expected_s = self.clock(), self.pace.seconds(units)
                self._running = started_at, expected_s
                try:
                    if expected_s <= INLINE_S:
                        answers = self.work(requests)
                    else:
                        answers = await asyncio.to_thread(self.work, requests)
                except Exception as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                finally:
                    self._running = None
                    self.pace = self.pace.after(units, self.clock() - started_at)
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._busy = False

    def _next_batch(self) -> tuple[list[tuple[Q, asyncio.Future[A]]], int]:
        """Takes the next batch from the queue. Returns it with its units of work."""
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        batch_size = batch_units = 0
        unit_limit = self.pace.units_within(BATCH_S)
        while self._queue and len(batch) < self.request_limit:
            request, units, future = self._queue[0]
            if future.done():  # its caller has stopped waiting
                self._queue.popleft()
                self._queued_units -= units
                continue
            batch_size += self.size(request)
            batch_units += units
            if batch and (batch_size > self.size_limit or batch_units > unit_limit):
                batch_units -= units
                break
            self._queue.popleft()
            self._queued_units -= units
            batch.append((request, future))
        return batch, batch_units
