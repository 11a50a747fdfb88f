"""`Threads`: calls a function on many items with several threads, and can stop them quickly."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from sluice.common.errors import InputError
from sluice.etl.jobs.engine import JobFailure

T = TypeVar("T")
R = TypeVar("R")


class JobEnded(Exception):
    """Raised in a thread when the job has ended, so that its work is no longer needed."""


class Threads:
    """Threads that stop at their next call of `check_wanted` after `close`."""

    def __init__(self, count: int) -> None:
        self.count, self._stopped = count, threading.Event()
        self._pool = ThreadPoolExecutor(count, "sluice-etl")
        self._running: set[Future[Any]] = set()

    def check_wanted(self) -> None:
        """Raises `JobEnded` if the job has ended. A thread calls it between short steps of its work."""
        if self._stopped.is_set():
            raise JobEnded

    def while_wanted(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            self.check_wanted()
            yield item
        self.check_wanted()

    def map(
        self, function: Callable[[T], R], items: Iterable[T], ahead: int | None = None
    ) -> Iterator[R]:
        """Calls a function on each item, and yields the results in order. At most `ahead` calls wait or run."""
        most = ahead or 2 * self.count
        waiting = deque[Future[R]]()
        for item in items:
            self.check_wanted()
            waiting.append(self._pool.submit(self._call, function, item))
            self._running.add(waiting[-1])
            waiting[-1].add_done_callback(self._running.discard)
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _call(self, function: Callable[[T], R], item: T) -> R:
        self.check_wanted()
        try:
            return function(item)
        except (JobFailure, InputError, OSError, MemoryError, JobEnded):
            raise
        except Exception as error:  # a user's function may raise anything
            kind = type(error)
            raise JobFailure(
                f"{kind.__module__}.{kind.__qualname__}: {error}; nothing was published"
            ) from error

    def close(self) -> None:
        """Ends the threads, and waits at most a second for them. Waiting calls never begin. Running calls end at their
        next step."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(CancelledError):
            wait(set(self._running), timeout=1.0)
