"""Takes a run's events and metrics, on the first rank, to the run folder, TensorBoard's files and the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.agent.report.format import line
from sluice.agent.report.run_folder import RunFolder
from sluice.dlrm.options import Config
from sluice.dlrm.telemetry.progress import TrainingProgress

_SHOWN_EVENTS = ("decision", "occasion", "fault")


class Journal:
    """Takes events and metrics and passes them on. It is a context; closing it frees the run folder.

    What has no room on the disk is left out, and the first file affected is named: a log never stops the training."""

    def __init__(self, folder: RunFolder, progress: TrainingProgress) -> None:
        from sluice.dlrm.telemetry.tensorboard import TensorBoardLog

        self.folder = folder
        self.looks = folder.look
        """Takes what the agent's policy was asked (`sluice.agent.report.looks`)."""
        self._progress = progress
        self._listener: Callable[[Mapping[str, Any]], None] = _ignore
        self._tensorboard = TensorBoardLog(folder.path / "tensorboard", time.time)
        self._step = 0
        self._reported = False

    @classmethod
    def of_run(cls, path: Path, config: Config, *, resume: bool) -> Journal:
        """Returns the journal of a run in a new folder, or, with `resume`, in the existing one."""
        folder = RunFolder.create(path, {"kind": "train", **config.to_dict()}, resume=resume)
        return cls(folder, TrainingProgress())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reporting_disk_errors():
            self._tensorboard.close()
        self.folder.close()

    def expect(self, steps: int) -> None:
        """Sets how many steps the run has in all. The number changes when the run moves on to another version of its
        table."""
        self._progress.steps = steps

    def set_listener(self, listener: Callable[[Mapping[str, Any]], None]) -> None:
        """Names a function that gets every event and metric, in addition to the run folder."""
        self._listener = listener

    def event(self, event: Mapping[str, Any]) -> None:
        """Takes an event: something that happened once."""
        self._listener(event)
        with self._reporting_disk_errors():
            self.folder.event(event)
        if event["kind"] in _SHOWN_EVENTS:
            self._progress.say(line(event))
        if event["kind"] == "decision":
            with self._reporting_disk_errors():
                self._tensorboard.text("decision", event["reason"]["text"], self._step)

    def metric(self, metric: Mapping[str, Any]) -> None:
        """Takes a metric: figures at one step."""
        self._listener(metric)
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
        """Prints a line on the terminal."""
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


def _ignore(_line: Mapping[str, Any]) -> None: ...


class Silence:
    """What the other ranks have instead of a journal: it writes nothing, and passes everything on to their endpoint."""

    looks = None

    def __init__(self) -> None:
        self._listener: Callable[[Mapping[str, Any]], None] = _ignore

    def expect(self, steps: int) -> None: ...

    def set_listener(self, listener: Callable[[Mapping[str, Any]], None]) -> None:
        self._listener = listener

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None:
        self._listener(event)

    def metric(self, metric: Mapping[str, Any]) -> None:
        self._listener(metric)

    def say(self, text: str) -> None: ...
