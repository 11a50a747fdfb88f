"""Takes a run's events and metrics, on the first rank, to the run folder, TensorBoard's files and the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sluice.agent.report.format import line
from sluice.agent.report.run_folder import RunFolder
from sluice.dlrm.telemetry.progress import TrainingProgress


class Journal:
    """Takes events and metrics, and passes them to a listener. Ranks other than the first use it as it is."""

    looks: Callable[[Mapping[str, Any]], None] | None = None
    """Takes what the agent's policy was asked (`sluice.agent.report.looks`)."""

    def __init__(self) -> None:
        self.listener: Callable[[Mapping[str, Any]], None] = lambda _line: None
        """Gets every event and metric."""

    def expect(self, steps: int) -> None:
        """Sets how many steps the run has in all. The number changes when the run moves on to another version of its
        table."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Takes an event: something that happened once."""
        self.listener(event)

    def metric(self, metric: Mapping[str, Any]) -> None:
        """Takes a metric: figures at one step."""
        self.listener(metric)

    def say(self, text: str) -> None:
        """Prints a line on the terminal."""

    def warn(self, step: int, text: str) -> None:
        """Takes a warning, and prints it."""
        self.event({"kind": "warning", "step": step, "text": text})
        self.say(f"warning: {text}")


class WrittenJournal(Journal):
    """The journal of the first rank, which also writes. It is a context; closing it frees the run folder.

    What has no room on the disk is left out, and the first file affected is named: a log never stops the training."""

    def __init__(self, folder: RunFolder) -> None:
        from sluice.dlrm.telemetry.tensorboard import TensorBoardLog

        super().__init__()
        self.folder = folder
        self.looks = folder.look
        self._progress = TrainingProgress()
        self._tensorboard = TensorBoardLog(folder.path / "tensorboard", time.time)
        self._step = 0
        self._reported = False

    def __enter__(self) -> WrittenJournal:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reporting_disk_errors():
            self._tensorboard.close()
        self.folder.close()

    def expect(self, steps: int) -> None:
        self._progress.steps = steps

    def event(self, event: Mapping[str, Any]) -> None:
        super().event(event)
        with self._reporting_disk_errors():
            self.folder.event(event)
        if event["kind"] in ("decision", "occasion", "fault"):
            self._progress.say(line(event))
        if event["kind"] == "decision":
            with self._reporting_disk_errors():
                self._tensorboard.text("decision", event["reason"]["text"], self._step)

    def metric(self, metric: Mapping[str, Any]) -> None:
        super().metric(metric)
        with self._reporting_disk_errors():
            self.folder.metric(metric)
        self._progress.observe(metric)
        self._step = metric.get("step", self._step)
        if metric["kind"] == "slice":
            return  # too many curves
        scalars = {
            f"{metric['kind']}/{name}": value
            for name, value in metric.items()
            if isinstance(value, (int, float)) and name not in ("step", "at")
        }
        scalars |= {
            f"knobs/{stage}": count
            for stage, count in metric.get("knobs", {}).get("workers", {}).items()
        }
        with self._reporting_disk_errors():
            for name, value in scalars.items():
                self._tensorboard.scalar(name, value, self._step)

    def say(self, text: str) -> None:
        self._progress.say(text)

    @contextmanager
    def _reporting_disk_errors(self) -> Iterator[None]:
        """Wraps everything that is written: a disk that is full, or fails, is reported once, and nothing is raised."""
        try:
            yield
        except OSError as error:
            if not self._reported:
                self._reported = True
                self.say(
                    f"{error.filename or self.folder.path}: cannot be written ({error.strerror or error}); "
                    "training goes on, and what is not written is missing in the report"
                )
