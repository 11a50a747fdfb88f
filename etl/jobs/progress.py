"""`JobProgress` shows the progress of a job. On a terminal each pass has a moving bar.

Otherwise each stage prints a line at its start and its end, and one every few seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from sluice.common.errors import printable

_MOVES_S, _LINES_S = 0.5, 5.0
_WIDTH = 20


class Pass:
    """The progress of one pass over `size` bytes."""

    def __init__(self, name: str, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._size = size
        self._clock = clock
        self._start = clock()
        self._rows = self._done = 0

    def add(self, rows: int, size: int) -> None:
        self._rows += rows
        self._done += size

    @property
    def text(self) -> str:
        """A bar with the rows and MB a second so far, and the time left at that speed."""
        share, seconds = min(1.0, self._done / max(1, self._size)), self._clock() - self._start
        full = int(share * _WIDTH)
        bar = f"{self._name}[{'#' * full}{'.' * (_WIDTH - full)}] {share:.0%}"
        if not share or seconds <= 0:
            return bar
        speed, left = share * self._size / seconds / 1e6, seconds * (1 - share) / share
        return f"{bar}, {self._rows:,} rows, {speed:.0f} MB/s, {left:.0f} s left"


class JobProgress:
    """`with progress.stage("fit"): …` prints when a stage starts, its progress, and how long it took."""

    def __init__(self, out: TextIO, every_s: float | None = None) -> None:
        """`every_s` is the time between two lines, or two moves of the bar."""
        self._out = out
        self._moves = out.isatty()
        self._every_s = every_s or (_MOVES_S if self._moves else _LINES_S)
        self._so_far: Callable[[], str] = lambda: "…"

    def follow(self, so_far: Callable[[], str]) -> None:
        """Sets the function that describes the progress of the current pass."""
        self._so_far = so_far

    def say(self, text: str) -> None:
        self._out.write(f"{printable(text)}\n")
        self._out.flush()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, done = time.monotonic(), threading.Event()
        if not self._moves:
            self.say(f"{name} …")
        watcher = threading.Thread(
            target=self._watch, args=(name, start, done), name="sluice-progress", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            if self._moves:
                self._out.write("\r\x1b[2K")
        self.say(f"{name}: done in {time.monotonic() - start:.1f} s")

    def _watch(self, name: str, start: float, done: threading.Event) -> None:
        while not done.wait(self._every_s):
            line = printable(f"{name} {self._so_far()} {time.monotonic() - start:.0f} s")
            self._out.write(f"\r\x1b[2K{line}" if self._moves else f"{line}\n")
            self._out.flush()
