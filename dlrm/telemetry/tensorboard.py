"""A run's curves for TensorBoard: `TensorBoardLog`. Events are written where they happen.

The library's own writer hands them to a thread. A full disk ends that thread, and the next call then waits for it
without end.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_boto3 = sys.modules.get("boto3")
sys.modules["boto3"] = None  # type: ignore[assignment]  # the library imports it if it can, which takes 0.24 s
try:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter
    from tensorboardX.summary import scalar, text
finally:
    del sys.modules["boto3"]
    if _boto3 is not None:
        sys.modules["boto3"] = _boto3

_FLUSH_S = 10.0


class TensorBoardLog:
    """Writes a run's curves; the file is made with the first event. Raises OSError once if an event cannot be written,
    and does nothing from then on, because what follows a torn event could not be read."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        """`clock` tells seconds since 1970."""
        self._folder, self._clock = folder, clock
        self._file: RecordWriter | None = None
        self._accepts = True
        self._flushed_at = 0.0
        self._step = 0

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "decision":
            self._add(text("decision", event["reason"]["text"]))

    def metric(self, metric: Mapping[str, Any]) -> None:
        self._step = metric.get("step", self._step)
        if metric["kind"] == "slice":
            return  # too many curves
        curves = {
            f"{metric['kind']}/{name}": value
            for name, value in metric.items()
            if isinstance(value, (int, float)) and name not in ("step", "at")
        }
        workers = metric.get("knobs", {}).get("workers", {})
        curves |= {f"knobs/{stage}": count for stage, count in workers.items()}
        for name, value in curves.items():
            self._add(scalar(name, value))

    def close(self) -> None:
        self._accepts = False
        if self._file is not None:
            self._file.close()

    def _add(self, summary: Summary) -> None:
        if not self._accepts:
            return
        now = self._clock()
        try:
            if self._file is None:
                self._folder.mkdir(exist_ok=True)
                name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}"
                self._file, self._flushed_at = RecordWriter(str(self._folder / name)), now
                self._file.write(
                    Event(wall_time=now, file_version="brain.Event:2").SerializeToString()
                )
            self._file.write(
                Event(summary=summary, step=self._step, wall_time=now).SerializeToString()
            )
            if now - self._flushed_at >= _FLUSH_S:
                self._file.flush()
                self._flushed_at = now
        except OSError as error:
            with contextlib.suppress(OSError):  # what is still in its buffer has no room either
                self.close()
            raise OSError(error.errno, error.strerror, str(self._folder)) from None
