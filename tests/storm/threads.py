"""What stands for `threading` and `time` in the code under test: the same names, under a `Scheduler`.

Each object belongs to the run that was current when it was made, and does nothing once that run is over."""

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.storm.scheduler import Scheduler, Task

EPOCH_S = 1_900_000_000.0
"""The date on which every run begins."""
_runs: list[Scheduler] = []


def current() -> Scheduler:
    """The run that is on."""
    return _runs[-1]


def running() -> bool:
    """Whether a run is on."""
    return bool(_runs)


@contextmanager
def entered(run: Scheduler) -> Iterator[Scheduler]:
    """All that is made meanwhile belongs to this run."""
    _runs.append(run)
    try:
        yield run
    finally:
        run.close()
        _runs.remove(run)


class Place(NamedTuple):
    """Where an object was made."""

    kind: str
    code: Any
    line: int

    def __str__(self) -> str:
        return f"({self.kind} of {self.code.co_filename.rpartition('/')[2]}:{self.line})"


class _Named:
    """It says of itself where it was made, and who it is in the trace."""

    __slots__ = ("_number", "_run")
    patient = False

    def __init__(self) -> None:
        self._run = _runs[-1]
        frame = sys._getframe(2)
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back  # type: ignore[assignment]
        self._number = self._run.number(Place(type(self).__name__, frame.f_code, frame.f_lineno))

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self._number}"

    def __str__(self) -> str:
        return f"{self!r} {self._run.made[self._number]}"


class Lock(_Named):
    """A lock that its owner cannot take twice."""

    __slots__ = ("_owner", "_waiting")

    def __init__(self) -> None:
        super().__init__()
        self._owner: Task | None = None
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        run = self._run
        run.point(self._number)
        if run.over:
            return True
        return (
            self._take(None if timeout < 0 else timeout)
            if blocking or self._owner is None
            else False
        )

    def _take(self, timeout: float | None = None) -> bool:
        run = self._run
        end = None if timeout is None else run.now + timeout
        while self._owner is not None:
            self._waiting.append(run.current)
            if not run.wait(self, None if end is None else end - run.now):
                if run.current in self._waiting:
                    self._waiting.remove(run.current)
                return False
        self._owner = run.current
        return True

    def release(self) -> None:
        run = self._run
        if run.over or run.failure is not None:
            self._owner = None
            return
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._free()
        run.point(-self._number)

    def _free(self) -> None:
        self._owner = None
        for task in self._waiting:
            self._run.wake(task)
        self._waiting.clear()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __str__(self) -> str:
        return super().__str__() + (
            f", which {self._owner} holds" if self._owner is not None else ""
        )


class RLock(Lock):
    """A lock that its owner can take again."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        super().__init__()
        self._times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not None and self._owner is self._run.current:
            self._times += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._times = 1
        return True

    def release(self) -> None:
        run = self._run
        if run.over or run.failure is not None:
            self._owner = None
            return
        if self._owner is not run.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._times -= 1
        if not self._times:
            super().release()


class Condition(_Named):
    """Notified waiters take the lock again one after the other, in any order."""

    __slots__ = ("_lock", "_waiting", "acquire", "release")
    patient = True

    def __init__(self, lock: Any = None):
        super().__init__()
        self._lock: Any = lock if lock is not None else RLock()
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        run, lock = self._run, self._lock
        if run.over:
            return False
        if lock._owner is not run.current:
            raise RuntimeError("cannot wait on un-acquired lock")
        times = getattr(lock, "_times", 0)
        woken = True
        me = run.current
        self._waiting.append(me)
        lock._free()
        try:
            if run.way.early and run.chance.random() < run.way.early:
                run.point(self._number)
            else:
                woken = run.wait(self, timeout)
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            if run.failure is None:
                lock._take()
            if times:
                lock._times = times
        return woken

    def notify(self, n: int = 1) -> None:
        run = self._run
        if run.over or run.failure is not None:
            return
        if self._lock._owner is not run.current:
            raise RuntimeError("cannot notify on un-acquired lock")
        for task in self._waiting[:n]:
            run.wake(task)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event(_Named):
    """Set, or not."""

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        super().__init__()
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._run.point(self._number)
        self._set = True
        for task in self._waiting:
            self._run.wake(task)
        self._waiting.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        run = self._run
        run.point(self._number)
        end = None if timeout is None else run.now + timeout
        while not (self._set or run.over):
            self._waiting.append(run.current)
            if not run.wait(self, None if end is None else end - run.now):
                if run.current in self._waiting:
                    self._waiting.remove(run.current)
                break
        return self._set


class Thread:
    """A task of the run."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ):
        self._run, self._target, self._args, self._kwargs = _runs[-1], target, args, kwargs or {}
        self.name, self.daemon = name or getattr(target, "__name__", "thread"), daemon
        self.task: Task | None = None

    def start(self) -> None:
        target, args, kwargs = self._target, self._args, self._kwargs
        self._target = None  # as a real one: what it works on is not held by it once it ran
        assert target is not None, "threads can only be started once"
        self.task = self._run.start(self.name, lambda: target(*args, **kwargs))
        self.task.thread = self
        self._run.point(self.task.number)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.ended

    def join(self, timeout: float | None = None) -> None:
        assert self.task is not None, "cannot join thread before it is started"
        if not self.task.ended:
            self._run.join(self.task, timeout)

    @property
    def ident(self) -> int | None:
        return None if self.task is None else self.task.number


class local:
    """Attributes of each thread's own."""

    def __init__(self) -> None:
        self.__dict__["_run"], self.__dict__["_of"] = _runs[-1], {}

    def _own(self) -> dict[str, Any]:
        own: dict[str, Any] = self.__dict__["_of"].setdefault(
            self.__dict__["_run"].current.number, {}
        )
        return own

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value


class Threading:
    """The module `threading`, as far as the code under test needs it: a name that is missing here is an error."""

    Lock, RLock, Condition, Event, Thread, local = Lock, RLock, Condition, Event, Thread, local

    @staticmethod
    def current_thread() -> Any:
        return current().current.thread


class Time:
    """The module `time` likewise. No clock moves by itself."""

    @staticmethod
    def monotonic() -> float:
        return current().now

    thread_time = monotonic

    @staticmethod
    def time() -> float:
        return EPOCH_S + current().now

    @staticmethod
    def sleep(seconds: float) -> None:
        current().wait("time", seconds)


class Names:
    """The module `uuid`."""

    @staticmethod
    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=current().chance.getrandbits(128), version=4)
