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
from dataclasses import KW_ONLY, dataclass
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
    """Collects requests into batches on one event loop. `work` answers each request of a list."""

    work: Callable[[Sequence[Any]], Sequence[Any]]
    _: KW_ONLY
    size: Callable[[Any], int]
    """An estimate of the work of a request: about the bytes of its rows."""
    waiting_limit: int
    """The most requests that wait."""
    batch_limit: int = 128
    """The most requests in one batch."""
    on_batch: Callable[[int], None] = lambda _: None
    """Called with the number of requests in each batch."""

    def __post_init__(self) -> None:
        self._queue: deque[tuple[Any, int, asyncio.Future[Any]]] = deque()
        self._queued_size = 0
        self._running: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    async def ask(self, request: Any) -> Any:
        """Returns the answer to a request. Raises Refusal at once if too much waits, or the error of `work`. If the
        caller stops waiting before the batch starts, the request is dropped."""
        size = self.size(request)
        if len(self._queue) >= self.waiting_limit or (
            self._queue and self._queued_size + size > _WAITING_BATCHES * BATCH_SIZE
        ):
            raise Refusal(503, f"{len(self._queue)} requests wait already", {"retry-after": "1"})
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._queue.append((request, size, answer))
        self._queued_size += size
        if self._running is None:
            self._running = loop.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        while True:
            for _ in range(_TURNS_BEFORE_BATCH):
                await asyncio.sleep(0)
            batch: list[tuple[Any, asyncio.Future[Any]]] = []
            batch_size = 0
            while self._queue and len(batch) < self.batch_limit:
                request, size, future = self._queue[0]
                is_wanted = not future.done()  # otherwise its caller has stopped waiting
                if is_wanted and batch and batch_size + size > BATCH_SIZE:
                    break
                self._queue.popleft()
                self._queued_size -= size
                if is_wanted:
                    batch.append((request, future))
                    batch_size += size
            if not batch:
                self._running = None
                return
            requests = [request for request, _ in batch]
            try:
                self.on_batch(len(batch))
                if batch_size <= INLINE_SIZE:
                    answers = self.work(requests)
                else:
                    answers = await asyncio.to_thread(self.work, requests)
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
