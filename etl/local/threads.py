"""Runs a job's work on this machine's threads: `Threads` calls a function on one item after another, a few ahead, and
stops within a moment."""

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
    """The job ends, so a thread's current work is not needed."""


class Threads:
    """Threads that check between two steps whether they are still needed."""

    def __init__(self, count: int) -> None:
        self.count, self._stopped = count, threading.Event()
        self._pool = ThreadPoolExecutor(count, "sluice-etl")
        self._running: set[Future[Any]] = set()

    def wanted(self) -> None:
        """Raises `JobEnded` if the job has ended. A thread calls it between two steps of a moment each."""
        if self._stopped.is_set():
            raise JobEnded

    def over(
        self, function: Callable[[T], R], items: Iterable[T], ahead: int | None = None
    ) -> Iterator[R]:
        """Calls a function on each item, and yields the results in order. At most `ahead` calls wait or run."""
        most, waiting = ahead or 2 * self.count, deque[Future[R]]()
        for item in items:
            self.wanted()
            waiting.append(self._pool.submit(self._call, function, item))
            self._running.add(waiting[-1])
            waiting[-1].add_done_callback(self._running.discard)
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _call(self, function: Callable[[T], R], item: T) -> R:
        self.wanted()
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
        """Ends the threads. Waiting work never begins, and running work ends at its next step."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(CancelledError):
            wait(set(self._running), timeout=1.0)
