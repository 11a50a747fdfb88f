"""Runs a transform in its own process: `WorkerProcess`. A thread of a pool owns it and sends its items to it.

If the process dies, the item is sent to a new one, a few times. Results of a dead process are never used, so no result
comes twice.
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
    """The worker was closed before or during a call."""


class FunctionError(WorkerError):
    """The user's function raised an error. `type`, `text` and `trace` describe it. `kinds` names its class and that
    class's bases."""

    def __init__(self, label: str, error: dict[str, Any]):
        self.label = label
        self.type = error["type"]
        self.text = error["text"]
        self.trace = error["trace"]
        self.kinds = tuple(error["kinds"])
        super().__init__(f"{label}: {self.type}: {self.text}\nin the worker process:\n{self.trace}")

    @staticmethod
    def of(label: str, error: dict[str, Any]) -> FunctionError:
        """Makes the error from its description. A MemoryError there becomes a MemoryError here too."""
        return (FunctionMemoryError if "MemoryError" in error["kinds"] else FunctionError)(
            label, error
        )


class FunctionMemoryError(FunctionError, MemoryError):
    """The user's function ran out of memory in its own process."""


class WorkerCrashed(WorkerError):
    """One item ended its worker several times. `label` names the item, and `deaths` says how each process ended."""

    def __init__(self, label: str, deaths: list[str], stack: str):
        self.label = label
        self.deaths = tuple(deaths)
        self.stack = stack
        super().__init__(
            f"{label}: ended its worker {len(deaths)} times ({'; '.join(deaths)}); on_error=quarantine "
            f"skips the rows of such items" + (f"\nits last stack:\n{stack}" if stack else "")
        )


class RestartsExhausted(WorkerError):
    """Workers died more often than the restart budget allows."""


class RestartBudget:
    """How many dead workers may be replaced within a sliding window. All workers of a run share one budget."""

    def __init__(
        self, limit: int = 20, window_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ):
        if limit < 0 or window_s <= 0:
            raise ValueError(
                f"RestartBudget: {limit} restarts in {window_s} s; the first must be 0 or more, the second above 0"
            )
        self.limit = limit
        self.window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[float] = deque()
        self.used = 0

    def take(self, reason: str) -> None:
        """Counts a restart. Raises RestartsExhausted if it exceeds the budget."""
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
    """Calls `module:function` in its own process, one call at a time. Any thread may call `close` and `stack`.

    The function takes a dict of arrays, which are valid during the call. It may write into them, and may return a dict
    of other arrays."""

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
        """- `limit_s` is the time that an item may take.
        - `memory_limit` is the bytes that the function may take beyond the process's own.
        - `deaths` is how many processes one item may end.
        - `charge` is called with shared memory taken (+) and given back (-)."""
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
        """The id of its process. None before the first call, after `close`, and between a death and the next call."""
        child = self._child
        return child.process.pid if child else None

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that it holds now, including results in use."""
        return self._shelf.bytes

    def start(self) -> None:
        """Starts the process now. Otherwise the first call starts it, and waits for that."""
        with self._turn:
            try:
                self._running()
            except Died as death:
                self._forget()
                raise WorkerError(f"worker for {self._function} cannot start: {death}") from None

    def call(
        self, columns: protocol.Columns, label: str = "item", memory_limit: int | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns all columns as the function left or returned them. `label` names the item in errors. `memory_limit`
        applies to this item instead of the worker's limit.

        The caller's arrays are not changed. The returned arrays lie in shared memory, which is reused when the last of
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
                except (KeyboardInterrupt, SystemExit):
                    # The process may be working on the item, so it is ended too.
                    self._forget()
                    raise
                if self._closed:
                    raise WorkerClosed(f"{label}: the worker was closed")
                if len(died) >= self._deaths:
                    raise WorkerCrashed(label, died, stack)

    def stack(self) -> str:
        """Returns the stacks of the process now, to find out why it hangs."""
        with self._state:
            return self._child.stack() if self._child else ""

    def kill(self) -> None:
        """Kills the process without waiting. A running call raises WorkerClosed. Call `close` afterwards."""
        with self._state:
            self._closed = True
            if self._child:
                self._child.kill()

    def close(self) -> None:
        """Ends the worker. A running call raises WorkerClosed. A second `close` does nothing."""
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
                # The region is lent last. From here on, the arrays' lifetime decides when it is idle again.
                data, lent = self._shelf.lend(region), True
                return protocol.read(data, reply["index"])[0]
        finally:
            if not lent:
                self._shelf.give_back(region)
        if refused is not None:
            raise refused
        raise FunctionError.of(label, reply)

    def _grow(self, child: Child, region: Region, size: int) -> SharedMemoryError | None:
        """Handles a result that does not fit into the region after the input: grows the region, or tells the worker to
        discard the result."""
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
        """Returns the child. Starts one if there is none."""
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
