"""Collects decoded row groups until windows are complete: `Windows`. `ReadWorker` reads row groups, in this process or
on a remote worker.

A row group holds rows of several windows. If the shuffle stage is fused with the read stage, the worker that reads a
window's last row group also places the window's rows in batches. Otherwise the shuffle stage's own workers do. Windows
may become complete out of order. `Windows.in_order` restores the order.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule, RowsPlan
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.shuffle import Decoded, WindowRows


class Windows:
    """The windows of a run that the consumer has not taken yet."""

    def __init__(
        self,
        plan: RowsPlan,
        place: Callable[[WindowRows, Charge], WindowRows],
        counters: StageCounters,
        charge_early: Callable[[WindowRows, int], Charge | None],
    ) -> None:
        """`place` moves the rows of a window to their places. `counters` are those of the shuffle stage. `charge_early`
        returns a charge for a window, so many rows ahead of the due one, that a reader should place."""
        self.place, self.counters, self.charge_early = place, counters, charge_early
        self._stream_rows = plan.stream_rows
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int], WindowRows] = {}
        """The windows of which rows are there, by epoch and number of the window."""
        self._due: tuple[EpochSchedule, int] | None = None
        """The window that the consumer needs next: its schedule and its number there."""

    def add(self, read: Decoded) -> list[WindowRows]:
        """Adds the pieces of a read. Returns the windows that have all their rows now."""
        schedule = read.task.schedule
        done = schedule.step * self._stream_rows
        complete = []
        with self._lock:
            for part, piece in zip(read.task.read.parts, read.pieces(), strict=True):
                key = schedule.epoch, part.window
                rows = self._windows.get(key)
                if rows is None:
                    window = schedule.windows[part.window]
                    rows = WindowRows(schedule, window, max(window.first, done))
                    self._windows[key] = rows
                rows.pieces.append((part.at, piece))
                rows.missing -= piece.stop - piece.start
                if not rows.missing:
                    rows.pieces.sort(key=lambda one: one[0])
                    complete.append(rows)
        return complete

    def ahead(self, window: WindowRows) -> int:
        """Returns how many rows of a stream lie between the start of the next due window and the end of this one."""
        schedule, number = self._due or (window.schedule, 0)
        rows = window.end - _first(schedule, number)
        if schedule.epoch != window.schedule.epoch:
            rows += _first(schedule, len(schedule.windows))
        return rows

    def in_order(self, reads: Iterator[Decoded]) -> Iterator[WindowRows]:
        """Yields windows in the order in which the consumer needs them, as soon as reads complete them."""
        for schedule, group in itertools.groupby(reads, lambda read: read.task.schedule):
            due = 0
            self._due = schedule, due
            for _ in group:
                while (
                    window := self._windows.get((schedule.epoch, due))
                ) is not None and window.ready:
                    del self._windows[schedule.epoch, due]
                    due += 1
                    self._due = schedule, due
                    if window.error is not None:
                        raise window.error
                    yield window
                    del window


def _first(schedule: EpochSchedule, number: int) -> int:
    """Returns the first row of a window in its stream. For the number after the last window: the end of the last."""
    if number < len(schedule.windows):
        return schedule.windows[number].first
    return schedule.windows[-1].first + schedule.windows[-1].rows


class NoWorkerAnswers(Exception):
    """No remote worker answers. The caller does the work itself."""


@dataclass(eq=False)
class ReadWorker:
    """One worker that reads rows, or calls the last function over rows, and places the windows that are complete."""

    read: Callable[[Any, Charge], Decoded]
    windows: Windows
    clock: WorkerClock

    def __call__(self, item: Any, charge: Charge) -> Decoded:
        read = self.read(item, charge)
        # Corrected before `add`: after it, other workers may use the rows and release the charge.
        charge.correct(read.nbytes)
        for window in self.windows.add(read):
            window_charge = self.windows.charge_early(window, self.windows.ahead(window))
            if window_charge is not None:
                self.clock.go_over(self.windows.counters)
                self._place_early(window, window_charge)
            window.ready = True
        return read

    def close(self) -> None:
        if close := getattr(self.read, "close", None):  # a function over rows may hold a process
            close()

    def _place_early(self, window: WindowRows, charge: Charge) -> None:
        """Places a window now. Keeps an error instead of raising it, because the window may not be due yet."""
        try:
            self.windows.place(window, charge)
            charge.correct(window.nbytes)
        except BaseException as error:
            charge.release()
            window.error = error
        else:
            self.clock.passed(self.windows.counters, window.rows, window.nbytes)
