"""Shows the progress of training: one live line on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from sluice.agent.report.format import line

_PLAIN_EVERY_S = 10.0


class TrainingProgress:
    """Gets the run's metrics and turns them into lines on standard error."""

    def __init__(self, *, out: TextIO | None = None) -> None:
        self.steps = 0
        """The steps of the whole run, as far as is known."""
        self._out = sys.stderr if out is None else out
        self._on_terminal = self._out.isatty()
        self._next_line_at = time.monotonic()
        self._line_open = False

    def event(self, event: Mapping[str, Any]) -> None:
        """Prints what the agent decides, and what a fault does."""
        if event["kind"] in ("decision", "occasion", "fault"):
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
        self._write(("\n" if self._line_open else "") + text + "\n")
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
