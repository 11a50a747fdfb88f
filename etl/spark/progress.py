"""What a person sees of a running Spark job: `JobProgress`, one line for each stage; the line only moves on a
terminal."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

_EVERY_S = 0.5


class JobProgress:
    """`with progress.stage("fit"): …` says when a stage begins, how far it is, and how long it took."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._moves = out.isatty()
        self._tracker: Any = None

    def follow(self, spark: Any) -> None:
        """Shows this session's tasks from now on."""
        self._tracker = spark.sparkContext.statusTracker()

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
            self._out.write(f"\r\x1b[2K{name} {self._tasks()} {time.monotonic() - start:.0f} s")
            self._out.flush()

    def _tasks(self) -> str:
        try:
            stages = [self._tracker.getStageInfo(i) for i in self._tracker.getActiveStageIds()] if self._tracker else []
        except Exception:  # the session may be ending just now: a progress line is not worth a failure
            return "…"
        done = sum(s.numCompletedTasks for s in stages if s)
        return f"{done}/{sum(s.numTasks for s in stages if s)} tasks" if stages else "…"
