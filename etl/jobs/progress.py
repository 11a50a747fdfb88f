"""What a person sees of a running job: `JobProgress`, one line for each stage; the line only moves on a terminal."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

_EVERY_S = 0.5


class JobProgress:
    """`with progress.stage("fit"): …` says when a stage begins, how far it is, and how long it took."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._moves = out.isatty()
        self._so_far: Callable[[], str] = lambda: "…"

    def follow(self, so_far: Callable[[], str]) -> None:
        """Shows from now on what an engine says of how far it is."""
        self._so_far = so_far

    def say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, done = time.monotonic(), threading.Event()
        watcher = threading.Thread(target=self._watch, args=(name, start, done), name="sluice-progress", daemon=True)
        if self._moves:
            watcher.start()
        else:
            self.say(f"{name} …")
        try:
            yield
        finally:
            done.set()
            if self._moves:
                watcher.join()
                self._out.write("\r\x1b[2K")
        self.say(f"{name}: done in {time.monotonic() - start:.1f} s")

    def _watch(self, name: str, start: float, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            self._out.write(f"\r\x1b[2K{name} {self._so_far()} {time.monotonic() - start:.0f} s")
            self._out.flush()
