"""Shows a running pipeline to a person: a picture and a table of its stages on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from sluice.ingest.knobs import format_bytes
from sluice.ingest.stats import Snapshot

_OFF_SCALE = 3.0  # times the highest rate: headroom farther away would flatten the picture
HEAD = ("stage", "workers", "rows/s", "busy", "cpu", "waits for input", "waits for room", "queue")


def rows(before: Snapshot, after: Snapshot, fused: Container[str] = ()) -> list[tuple[str, ...]]:
    """Returns one row of HEAD's columns for each stage. Shares are of its workers' time between the two snapshots. The
    workers of a fused stage are those of the stage before."""
    elapsed = max(after.at - before.at, 1e-9)
    found: list[tuple[str, ...]] = []
    for now in after.stages:
        then = before.stage(now.name)
        # A stage may have been resized in between; what its workers did adds up to their time.
        times = [
            now.busy_s - then.busy_s,
            now.wait_input_s - then.wait_input_s,
            now.wait_output_s - then.wait_output_s,
        ]
        whole = max(sum(times), 1e-9)
        busy, waits_in, waits_out = (f"{100 * t / whole:.0f} %" for t in times)
        queue = format_bytes(now.queue_bytes)
        if now.queue_limit_bytes:
            queue += f" of {format_bytes(now.queue_limit_bytes)}"
        found.append(
            (
                now.name,
                "fused" if now.name in fused else f"{now.workers}×",
                f"{(now.rows - then.rows) / elapsed:,.0f}",
                busy,
                f"{(now.cpu_s - then.cpu_s) / elapsed:.2f}",
                waits_in,
                waits_out,
                queue,
            )
        )
    return found


def summary(before: Snapshot, after: Snapshot) -> str:
    """Describes the whole pipeline in one line."""
    elapsed = max(after.at - before.at, 1e-9)
    wait = after.consumer_wait_s - before.consumer_wait_s
    compute = after.consumer_compute_s - before.consumer_compute_s
    held_back = after.held_back - before.held_back
    pressed = after.held_back_pressure - before.held_back_pressure
    stall = wait / max(wait + compute, 1e-9)
    return (
        f"{(after.rows - before.rows) / elapsed:,.0f} rows/s, stall {100 * stall:.0f} %, "
        f"{(after.cpu_used_s - before.cpu_used_s) / elapsed:.1f} of {after.cpu_quota:.3g} cores, "
        f"{format_bytes(after.memory_used)}"
        + (f", {waited(held_back, pressed)}" if held_back else "")
    )


def waited(times: int, pressed: int) -> str:
    """Describes how often work waited for memory, and why."""
    return f"held back {times}× for memory ({times - pressed} limit, {pressed} pressure)"


class View:
    """Shows snapshots as they come. On a terminal with rich installed, it redraws a picture and a table, with the lines
    of `tell` above them. Elsewhere it prints plain lines."""

    def __init__(self, stream: TextIO | None = None):
        stream = self._stream = stream or sys.stderr
        self._first: Snapshot | None = None
        self._last: Snapshot | None = None
        self._picture = Picture()
        self._live: Any = None
        if stream.isatty():
            try:
                from rich.console import Console
                from rich.live import Live
            except ImportError:
                return
            self._live = Live(console=Console(file=stream, highlight=False), auto_refresh=False)
            self._live.start()

    def tell(self, text: str, *, mark: bool = False) -> None:
        """Prints a line that stays. With `mark`, it gets a letter and the picture shows when it was printed."""
        if mark and self._first is not None and self._last is not None:
            letter = chr(ord("A") + len(self._picture.marks) % 26)
            self._picture.marks.append((self._last.at - self._first.at, letter))
            text = f"{letter}. {text}"
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._live.console.print(text, markup=False)

    def show(self, snapshot: Snapshot, fused: Container[str] = ()) -> None:
        before, self._last = self._last, snapshot
        if before is None or self._first is None:
            self._first = snapshot
            return
        rate, demand = rates(before, snapshot)
        self._picture.points.append((snapshot.at - self._first.at, rate))
        self._picture.headroom = (
            demand if demand <= _OFF_SCALE * max(r for _, r in self._picture.points) else 0.0
        )
        if self._live is None:
            stages = "; ".join(
                f"{name} {workers}, {busy} busy"
                for name, workers, _, busy, *_ in rows(before, snapshot, fused)
            )
            print(f"{summary(before, snapshot)} | {stages}", file=self._stream, flush=True)
            return
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=summary(before, snapshot))
        for number, name in enumerate(HEAD):
            table.add_column(name, justify="right" if number else "left")
        for row in rows(before, snapshot, fused):
            table.add_row(*row)
        drawn = "\n".join(self._picture.lines(min(100, self._live.console.width)))
        self._live.update(Group(Text(drawn, no_wrap=True), table), refresh=True)

    def close(self) -> None:
        """Stops drawing. The last picture stays."""
        if self._live is not None:
            self._live.stop()


def rates(before: Snapshot, after: Snapshot) -> tuple[float, float]:
    """Returns the rows a second that were taken, and the rate without waiting."""
    taken = after.rows - before.rows
    compute_s = after.consumer_compute_s - before.consumer_compute_s
    return taken / max(after.at - before.at, 1e-9), taken / max(compute_s, 1e-9)


_BARS = " ▁▂▃▄▅▆▇█"
_LINE = "╌"
_LEFT = 9  # characters for the axis


@dataclass
class Picture:
    """A picture that grows by a point with each snapshot. `headroom` is the trainer's rate if it never waited."""

    points: list[tuple[float, float]] = field(default_factory=list)
    """Points of (seconds since the start, rows a second)."""
    headroom: float = 0.0
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Marks of (seconds since the start, letter) for what happened then."""

    def lines(self, width: int, height: int = 10) -> list[str]:
        """Returns the picture from the start to now, so many characters wide. Empty before there are two points."""
        if len(self.points) < 2:
            return []
        columns, end = max(10, width - _LEFT), self.points[-1][0]
        rates = _spread(self.points, columns, end)
        top = 1.1 * max(self.headroom, *rates, 1.0)
        line = min(height - 1, int(height * self.headroom / top)) if self.headroom else -1
        drawn = []
        for row in reversed(range(height)):
            cells = []
            for rate in rates:
                eighths = round(8 * (height * rate / top - row))
                cells.append(
                    _LINE if row == line and eighths <= 0 else _BARS[min(8, max(0, eighths))]
                )
            if row == line:
                label = _short(self.headroom)
            elif row == height - 1:
                label = _short(top)
            else:
                label = ""
            drawn.append(f"{label:>{_LEFT - 2}} ┤{''.join(cells)}")
        axis = ["─"] * columns
        for at, letter in self.marks:
            axis[min(columns - 1, int(columns * at / end))] = letter
        drawn.append(f"{'rows/s':>{_LEFT - 2}} └{''.join(axis)}")
        drawn.append(f"{'':{_LEFT}}0 s{f'{end:.0f} s':>{columns - 3}}")
        return drawn


def _spread(points: Sequence[tuple[float, float]], columns: int, end: float) -> list[float]:
    """Returns the mean rate of each column's time. A column without a point gets a neighbour's."""
    found: list[list[float]] = [[] for _ in range(columns)]
    for at, rate in points:
        found[min(columns - 1, int(columns * at / max(end, 1e-9)))].append(rate)
    rates, last = [], 0.0
    for some in reversed(found):  # a point is the rate of the time before it
        last = sum(some) / len(some) if some else last
        rates.append(last)
    return rates[::-1]


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
