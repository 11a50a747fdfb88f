"""Where a run's events and metrics go: the run folder, TensorBoard's files, a person's terminal. On the first rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.runs import RunFolder
from dlrm.progress import Progress


class Journal:
    """Takes events and metrics and passes them on. A context; closing it frees the run folder."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        from tensorboardX import SummaryWriter

        self.folder = folder
        self._progress = progress
        self._board = SummaryWriter(str(folder.path / "tensorboard"), flush_secs=10)
        self._step = 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._board.close()
        self.folder.close()

    def event(self, event: Mapping[str, Any]) -> None:
        self.folder.event(event)
        if event["kind"] == "decision":
            self._board.add_text("decision", event["reason"]["text"], self._step)

    def metric(self, metric: Mapping[str, Any]) -> None:
        self.folder.metric(metric)
        self._progress.observe(metric)
        self._step = metric.get("step", self._step)
        scalars = {k: v for k, v in metric.items() if isinstance(v, (int, float)) and k not in ("step", "at")}
        for name, value in scalars.items():
            self._board.add_scalar(f"{metric['kind']}/{name}", value, self._step)
        for stage, count in metric.get("knobs", {}).get("workers", {}).items():
            self._board.add_scalar(f"knobs/{stage}", count, self._step)

    def say(self, text: str) -> None:
        self._progress.say(text)


class Silence:
    """What the other ranks have instead."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...

    def metric(self, metric: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...
