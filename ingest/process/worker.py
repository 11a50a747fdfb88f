"""Transforms in processes of their own: `WorkerProcess`, which a pool's thread owns and through which it sends its
items.

An item whose worker dies is sent to a fresh one, a few times; what a dead worker left is never used, so no result comes
twice.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from sluice.ingest.process import protocol
from sluice.ingest.process.child import Child, Died
from sluice.ingest.process.shared_memory import Region, SharedMemoryError, Shelf

_START_S = 120.0


class WorkerError(RuntimeError):
    """Something about a worker process went wrong."""


class WorkerClosed(WorkerError):
    """The worker was closed while somebody waited for it, or before."""


class FunctionError(WorkerError):
    """The user's function raised. `type`, `text`, `trace` and `kinds` (its class and those above) are the error's."""

    def __init__(self, label: str, error: dict[str, Any]):
        self.label = label
        self.type = error["type"]
        self.text = error["text"]
        self.trace = error["trace"]
        self.kinds = tuple(error["kinds"])
        super().__init__(f"{label}: {self.type}: {self.text}\nin the worker process:\n{self.trace}")

    @staticmethod
    def of(label: str, error: dict[str, Any]) -> FunctionError:
        """The error, as it crossed; one of memory as one that is a MemoryError here, too."""
        return (FunctionMemoryError if "MemoryError" in error["kinds"] else FunctionError)(
            label, error
        )


class FunctionMemoryError(FunctionError, MemoryError):
    """The user's function ran out of memory, in its own process alone."""


class WorkerCrashed(WorkerError):
    """One item ended its worker again and again. `label` names it, `deaths` says how each worker ended."""

    def __init__(self, label: str, deaths: list[str], stack: str):
        self.label = label
        self.deaths = tuple(deaths)
        self.stack = stack
        super().__init__(
            f"{label}: ended its worker {len(deaths)} times ({'; '.join(deaths)}); on_error=quarantine "
            f"sets such items aside" + (f"\nits last stack:\n{stack}" if stack else "")
        )


class RestartsExhausted(WorkerError):
    """Workers die faster than the restart budget allows."""


class RestartBudget:
    """How many dead workers may be replaced within a sliding window; one budget is shared by all workers of a run."""

    def __init__(
        self, limit: int = 20, window_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ):
        if limit < 0 or window_s <= 0:
            raise ValueError(f"RestartBudget: {limit} restarts in {window_s} s is no budget")
        self.limit = limit
        self.window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[float] = deque()
        self.used = 0

    def take(self, reason: str) -> None:
        """Counts a restart; RestartsExhausted if it would be one too many."""
        with self._lock:
            now = self._clock()
            while self._recent and self._recent[0] <= now - self.window_s:
                self._recent.popleft()
            if len(self._recent) >= self.limit:
                raise RestartsExhausted(
                    f"more than {self.limit} workers died within {self.window_s:g} s; the last: "
                    f"{reason}. Look for a memory limit (dmesg), or a crash in native code"
                )
            self._recent.append(now)
            self.used += 1


class WorkerProcess:
    """Calls `module:function` in a process of its own. One call at a time; `close` and `stack` may be called from any
    thread.

    The function takes a dict of arrays, valid during the call. It may write into them and return a dict of others."""

    def __init__(
        self,
        function: str,
        *,
        limit_s: float | None = None,
        memory_limit: int | None = None,
        deaths: int = 3,
        budget: RestartBudget | None = None,
        charge: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`limit_s` is the time an item may take, `memory_limit` the bytes the function may take beyond the worker's
        own, `deaths` how many workers one item may end. `charge` is called with shared memory taken (+) and given back
        (-)."""
        if not re.fullmatch(r"[\w.]+:\w+", function) or function.startswith("__main__:"):
            raise ValueError(
                f"function {function!r}: name it as module:function, in a module that can be imported"
            )
        if (
            deaths < 1
            or (limit_s is not None and limit_s <= 0)
            or (memory_limit is not None and memory_limit <= 0)
        ):
            raise ValueError(
                f"WorkerProcess: deaths={deaths}, limit_s={limit_s}, memory_limit={memory_limit}: "
                "each must be above 0"
            )
        self._function = function
        self._limit_s = limit_s
        self._memory_limit = memory_limit
        self._deaths = deaths
        self._budget, self._clock = budget or RestartBudget(clock=clock), clock
        self._turn, self._state = threading.Lock(), threading.Lock()
        self._child: Child | None = None
        self._shelf = Shelf(charge)
        self._sequence = 0
        self._lost: str | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of its process now; None before the first call, after `close`, and between a death and the next
        call."""
        child = self._child
        return child.process.pid if child else None

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that it holds now, including results still in use."""
        return self._shelf.bytes

    def start(self) -> None:
        """Starts the process, so that the first item need not wait for it. Otherwise the first call does."""
        with self._turn:
            try:
                self._running()
            except Died as death:
                self._forget()
                raise WorkerError(f"worker for {self._function} cannot start: {death}") from None

    def call(
        self, columns: protocol.Columns, label: str = "item", memory_limit: int | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns all columns as the function left or returned them. `label` names the item in errors, say by its row
        group; `memory_limit` applies to this item, instead of the worker's.

        The caller's arrays are not written. Those returned are in shared memory, which is used again when the last of
        them is gone."""
        with self._turn:
            died: list[str] = []
            while True:
                try:
                    return self._attempt(columns, label, memory_limit)
                except Died as death:
                    how, _, stack = str(death).partition("\n")
                    died.append(how)
                    self._lost = f"{label}: {how}"
                    stack = stack or (self._child.trace() if self._child else "")
                    self._forget()
                except (
                    KeyboardInterrupt,
                    SystemExit,
                ):  # it may be in the middle of the item, which is fine
                    self._forget()
                    raise
                if self._closed:
                    raise WorkerClosed(f"{label}: the worker was closed")
                if len(died) >= self._deaths:
                    raise WorkerCrashed(label, died, stack)

    def stack(self) -> str:
        """Says what the worker does now, for a person who looks for a hang."""
        with self._state:
            return self._child.stack() if self._child else ""

    def kill(self) -> None:
        """Ends the process now without waiting; a call then raises WorkerClosed. `close` has to follow."""
        with self._state:
            self._closed = True
            if self._child:
                self._child.kill()

    def close(self) -> None:
        """Ends the worker, even in the middle of a call, which then raises WorkerClosed. A second call does nothing."""
        with self._state:
            self._closed = True
            if self._child and self._turn.locked():
                self._child.kill()
        with self._turn:
            self._forget()
            self._shelf.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(
        self, columns: protocol.Columns, label: str, memory_limit: int | None
    ) -> dict[str, npt.NDArray[Any]]:
        child = self._running()
        self._sequence += 1
        layout = protocol.RegionLayout(columns)
        region, lent = self._shelf.take(), False
        try:
            region.reserve(layout.size)
            index = layout.write(region.bytes())
            child.send(
                {
                    "sequence": self._sequence,
                    "region": [region.number, region.size, index],
                    "keep": self._shelf.numbers(),
                    "memory_limit": memory_limit or self._memory_limit,
                },
                region,
            )
            reply, refused = self._reply(child), None
            if reply["kind"] == "need":
                refused = self._grow(child, region, reply["bytes"])
                reply = self._reply(child)
            if reply["kind"] == "done":
                # The region is lent last: from here on the arrays alone decide when it is idle again.
                data, lent = self._shelf.lend(region), True
                return protocol.read(data, reply["index"])[0]
        finally:
            if not lent:
                self._shelf.give_back(region)
        if refused is not None:
            raise refused
        raise FunctionError.of(label, reply)

    def _grow(self, child: Child, region: Region, size: int) -> SharedMemoryError | None:
        """Handles a result that does not fit after the input: makes room for it, or makes the worker let go of it."""
        try:
            region.reserve(size)
        except SharedMemoryError as error:
            child.send({"kind": "refused"})
            return error
        child.send({"kind": "grown", "size": region.size})
        return None

    def _reply(self, child: Child) -> dict[str, Any]:
        reply = child.receive(self._limit_s)
        if reply["sequence"] != self._sequence:
            raise WorkerError(
                f"worker answered item {reply['sequence']} while {self._sequence} was due"
            )
        return reply

    def _running(self) -> Child:
        """The child, which is started if there is none."""
        child = self._child
        if child is not None:
            return child
        if self._lost is not None and not self._closed:
            self._budget.take(self._lost)
        with self._state:
            if self._closed:
                raise WorkerClosed("the worker is closed")
            child = self._child = Child(self._function, self._clock)
        reply = child.receive(_START_S)
        if reply["kind"] == "error":
            self._forget()
            raise FunctionError(f"worker for {self._function} cannot start", reply)
        self._lost = None
        return child

    def _forget(self) -> None:
        with self._state:
            child, self._child = self._child, None
        if child is not None:
            child.close()
