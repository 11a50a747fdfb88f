"""Collects decoded row groups until windows are complete: `CompletedWindows`. `ReadWorker` reads row groups, in this
process or through `RemoteWork`.

A row group holds rows of several windows. To *gather* a window is to move its rows to their places in batches. If the
shuffle stage is fused with the read stage, the worker that reads a window's last row group also gathers the window.
Otherwise the shuffle stage's own workers do. Windows may become complete out of order. `in_order` restores the order.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.ingest.knobs import REMOTE
from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.shuffle import Block, Gatherer, Gathering, ReadRows, ReadTask, WindowPiece
from sluice.ingest.stages.transform import Arrays

CompleteWindow = Gathering | Block | BaseException
"""A window with all its rows, gathered (`Block`) or not. Or the error that gathering raised; `in_order` raises it when
the window is due."""


@dataclass(slots=True)
class ReadDone:
    """The result of one read: the windows that it completed, by number in the schedule, is_gathered or not."""

    schedule: EpochSchedule
    rows: int
    nbytes: int
    windows: list[tuple[int, CompleteWindow]]


@dataclass(slots=True)
class _Incomplete:
    """A window that lacks rows, with its pieces so far. With each piece, its first row in the window."""

    missing: int
    pieces: list[tuple[int, WindowPiece]]


class CompletedWindows:
    """The windows of a run that are not complete yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incomplete: dict[tuple[int, int], _Incomplete] = {}
        """The incomplete windows, by epoch and number of the window."""
        self._due: tuple[EpochSchedule, int] | None = None
        """The window that the consumer needs next: its schedule and its number there."""

    def add(self, read: ReadRows) -> list[tuple[int, CompleteWindow]]:
        """Adds the pieces of a read. Returns the windows that are complete now."""
        schedule = read.task.schedule
        complete: list[tuple[int, CompleteWindow]] = []
        with self._lock:
            for part, piece in zip(read.task.read.parts, read.pieces(), strict=True):
                number = part.window
                window = schedule.windows[number]
                found = self._incomplete.get((schedule.epoch, number))
                if found is None:
                    found = _Incomplete(window.rows, [])
                    self._incomplete[schedule.epoch, number] = found
                found.pieces.append((part.at, piece))
                found.missing -= piece.stop - piece.start
                if not found.missing:
                    del self._incomplete[schedule.epoch, number]
                    found.pieces.sort(key=lambda one: one[0])
                    pieces = tuple(one for _, one in found.pieces)
                    complete.append((number, Gathering(schedule, window, pieces)))
        return complete

    def ahead(self, gathering: Gathering) -> int:
        """Returns how many rows of a stream lie between the start of the next due window and the end of this one."""
        schedule, number = self._due or (gathering.schedule, 0)
        rows = gathering.window.first + gathering.window.rows - _first(schedule, number)
        if schedule.epoch != gathering.schedule.epoch:
            rows += _first(schedule, len(schedule.windows))
        return rows

    def in_order(self, reads: Iterator[ReadDone]) -> Iterator[Gathering | Block]:
        """Yields windows in the order in which the consumer needs them, as soon as reads complete them."""
        for schedule, group in itertools.groupby(reads, lambda read: read.schedule):
            waiting: dict[int, CompleteWindow] = {}
            due = 0
            for read in group:
                self._due = schedule, due
                waiting |= dict(read.windows)
                read.windows.clear()
                while due in waiting:
                    due += 1
                    self._due = schedule, due
                    window = waiting.pop(due - 1)
                    if isinstance(window, BaseException):
                        raise window
                    yield window


def _first(schedule: EpochSchedule, number: int) -> int:
    """Returns the first row of a window in its stream. For the number after the last window: the end of the last."""
    if number < len(schedule.windows):
        return schedule.windows[number].first
    return schedule.windows[-1].first + schedule.windows[-1].rows


class NoWorkerAnswers(Exception):
    """No remote worker answers. The caller does the work itself."""


class RemoteWork(Protocol):
    """Remote workers (`ingest/remote`). Any thread may call all methods. `call` and `read` may raise
    `NoWorkerAnswers`."""

    requests: int
    """How many reads to request at once at the start."""

    def call(self, function: str, arrays: Arrays, where: str) -> Arrays:
        """Calls `module:function` and returns the columns that it changed or added. Does not write to `arrays`."""

    def read(self, task: ReadTask, charge: Charge) -> ReadRows:
        """Returns the rows of a read that a worker did."""

    def use(self, requests: int) -> None:
        """Announces how many reads and calls will be under way at once. 0: no worker is needed."""

    def watch(self, charge: Callable[[int], None]) -> None:
        """Sets the function that is called when workers on this host take memory (+) or give it back (-)."""


def read_where_set(
    read: Callable[[ReadTask, Charge], ReadRows],
    remote: RemoteWork | None,
    backend: Callable[[], str],
) -> Callable[[ReadTask, Charge], ReadRows]:
    """Returns a function that reads on a remote worker if `backend` says so at that moment and a worker answers.
    Otherwise it reads in this process."""
    if remote is None:
        return read

    def read_anywhere(task: ReadTask, charge: Charge) -> ReadRows:
        if backend() == REMOTE:
            with contextlib.suppress(NoWorkerAnswers):
                return remote.read(task, charge)
        return read(task, charge)

    return read_anywhere


class ReadWorker:
    """One worker that reads rows, or calls the last function over rows, and places the windows that are complete."""

    def __init__(
        self,
        read: Callable[[Any, Charge], ReadRows],
        windows: CompletedWindows,
        gather: Gatherer,
        *,
        clock: WorkerClock,
        shuffle: StageCounters,
        charge_window: Callable[[Gathering], Charge | None],
    ):
        """`charge_window` returns a charge for a window if this worker should gather it."""
        self._read = read
        self._windows = windows
        self._gather = gather
        self._charge_window = charge_window
        self._clock = clock
        self._shuffle = shuffle

    def __call__(self, item: Any, charge: Charge) -> ReadDone:
        read = self._read(item, charge)
        task = read.task
        size = read.nbytes
        # Corrected before `add`: after it, other workers may use the rows and release the charge.
        charge.correct(size)
        done = ReadDone(task.schedule, task.read.rows, size, self._windows.add(read))
        del read
        for index, (number, window) in enumerate(done.windows):
            assert isinstance(window, Gathering)
            window_charge = self._charge_window(window)
            if window_charge is not None:
                self._clock.go_over(self._shuffle)
                done.windows[index] = number, self._gather_window(window, window_charge)
            del window
        return done

    def close(self) -> None:
        if close := getattr(self._read, "close", None):  # a function over rows may hold a process
            close()

    def _gather_window(self, window: Gathering, charge: Charge) -> Block | BaseException:
        """Gathers a window now. Returns an error instead of raising it, because the window may not be due yet."""
        try:
            block = self._gather(window, charge)
            charge.correct(block.nbytes)
        except BaseException as error:
            charge.release()
            return error
        self._clock.passed(self._shuffle, block.rows, block.nbytes)
        return block


def is_gathered(window: Gathering | Block) -> bool:
    """Whether the window's rows are already at their places in batches."""
    return isinstance(window, Block)
