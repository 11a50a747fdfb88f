"""Runs a transform in its own process: `WorkerProcess`. A thread of a pool owns it and sends its items to it.

If the process dies, the item is sent to a new one, a few times. Results of a dead process are never used, so no result
comes twice.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from sluice.ingest.errors import Closed
from sluice.ingest.process import protocol
from sluice.ingest.process.child import Child, Died, Overdue
from sluice.ingest.process.shared_memory import Region

_START_S = 120.0
_WEIGH_S = 0.01  # between two looks at the memory of a process that starts


class WorkerError(RuntimeError):
    """Something about a worker process went wrong."""


class SlowStart(WorkerError):
    """A process has not started in time. Its function can be called here."""


class WorkerClosed(WorkerError, Closed):
    """The worker was closed before or during a call."""


class FunctionError(WorkerError):
    """The user's function raised an error. `type`, `text` and `trace` describe it. `kinds` names its class and that
    class's bases."""

    def __init__(self, label: str, error: Any):
        self.type, self.text, self.trace, self.kinds = protocol.described(error)
        super().__init__(f"{label}: {self.type}: {self.text}\nin the worker process:\n{self.trace}")

    @staticmethod
    def of(label: str, error: Any) -> FunctionError:
        """Makes the error from its description. A MemoryError there becomes a MemoryError here too."""
        made = FunctionError(label, error)
        return FunctionMemoryError(label, error) if "MemoryError" in made.kinds else made


class FunctionMemoryError(FunctionError, MemoryError):
    """The user's function ran out of memory in its own process."""


class WorkerCrashed(WorkerError):
    """One item ended its worker several times."""

    def __init__(self, label: str, deaths: list[str], stack: str):
        self.stack = stack
        super().__init__(
            f"{label}: ended its worker {len(deaths)} times ({'; '.join(deaths)}); on_error=quarantine "
            f"skips the rows of such items" + (f"\nits last stack:\n{stack}" if stack else "")
        )


@dataclass(eq=False)
class WorkerProcess:
    """Calls `module:function` in its own process, one call at a time. Any thread may call `close` and `stack`.

    The function takes a dict of arrays, which are valid during the call. It may write into them, and may return a dict
    of other arrays."""

    function: str
    _: KW_ONLY
    limit_s: float | None = None
    """The time that an item may take."""
    deaths: int = 3
    """How many processes one item may end."""
    restarted: Callable[[], None] = lambda: None
    """Called when a process replaces one that died."""
    charge: Callable[[int, bool], None] = lambda size, own: None
    """Called with memory taken (+) or given back (-), and whether it is the process's own."""
    expected_bytes: int = 0
    """The memory of its own that is charged until more was measured."""

    def __post_init__(self) -> None:
        self._turn, self._state = threading.Lock(), threading.Lock()
        self._region = Region(lambda size: self.charge(size, False))
        self._child: Child | None = None
        self._starter: threading.Thread | None = None
        self._is_starting = False
        self._charged = self.bytes = 0
        """The most memory of its own that a process was seen to use."""
        self._spent = (0.0, 0.0)
        """The process's seconds on a core, and of waiting for one, that were already told. Those of its start are in no
        call."""
        self.too_large = False
        """Whether its process was killed while it started: here, because it took more than was free, or by the kernel,
        because memory ran out."""
        self._lost = False
        self._slow_start: SlowStart | None = None
        """Why no process is started any more."""
        self._closed = False
        self._charge_own(self.expected_bytes)

    @property
    def pid(self) -> int | None:
        """The id of its process. None before the first call, after `close`, and between a death and the next call."""
        child = self._child
        return child.process.pid if child else None

    @property
    def is_starting(self) -> bool:
        """Whether the process is being started, here or in the background."""
        return self._is_starting or (self._starter is not None and self._starter.is_alive())

    def wait_for_start(self) -> None:
        """Waits until a start in the background has ended, in success or in failure."""
        if self._starter is not None:
            self._starter.join()

    def start(self) -> None:
        """Starts the process now. Otherwise the first call starts it, and waits for that."""
        with self._turn:
            try:
                self._running()
            except (Died, protocol.InvalidMessage) as death:
                self.too_large = "SIGKILL" in str(death)
                self._lost = True
                self._forget()
                raise WorkerError(f"worker for {self.function} cannot start: {death}") from None

    def start_in_background(self, most_bytes: int) -> None:
        """Starts the process. If it cannot start, the next call raises the error. If it takes more than `most_bytes`
        while it starts, the worker is killed."""

        def start() -> None:
            with contextlib.suppress(WorkerError, OSError):
                self.start()

        def weigh() -> None:
            starting.start()
            while starting.is_alive():
                starting.join(_WEIGH_S)
                self._weigh()
                if self.bytes > most_bytes:
                    self.too_large = True
                    self.kill()

        starting = threading.Thread(target=start, daemon=True, name="sluice-start")
        self._starter = threading.Thread(target=weigh, daemon=True, name="sluice-weigh")
        self._starter.start()

    def call(self, columns: protocol.Columns, label: str = "item") -> dict[str, protocol.Array]:
        """Returns all columns as the function left or returned them. `label` names the item in errors.

        The caller's arrays are not changed. The returned arrays are valid until the next call."""
        with self._turn:
            died: list[str] = []
            while True:
                try:
                    result = self._attempt(columns, label)
                    self._weigh()
                    return result
                except (Died, protocol.InvalidMessage) as death:
                    how, _, stack = str(death).partition("\n")
                    died.append(how)
                    self._lost = True
                    stack = stack or (self._child.trace() if self._child else "")
                    self._forget()
                except (KeyboardInterrupt, SystemExit):
                    # The process may be working on the item, so it is ended too.
                    self._forget()
                    raise
                if self._closed:
                    raise WorkerClosed(f"{label}: the worker was closed")
                if len(died) >= self.deaths:
                    raise WorkerCrashed(label, died, stack)

    def spent(self) -> tuple[float, float]:
        """Returns the process's seconds on a core and of waiting for one, in calls since this was last asked."""
        pid = self.pid
        if pid is None:
            return 0.0, 0.0
        before, self._spent = self._spent, core_seconds(pid)
        return self._spent[0] - before[0], self._spent[1] - before[1]

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
            self._region.close()
            self._charge_own(0)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, columns: protocol.Columns, label: str) -> dict[str, protocol.Array]:
        child, region = self._running(), self._region
        layout = protocol.RegionLayout(columns)
        region.reserve(layout.size)
        child.send({"region": [region.size, layout.write(region.bytes())]})
        reply = child.receive(self.limit_s)
        if "refused" in reply:
            raise region.refusal(*protocol.refused(reply))
        region.measure()
        if "error" in reply:
            raise FunctionError.of(label, reply["error"])
        return protocol.read(region.bytes(), reply.get("index"))[0]

    def _running(self) -> Child:
        """Returns the child. Starts one if there is none. A start that takes too long is not repeated, except if items
        have a limit, because then only a process can call the function."""
        child = self._child
        if child is not None:
            return child
        if self._slow_start is not None:
            raise self._slow_start
        if self._lost and not self._closed:
            self.restarted()
        self._is_starting = True
        try:
            with self._state:
                if self._closed:
                    raise WorkerClosed("the worker is closed")
                child = self._child = Child(self.function, self._region.fd)
            reply = child.receive(_START_S)
        except Overdue as death:
            if self.limit_s is not None or self._closed:
                raise
            self._slow_start = SlowStart(str(death))
            self._forget()
            raise self._slow_start from None
        finally:
            self._is_starting = False
        if "error" in reply:
            self._forget()
            raise FunctionError.of(f"worker for {self.function} cannot start", reply["error"])
        self._lost = False
        self._spent = core_seconds(child.process.pid)
        return child

    def _forget(self) -> None:
        with self._state:
            child, self._child = self._child, None
        if child is not None:
            child.close()

    def _weigh(self) -> None:
        """Measures the memory of the process, and charges it. After `close`, nothing is charged any more."""
        with self._state:
            self.bytes = max(self.bytes, anonymous_bytes(self.pid))
            if not self._closed:
                self._charge_own(max(self._charged, self.bytes))

    def _charge_own(self, size: int) -> None:
        if size != self._charged:
            self.charge(size - self._charged, True)
            self._charged = size


def anonymous_bytes(pid: int | None) -> int:
    """Returns the bytes of a process's own memory. 0: it has ended. psutil takes twenty times as long."""
    try:
        _, resident, shared, *_ = _numbers_of(pid, "statm")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (resident - shared) * resource.getpagesize()


def core_seconds(pid: int) -> tuple[float, float]:
    """Returns the seconds on a core and of waiting for one since a process's start. Zeros if it has ended, or if the
    kernel does not count them. psutil does not read the time of waiting for a core."""
    try:
        cpu, waited, *_ = _numbers_of(pid, "schedstat")
    except (OSError, ValueError):
        return 0.0, 0.0
    return cpu / 1e9, waited / 1e9


def _numbers_of(pid: int | None, name: str) -> list[int]:
    """Returns the numbers in a file of the kernel about a process. Python's own files take twice as long."""
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return list(map(int, os.read(descriptor, 256).split()))
    finally:
        os.close(descriptor)
