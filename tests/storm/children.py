"""Worker processes of a storm: `StormChild`, behind which a thread of the run does what a process would.

The rank's side is the real one: `sluice.ingest.process.worker`, `sluice.ingest.process.child.Child`'s messages over a
real socket, regions of
shared memory. The process's side is the real server of `sluice.ingest.process.child_main`. Only what is the kernel's
is played here: that a
process starts, waits for its socket, is killed at any message, hangs, and that its end is seen.
"""

from __future__ import annotations

import select
import socket
from types import SimpleNamespace
from typing import Any

from sluice.ingest.process import child_main, protocol, worker
from sluice.ingest.process.child import Child
from tests.storm.scheduler import Killed, Scheduler, Task
from tests.storm.threads import Thread, current

_FIRST_PID = 2**23  # no process of the machine has such a number
_DEATH = -2  # stands for the descriptor that tells of its end


class Signal:
    """Wakes whoever waits for something to happen."""

    def __init__(self, name: str):
        self._name, self._waiting = name, list[Task]()

    def wait(self, timeout: float | None = None) -> None:
        run = current()
        self._waiting.append(run.current)
        run.wait(self, timeout)

    def give(self) -> None:
        for task in self._waiting:
            current().wake(task)
        self._waiting.clear()

    def __str__(self) -> str:
        return self._name

    __repr__ = __str__


class Fate:
    """What befalls the processes of a run: drawn as they come to each message."""

    def __init__(
        self,
        run: Scheduler,
        *,
        kill: float = 0.0,
        hang: float = 0.0,
        late: float = 0.0,
        slow_start: float = 0.0,
        most: int = 0,
    ):
        """Shares of messages at which a process is killed, hangs for good, or stands still for a while, and of
        starts that take too long; `most` deaths in all, so that no item ends three."""
        self._run, self._kill, self._hang, self._late, self._most = run, kill, hang, late, most
        self._slow_start = slow_start
        self.kills = self.hangs = self.pauses = self.slow_starts = 0
        self.children: list[StormChild] = []

    @property
    def deaths(self) -> int:
        return self.kills + self.hangs + self.slow_starts

    def start(self, child: StormChild) -> None:
        """As a process starts, in its own thread."""
        if self.deaths < self._most and self._run.chance.random() < self._slow_start:
            self.slow_starts += 1
            self._run.wait("time", 2 * worker._START_S)
        self.meet(child)

    def meet(self, child: StormChild) -> None:
        """At a message of a process, in its own thread."""
        chance = self._run.chance
        self._run.point(child.name)
        if self.deaths < self._most:
            if chance.random() < self._kill:
                self.kills += 1
                child.kill()
                raise Killed
            if chance.random() < self._hang:
                self.hangs += 1
                self._run.wait(f"nothing, {child.name} hangs")
        if chance.random() < self._late:
            self.pauses += 1
            self._run.wait("time", chance.random() * 0.8)

    def bury(self) -> None:
        """Takes back what a run that failed has left open."""
        for child in self.children:
            child._sock.close()
            child._theirs.close()

    def strike(self) -> None:
        """Kills one of those that run now, from outside, whatever it does."""
        there = [child for child in self.children if child.code is None]
        if there and self.deaths < self._most:
            self.kills += 1
            there[int(self._run.chance.random() * len(there))].kill()


class StormChild(Child):
    """A process that a thread of the run plays."""

    def __init__(self, function: str, region: int):
        self._function, self._region = function, region
        self._fate: Fate = current().world.fate
        self._sock, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pidfd = _DEATH
        self._poll = SimpleNamespace(poll=self._look)  # type: ignore[assignment]
        self._readable = {s: select.poll() for s in (self._sock, self._theirs)}
        for sock, poll in self._readable.items():
            poll.register(sock, select.POLLIN)
        number = len(self._fate.children)
        self.name = f"process {number}"
        self.to_process, self.to_rank = (
            Signal(f"{self.name}'s message"),
            Signal(f"an answer of {self.name}"),
        )
        self.process = SimpleNamespace(pid=_FIRST_PID + number)  # type: ignore[assignment]
        self.code: int | None = None
        self.closed = False
        self._fate.children.append(self)
        self._thread = Thread(target=self._live, name=self.name)
        self._thread.start()

    # ---- the rank's side

    def send(self, message: dict[str, Any]) -> None:
        current().point(self.name)
        super().send(message)
        self.to_process.give()

    def _look(self, limit_ms: float | None) -> list[tuple[int, int]]:
        """As poll on the socket and on the process's end."""
        run = current()
        end = None if limit_ms is None else run.now + limit_ms / 1000
        while True:
            run.point(self.name)
            events = [(fd, event) for fd, event in self._readable[self._sock].poll(0)]
            events += [(_DEATH, select.POLLIN)] if self.code is not None else []
            if events or (end is not None and run.now >= end):
                return events
            self.to_rank.wait(None if end is None else end - run.now)

    def stack(self) -> str:
        return f"the stack of {self.name}"

    def trace(self) -> str:
        return ""

    def kill(self) -> None:
        """As SIGKILL: it does nothing more."""
        if self.code is None:
            self._end_with(-9)
            if self._thread.task is not None:
                current().kill(self._thread.task)

    def close(self) -> None:
        self._sock.close()
        self.closed = True
        self.to_process.give()
        if self.code is None:
            self.to_rank.wait(0.5)  # it may leave by itself
        self._end()

    def _end(self) -> int:
        self.kill()
        assert self.code is not None
        return self.code

    # ---- the process's side

    def _live(self) -> None:
        try:
            self._fate.start(self)
            function = child_main.load(self._function)
            child_main.serve(self, function, self._region)  # type: ignore[arg-type]
        except protocol.Gone:
            pass
        finally:
            if self.code is None:
                self._end_with(0)

    def _end_with(self, code: int) -> None:
        self.code = code
        self._theirs.close()
        self.to_rank.give()

    def recvmsg(self, *arguments: Any) -> Any:
        """The socket, as the process has it."""
        self._fate.meet(self)
        while not self._readable[self._theirs].poll(0):
            self.to_process.wait()
        return self._theirs.recvmsg(*arguments)

    def sendmsg(self, *arguments: Any) -> Any:
        self._fate.meet(self)
        sent = self._theirs.sendmsg(*arguments)
        self.to_rank.give()
        self._fate.meet(self)
        return sent
