"""Retries requests to a store: `RetryPolicy` says how often and how long, and `Retrier` retries, paces and counts.

This is not taken from a library, because clock, sleep and randomness are passed in, and the last error must name the
file and the number of attempts.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

# These errors are not retried: the answer will be the same.
PERMANENT = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


class DeliveryError(OSError):
    """A store did not deliver within its deadline and attempts. The message names the file and the attempts."""


class ThrottledError(OSError):
    """A store asks for fewer requests (HTTP 503 or 429)."""


class StoreClosed(DeliveryError):
    """The store was closed while a thread waited for it."""


def without_frames(error: BaseException) -> BaseException:
    """Removes the tracebacks from an error and its causes. Arrow keeps a store's errors for ever, and a traceback keeps
    the variables of all callers alive, including row groups."""
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:  # causes may form a cycle
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


class Clock:
    """Monotonic time, and a sleep that `stop` interrupts."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise StoreClosed("the store was closed")

    def stop(self) -> None:
        self._stopped.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long a read is tried. Waits double each time. Each is shortened at random, so that many ranks
    do not retry at the same moment."""

    attempts: int = 50
    """The most attempts for one read."""
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    deadline_s: float = 90.0
    """No attempt begins later than this after the first one. A store, or one of its files, may be missing for a
    minute."""

    def __post_init__(self) -> None:
        if not min(self.attempts, self.first_wait_s, self.longest_wait_s, self.deadline_s) > 0:
            raise ValueError(f"{self}: each number must be above 0")

    def wait_s(self, failed: int, chance: float) -> float:
        """Returns the wait after `failed` failed attempts. `chance` is uniform from 0 to 1."""
        return (0.5 + chance / 2) * min(
            self.longest_wait_s, self.first_wait_s * 2.0 ** (failed - 1)
        )


class Retrier:
    """Runs requests to one store under a policy. Many threads can use it.

    If the store throttles a request, no other one begins until that one is repeated."""

    def __init__(
        self, policy: RetryPolicy, clock: Clock, chance: Callable[[], float] = random.random
    ):
        self._policy = policy
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._next_at = 0.0
        """When the next request may begin, because the store asked for fewer."""
        self._counts = Counter[str](retries=0, gave_up=0, throttled=0)
        """Failed attempts that were repeated, requests that failed for good, and attempts after which the store asked
        for fewer requests."""

    def count(self, **more: int) -> dict[str, int]:
        """Adds to counters, and returns all of them."""
        with self._lock:
            self._counts.update(more)
            return dict(self._counts)

    def call(self, action: Callable[[], Result], description: str) -> Result:
        """Calls `action()`, and repeats it after each OSError that may be temporary. `description` names the action in
        the error."""
        began, failed = self._clock.now(), 0
        while True:
            if (pause := self._next_at - self._clock.now()) > 0:
                self._clock.sleep(pause)
            try:
                return action()
            except (*PERMANENT, StoreClosed):
                raise
            except OSError as error:
                failed += 1
                wait = self._policy.wait_s(failed, self._chance())
                now = self._clock.now()
                gives_up = (
                    failed >= self._policy.attempts or now - began + wait > self._policy.deadline_s
                )
                is_throttled = isinstance(error, ThrottledError)
                self.count(retries=not gives_up, gave_up=gives_up, throttled=is_throttled)
                if is_throttled:
                    self._next_at = max(self._next_at, now + wait)
                if gives_up:
                    raise DeliveryError(
                        f"{description}: failed {failed} times within {now - began:.1f} s (allowed: "
                        f"{self._policy.attempts} attempts, {self._policy.deadline_s:g} s; for more, use "
                        f"FileOpener(retry=RetryPolicy(deadline_s=…))); the last error: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            self._clock.sleep(wait)
