"""`Journal`: all that a run reports goes through it, to the run folder, TensorBoard, the terminal and Prometheus."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from sluice.agent.report.format import line
from sluice.agent.report.run_folder import RunFolder
from sluice.common.errors import printable

Line = Mapping[str, Any]


class Sink(Protocol):
    """Takes lines. It may raise OSError if it cannot write one."""

    def event(self, event: Line) -> None:
        """Takes an event: something that happened once."""

    def metric(self, metric: Line) -> None:
        """Takes a metric: figures at one step."""


_PLAIN_EVERY_S = 10.0


class TrainingProgress:
    """Gets the run's metrics and turns them into lines on standard error."""

    def __init__(self, *, out: TextIO | None = None) -> None:
        self.steps = 0
        """The steps of the whole run, as the newest start on a version says."""
        self._out = sys.stderr if out is None else out
        self._on_terminal = self._out.isatty()
        self._next_line_at = time.monotonic()
        self._line_open = False

    def event(self, event: Mapping[str, Any]) -> None:
        """Prints what the agent decides, and what a fault does."""
        if event["kind"] in ("start", "follow"):
            self.steps = event["steps"]
        elif event["kind"] in ("decision", "incident", "fault", "note"):
            self.say(line(event))

    def metric(self, metric: Mapping[str, Any]) -> None:
        """Takes a metric; only those of training are shown in this line."""
        if metric.get("kind") != "train" or (
            not self._on_terminal and time.monotonic() < self._next_line_at
        ):
            return
        self._next_line_at = time.monotonic() + _PLAIN_EVERY_S
        text = (
            f"step {metric['step']:,} of {self.steps:,}  loss {metric['loss']:.4f}  "
            f"{metric['samples_per_s']:,.0f} samples/s  waiting for input {metric['stall']:.1%}"
        )
        self._write(f"\r\033[K{text}" if self._on_terminal else f"{text}\n")
        self._line_open = self._on_terminal

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._write(("\n" if self._line_open else "") + printable(text) + "\n")
        self._line_open = False

    def _write(self, text: str) -> None:
        """Writes to standard error. If that is a file on a full disk, the text is lost and training goes on."""
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass


class Journal:
    """Takes events and metrics for all sinks, and lines for the terminal. Ranks other than the first have no terminal.

    What has no room on the disk is left out, and the first file affected is named: a log never stops the training."""

    def __init__(self, *sinks: Sink) -> None:
        self.looks: Callable[[Line], None] | None = None
        """Takes what the agent's policy was asked (`sluice.agent.report.looks`)."""
        self._sinks = sinks
        self._folder: RunFolder | None = None
        self._progress: TrainingProgress | None = None
        self._reported = False

    def open(self, folder: RunFolder) -> None:
        """Adds the sinks that only the first rank has. `close` frees the folder."""
        from sluice.dlrm.telemetry.tensorboard import TensorBoardLog

        self._folder, self._progress, self.looks = folder, TrainingProgress(), folder.look
        self._tensorboard = TensorBoardLog(folder.path / "tensorboard", time.time)
        self._sinks = (*self._sinks, folder, self._progress, self._tensorboard)

    def close(self) -> None:
        if self._folder is not None:
            with self.reporting_disk_errors():
                self._tensorboard.close()
            self._folder.close()

    def event(self, event: Line) -> None:
        for sink in self._sinks:
            with self.reporting_disk_errors():
                sink.event(event)

    def metric(self, metric: Line) -> None:
        for sink in self._sinks:
            with self.reporting_disk_errors():
                sink.metric(metric)

    def say(self, text: str) -> None:
        """Prints a line on the terminal."""
        if self._progress is not None:
            self._progress.say(text)

    def warn(self, step: int, text: str) -> None:
        """Takes a warning, and prints it."""
        self.event({"kind": "warning", "step": step, "text": text})
        self.say(f"warning: {text}")

    @contextmanager
    def reporting_disk_errors(self) -> Iterator[None]:
        """Wraps what is written: a disk that is full, or fails, is reported once, and nothing is raised."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._reported:
                self._reported = True
                place = error.filename or (self._folder and self._folder.path)
                self.say(
                    f"{place}: cannot be written ({error.strerror or error}); training goes on, and what "
                    "is not written is missing in the report"
                )
