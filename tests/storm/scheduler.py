"""Threads that run one at a time, in an order drawn from a seed, on a clock that is moved by hand: `Scheduler`.

Every lock, condition, event and wait of the code under test (tests.storm.threads) calls `point` or `wait` here, and
there another thread may go on. The real interpreter threads below only carry the stacks: each stands before a gate of
its own, and exactly one gate is open. So the same seed gives the same run, step by step, and when nobody can go on
that is seen at once, with who waits for what.
"""

from __future__ import annotations

import _thread
import hashlib
import itertools
import operator
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

MOST_STEPS = 500_000  # one drawn seed of 25,000 took 237,240 and then ended
_UNFAIR_STEPS = 2000  # from then on everybody gets a turn: threads that look again and again would keep others out
_priority = operator.attrgetter("priority")


class Deviation(AssertionError):
    """Not the twin's rows, an account that does not add up, or something left behind."""


class Deadlock(AssertionError):
    """Nobody can go on, or it goes on without an end. The message says who waits for what."""


class Ended(BaseException):
    """The run is over: raised in all threads that are left, wherever they stand."""


class Killed(BaseException):
    """This thread stands for a process, which was killed."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the next thread is chosen."""

    switch: float = 0.3
    """The share of points at which another thread goes on, any of those that can."""
    changes: frozenset[int] = frozenset()
    """Steps at which the running thread becomes the least important of all. If there are any, the most important
    thread that can go on does, always: few changes in a long run find what needs few (probabilistic concurrency
    testing)."""
    tick_s: float = 0.0
    """What every step takes on the clock."""
    early: float = 0.0
    """The share of waits for a condition that end before anything happened, as conditions may."""
    patient: bool = False
    """A condition's wait never ends by its timeout: then a wake-up that was lost is a deadlock."""
    lines: float = 0.0
    """The share of lines of the code under test before which another thread may go on; 0: only where it synchronises,
    which finds no lock that is missing, but is twenty times as fast."""

    @classmethod
    def draw(cls, chance: Random, *, patient: bool = False, lines: bool = True) -> Way:
        few = chance.random() < 0.3
        return cls(
            switch=chance.choice((0.02, 0.05, 0.1, 0.4)),
            changes=frozenset(chance.randrange(1, 1500) for _ in range(chance.randint(1, 8)))
            if few
            else frozenset(),
            tick_s=chance.choice((0.0, 0.0, 1e-5, 1e-3, 2e-2)),
            early=chance.choice((0.0, 0.0, 0.02, 0.2)),
            patient=patient,
            lines=chance.choice((0.02, 0.2)) if lines and chance.random() < 0.02 else 0.0,
        )


class Member:
    """An interpreter's thread, used again and again."""

    def __init__(self, crew: Crew):
        self._crew = crew
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.job: Callable[[], Task] | None = None
        self.over = _thread.allocate_lock()
        self.over.acquire()
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        while True:
            self.gate.acquire()
            job, self.job = self.job, None
            if job is None:
                self.over.release()
                return
            after = job()
            del job
            self._crew.idle.append(self)  # before the next one runs, who may need a thread
            gate = after.gate
            del after  # it is not held while nothing is done here
            gate.release()


class Crew:
    """The interpreter's threads that carry a run's threads. One crew serves many runs, one after the other."""

    def __init__(self) -> None:
        self.idle: list[Member] = []

    def take(self) -> Member:
        return self.idle.pop() if self.idle else Member(self)

    def close(self) -> None:
        while self.idle:
            member = self.idle.pop()
            member.gate.release()
            member.over.acquire()


class Task:
    """One thread of a run."""

    __slots__ = (
        "deadline",
        "doom",
        "ended",
        "gate",
        "joined",
        "name",
        "number",
        "on",
        "parent",
        "priority",
        "thread",
        "timed_out",
    )

    def __init__(self, number: int, name: str, gate: Any, priority: float):
        self.number, self.name, self.gate, self.priority = number, name, gate, priority
        self.on: Any = None
        """What it waits for; None: it can go on."""
        self.deadline: float | None = None
        self.timed_out = self.ended = False
        self.doom: BaseException | None = None
        self.joined: list[Task] = []
        self.parent: Task | None = None
        self.thread: Any = None
        """What the code under test has for it."""

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


class Scheduler:
    """One run. The thread that makes it is its first task."""

    latest: Scheduler | None = None
    """The one that was made last."""

    def __init__(
        self, chance: Random, way: Way, crew: Crew, traced: Callable[[str], bool] = lambda _: False
    ):
        """`traced` says of which files the lines count, if the way goes by lines."""
        self.chance, self.way, self._crew, self._traced = chance, way, crew, traced
        Scheduler.latest = self
        self.now = 0.0
        self.steps = self.waits = self.switches = 0
        self.trace: list[tuple[int, Any]] = []
        self.made: dict[int, Any] = {}
        """Locks and the like by their numbers: of what kind, and where they were made."""
        self.failure: BaseException | None = None
        self.over = False
        self.case: Any = None
        self.world: Any = None
        """What the run's store and processes go by."""
        self.died: list[str] = []
        """Of each thread that ended by an error: what Python would have printed."""
        self._objects, self._numbers = itertools.count(1), itertools.count()
        self._lines: dict[Any, bool] = {}
        self._stopped = False
        self._tick_s, self._switch, self._changes, self._random = (
            way.tick_s,
            way.switch,
            way.changes,
            chance.random,
        )
        gate = _thread.allocate_lock()
        gate.acquire()
        self.current = self.main = Task(next(self._numbers), "main", gate, chance.random())
        self.tasks: list[Task] = [self.main]
        self._ready: list[Task] = [self.main]
        self._sleeping: list[Task] = []
        if way.lines:
            sys.settrace(self._on_call)

    def number(self, where: str) -> int:
        """For a lock or the like that was made there: its name in the trace."""
        number = next(self._objects)
        self.made[number] = where
        return number

    def digest(self) -> str:
        """Of everything that happened, in its order."""
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=8).hexdigest()

    def story(self, count: int) -> list[str]:
        """The last steps, for a person."""
        names = {task.number: str(task) for task in self.tasks}
        return [f"{names[number]}: {self._step(what)}" for number, what in self.trace[-count:]]

    def _step(self, what: Any) -> str:
        if isinstance(what, int):
            return f"releases {self.made[-what]}" if what < 0 else f"at {self.made.get(what, what)}"
        return what if isinstance(what, str) else f"waits for {what}"

    # ---- what threads call

    def point(self, what: Any) -> None:
        """Another thread may go on here."""
        if self._stopped:
            self._after()
            return
        me = self.current
        self.trace.append((me.number, what))
        self.steps += 1
        if self._tick_s and self._sleeping:
            self.now += self._tick_s
            self._ring()
        ready = self._ready
        if len(ready) > 1:
            if self._changes:
                if self.steps in self._changes:
                    me.priority = -self.steps
                elif self.steps > _UNFAIR_STEPS:
                    self._changes = frozenset()
                after = max(ready, key=_priority)
                if after is not me:
                    self._go(me, after)
            elif self._random() < self._switch:
                after = ready[int(self._random() * len(ready))]
                if after is not me:
                    self._go(me, after)
        if self.steps > MOST_STEPS:
            self._stop(me, f"no end after {MOST_STEPS} steps")
        if me.doom is not None:
            raise me.doom

    def wait(self, on: Any, timeout: float | None = None) -> bool:
        """The running thread cannot go on before `wake`. False: it was the timeout."""
        me = self.current
        if self._stopped:
            self._after()
            return False
        self.trace.append((me.number, on))
        self.waits += 1
        if self.waits > MOST_STEPS:
            self._stop(me, f"no end after {MOST_STEPS} waits")
        me.on, me.timed_out = on, False
        self._ready.remove(me)
        if timeout is not None:
            me.deadline = self.now + max(0.0, timeout)
            self._sleeping.append(me)
        after = self._next()
        if after is not me:
            self._go(me, after)
        if me.doom is not None:
            raise me.doom
        return not me.timed_out

    def wake(self, task: Task) -> None:
        """It can go on."""
        if task.on is not None:
            task.on = None
            if task.deadline is not None:
                task.deadline = None
                self._sleeping.remove(task)
            self._ready.append(task)

    def start(self, name: str, function: Callable[[], Any]) -> Task:
        """A new thread."""
        member = self._crew.take()
        task = Task(next(self._numbers), name, member.gate, self.chance.random())
        task.parent = self.current
        self.tasks.append(task)
        self._ready.append(task)
        member.job = lambda: self._carry(task, function)
        return task

    def join(self, task: Task, timeout: float | None = None) -> None:
        end = None if timeout is None else self.now + timeout
        while not (task.ended or self.over):
            task.joined.append(self.current)
            if not self.wait(f"the end of {task}", None if end is None else end - self.now):
                return

    def kill(self, task: Task) -> None:
        """It ends at its next turn, whatever it does, and so do all that it started."""
        for started_task in self.tasks:
            started = started_task.parent is not None and isinstance(
                started_task.parent.doom, Killed
            )
            if (started_task is task or started) and not started_task.ended:
                started_task.doom = started_task.doom or Killed()
                self.wake(started_task)

    # ---- the run's end

    def finish(self) -> None:
        """Waits for all threads; raises what went wrong."""
        try:
            for task in self.tasks:
                if task is not self.main and not task.ended:
                    self.join(task)
        finally:
            self.close()
        if self.died:
            raise AssertionError("a thread ended by an error:\n" + "\n".join(self.died))

    def close(self) -> None:
        """Ends what is left. Locks and the like do nothing from here on."""
        sys.settrace(None)
        self.failure = self.failure or Ended()
        self._stopped = True
        self.current = self.main
        for task in self.tasks:
            if task is not self.main and not task.ended:
                task.doom = Ended()
                self.current = task
                task.gate.release()
                self.main.gate.acquire()
        self.over = True
        for task in self.tasks:
            task.doom = None  # with the frames that it came through

    def describe(self) -> str:
        """Who waits for what."""
        return "\n".join(
            f"  {task}: {'waits for ' + str(task.on) if task.on is not None else 'can go on'}"
            + (f" until {task.deadline:.3f} s" if task.deadline is not None else "")
            for task in self.tasks
            if not task.ended
        )

    # ---- inside

    def _after(self) -> None:
        if not self.over:
            raise Ended

    def _go(self, me: Task, after: Task) -> None:
        self.current = after
        self.switches += 1
        after.gate.release()
        me.gate.acquire()
        if self.failure is not None and me is self.main and not isinstance(self.failure, Ended):
            raise self.failure

    def _next(self) -> Task:
        """Who goes on, if the running one cannot. The clock moves only if nobody can."""
        while not self._ready:
            rings = [
                t
                for t in self._sleeping
                if not (self.way.patient and getattr(t.on, "patient", False))
            ]
            if not rings:
                return self._fail("nobody can go on")
            self.now = max(self.now, min(t.deadline for t in rings))  # type: ignore[type-var, assignment]
            self._ring()
        if self._changes:
            return max(self._ready, key=_priority)
        return self._ready[int(self.chance.random() * len(self._ready))]

    def _ring(self) -> None:
        for task in [t for t in self._sleeping if t.deadline <= self.now]:  # type: ignore[operator]
            if not (self.way.patient and getattr(task.on, "patient", False)):
                task.timed_out = True
                self.wake(task)

    def _stop(self, me: Task, why: str) -> None:
        self._go(me, self._fail(why))
        raise Ended

    def _fail(self, why: str) -> Task:
        """The first task raises it; all others end when the run is closed."""
        self._stopped = True
        self.failure = Deadlock(
            f"{why} after {self.now:.3f} s and {self.steps} steps:\n{self.describe()}"
        )
        if self.current is self.main:
            raise self.failure
        return self.main

    def _carry(self, task: Task, function: Callable[[], Any]) -> Task:
        """A whole thread; returns who goes on after it."""
        if self.way.lines:
            sys.settrace(self._on_call)
        try:
            if task.doom is not None:
                raise task.doom
            function()
        except (Ended, Killed):
            pass
        except BaseException:
            self.died.append(f"{task}: {traceback.format_exc()}")
        finally:
            sys.settrace(None)
        task.ended = True
        if self.failure is not None:
            return self.main
        self.trace.append((task.number, "end"))
        for joined in task.joined:
            self.wake(joined)
        self._ready.remove(task)
        after = self.current = self._next()
        return after

    def _on_call(self, frame: Any, _event: str, _argument: Any) -> Any:
        known = self._lines.get(frame.f_code)
        if known is None:
            known = self._lines[frame.f_code] = self._traced(frame.f_code.co_filename)
        return self._on_line if known else None

    def _on_line(self, frame: Any, event: str, _argument: Any) -> Any:
        if event == "line" and self.failure is None and self.chance.random() < self.way.lines:
            self.point(f"line {frame.f_lineno} of {frame.f_code.co_name}")
        return self._on_line
