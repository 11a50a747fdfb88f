"""Collects waiting requests into batches: `Batcher`.

There is no timer. When a batch is done, all requests that came meanwhile form the next one. A single request does not
wait. A small batch runs on the event loop's own thread: with another thread, each answer would pass the interpreter's
lock to that thread for milliseconds. A batch larger than INLINE_SIZE runs in another thread, so that the loop still
answers requests that need no model.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.dlrm.serving.decode import Refusal

INLINE_SIZE = 2**18
BATCH_SIZE = 2**21
"""The largest sum of sizes in one batch, unless a single request is larger."""
_WAITING_BATCHES = 32
_TURNS_BEFORE_BATCH = 4
"""Turns of the event loop before a batch, in which it sends finished answers and reads new requests."""


@dataclass(eq=False)
class Batcher:
    """Collects requests into batches on one event loop. `work` answers each request of a list. An answer that is an
    exception is raised for its caller."""

    work: Callable[[Sequence[Any]], Sequence[Any]]
    waiting_limit: int
    """The most requests that wait."""
    batch_limit: int = 128
    """The most requests in one batch."""

    def __post_init__(self) -> None:
        self.queue: deque[tuple[Any, int, asyncio.Future[Any]]] = deque()
        """The requests that wait, each with its size and its answer."""
        self._queued_size = 0
        self._running: asyncio.Task[None] | None = None

    async def ask(self, request: Any, size: int) -> Any:
        """Returns the answer to a request. `size` estimates its work: about the bytes of its rows. Raises Refusal at
        once if too much waits, or the error of `work`. If the caller stops waiting before the batch starts, the request
        is dropped."""
        if len(self.queue) >= self.waiting_limit or (
            self.queue and self._queued_size + size > _WAITING_BATCHES * BATCH_SIZE
        ):
            raise Refusal(503, f"{len(self.queue)} requests wait already", {"retry-after": "1"})
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self.queue.append((request, size, answer))
        self._queued_size += size
        if self._running is None:
            self._running = loop.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        while self.queue:
            for _ in range(_TURNS_BEFORE_BATCH):
                await asyncio.sleep(0)
            requests, futures, batch_size = list[Any](), list[asyncio.Future[Any]](), 0
            while self.queue and len(requests) < self.batch_limit:
                request, size, future = self.queue[0]
                is_wanted = not future.done()  # otherwise its caller has stopped waiting
                if is_wanted and requests and batch_size + size > BATCH_SIZE:
                    break
                self.queue.popleft()
                self._queued_size -= size
                if is_wanted:
                    requests.append(request)
                    futures.append(future)
                    batch_size += size
            if not requests:
                continue
            answers: Sequence[Any]
            try:
                if batch_size <= INLINE_SIZE:
                    answers = self.work(requests)
                else:
                    answers = await asyncio.to_thread(self.work, requests)
            except Exception as error:
                answers = [error] * len(requests)
            for future, answer in zip(futures, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        self._running = None
