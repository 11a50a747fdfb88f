"""Shows a running pipeline to a person: a few lines that are redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, TextIO

from sluice.agent.report.format import count, line, moves, percent, seconds
from sluice.ingest.knobs import Knobs, format_bytes
from sluice.ingest.stats import Snapshot

_BARS = " ▁▂▃▄▅▆▇█"
_LABEL = 9  # characters before a line's text
_FIGURE = 11  # characters of a figure before its bar
_NARROWEST, _WIDEST = 8, 60  # characters of a bar
_TAIL = 28  # characters after a bar
_OFF_SCALE = 3.0  # times the highest rate: a possible rate above that is not shown
_NOISE = 0.02  # share of waiting that nobody needs to mend
_NO_STEP = 100.0  # times the rows without waiting, from which on there is no trainer to speak of


def rows(
    before: Snapshot, after: Snapshot, fused: Container[str] = ()
) -> list[tuple[str, str, float]]:
    """Returns each stage's name, its workers in words, and the share of their time between the two snapshots that they
    were busy. The workers of a fused stage are those of the stage before, and so is their time."""
    times_s: list[float] = []
    found = []
    for now in after.stages:
        then = before.stage(now.name)
        # A stage may have been resized in between; what its workers did adds up to their time.
        busy_s = now.busy_s - then.busy_s
        waited_s = now.wait_input_s - then.wait_input_s + now.wait_output_s - then.wait_output_s
        if now.name not in fused:
            times_s.append(1e-9)
        times_s[-1] += busy_s + waited_s
        workers = "fused" if now.name in fused else f"{now.workers}×"
        found.append((now.name, workers, busy_s, len(times_s) - 1))
    return [(name, workers, busy_s / times_s[team]) for name, workers, busy_s, team in found]


def summary(before: Snapshot, after: Snapshot) -> str:
    """Describes the whole pipeline in one line."""
    elapsed = max(after.at - before.at, 1e-9)
    held_back = after.held_back - before.held_back
    pressed = after.held_back_pressure - before.held_back_pressure
    return (
        f"{(after.rows - before.rows) / elapsed:,.0f} rows/s, stall {100 * _stall(before, after):.0f} %, "
        f"{_cores(before, after)} cores, {format_bytes(after.memory_used)}"
        + (f", {waited(held_back, pressed)}" if held_back else "")
    )


def waited(times: int, pressed: int) -> str:
    """Describes how often work waited for memory, and why."""
    return f"held back {times}× for memory ({times - pressed} limit, {pressed} pressure)"


def rates(before: Snapshot, after: Snapshot) -> tuple[float, float]:
    """Returns the rows a second that were taken, and the rate without waiting."""
    taken = after.rows - before.rows
    compute_s = after.consumer_compute_s - before.consumer_compute_s
    return taken / max(after.at - before.at, 1e-9), taken / max(compute_s, 1e-9)


def advice(before: Snapshot, after: Snapshot, knobs: Knobs) -> str:
    """Says how much a faster loader would bring at most, and which stage to help."""
    stall = _stall(before, after)
    if stall < _NOISE:
        return f"the trainer waited {percent(stall)} of its time: a faster loader brings nothing"
    busy = dict[str, float]()
    head = ""
    for name, _, share in rows(before, after, knobs.fused):
        head = head if name in knobs.fused else name
        busy[head] = busy.get(head, 0.0) + share
    slowest = max(busy, key=lambda name: busy[name])
    rate, possible = rates(before, after)
    gain = possible / max(rate, 1e-9)
    most = f", without that it takes {gain:.2g} times the rows" if gain < _NO_STEP else ""
    what = (
        f"try --tuning auto, or --knobs {slowest}={knobs.workers[slowest] + 1}"
        if after.cpu_quota - _cores_used(before, after) >= 1
        else "only more cores or --workers on other hosts help"
    )
    return (
        f"the trainer waited {percent(stall)} of its time{most}; the busiest stage is {slowest} "
        f"({percent(busy[slowest])}), with {_cores(before, after)} cores in use: {what}"
    )


def _stall(before: Snapshot, after: Snapshot) -> float:
    wait = after.consumer_wait_s - before.consumer_wait_s
    compute = after.consumer_compute_s - before.consumer_compute_s
    return wait / max(wait + compute, 1e-9)


def _cores_used(before: Snapshot, after: Snapshot) -> float:
    return (after.cpu_used_s - before.cpu_used_s) / max(after.at - before.at, 1e-9)


def _cores(before: Snapshot, after: Snapshot) -> str:
    return f"{_cores_used(before, after):.1f} of {after.cpu_quota:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A change of knobs by the agent, and its effect once that is measured."""

    at: float
    """Seconds since the first snapshot."""
    text: str
    effect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A pipeline between its last two snapshots, and what came before."""

    before: Snapshot
    after: Snapshot
    fused: Container[str]
    rates: Sequence[tuple[float, float]]
    """Points of (seconds since the first snapshot, rows a second). The last one is that between the two."""
    marks: Sequence[tuple[float, str]] = ()
    """Points of (seconds since the first snapshot, letter) for what happened then."""
    attempt: Attempt | None = None


def draw(moment: Moment, width: int) -> list[str]:
    """Returns the lines that show a moment, none of them longer than `width`."""
    before, after = moment.before, moment.after
    bar = min(max(width - _LABEL - _FIGURE - _TAIL, _NARROWEST), _WIDEST)
    rate, possible = rates(before, after)
    stall = _stall(before, after)
    now = moment.rates[-1][0]
    most = max(rate for _, rate in moment.rates)
    took = seconds(round(now))
    if possible <= _OFF_SCALE * most:
        took += f", {count(possible)} possible"
    stages = [
        f"{name} {workers} {percent(busy)}"
        for name, workers, busy in rows(before, after, moment.fused)
    ]
    marks = [" "] * bar
    for at, letter in moment.marks:
        marks[min(bar - 1, int(bar * at / max(now, 1e-9)))] = letter
    agent = ""
    if moment.attempt is not None:
        agent = f"{moment.attempt.text}, {seconds(round(now - moment.attempt.at))} ago"
        agent += f": {moment.attempt.effect}" if moment.attempt.effect else ""
    held_back = after.held_back - before.held_back
    memory = _share(after.memory_used / max(after.memory_limit, 1), bar)
    memory += f"  of {format_bytes(after.memory_limit)}"
    memory += f", work waited {held_back}×" if held_back else ""
    lines = [
        ("rows/s", f"{count(rate):{_FIGURE}}{_spark(moment.rates, bar)}  {took}"),
        ("", f"{'':{_FIGURE}}{''.join(marks)}" if moment.marks else ""),
        ("waiting", f"{percent(stall):{_FIGURE}}{_share(stall, bar)}"),
        *(("workers" if not n else "", one) for n, one in enumerate(_packed(stages, width))),
        ("memory", f"{format_bytes(after.memory_used):{_FIGURE}}{memory}"),
        ("cores", _cores(before, after)),
        ("agent", agent),
    ]
    return [f"{label:{_LABEL}}{text}".rstrip()[:width] for label, text in lines if text]


def _packed(words: Sequence[str], width: int) -> list[str]:
    """Returns the words on as few lines as the width allows. No word is broken."""
    # A space within a word must not end a line.
    text = "   ".join(word.replace(" ", "\0") for word in words)
    return [
        one.replace("\0", " ") for one in wrap(text, max(width - _LABEL, 1), break_long_words=False)
    ]


def _spark(points: Sequence[tuple[float, float]], columns: int) -> str:
    """Returns a bar for the mean rate of each column's time. A column without a point gets a neighbour's."""
    found: list[list[float]] = [[] for _ in range(columns)]
    end = max(points[-1][0], 1e-9)
    for at, rate in points:
        found[min(columns - 1, int(columns * at / end))].append(rate)
    means, last = [], 0.0
    for some in reversed(found):  # a point is the rate of the time before it
        last = sum(some) / len(some) if some else last
        means.append(last)
    most = max(*means, 1e-9)
    return "".join(_BARS[round(8 * mean / most)] for mean in reversed(means))


def _share(share: float, columns: int) -> str:
    full = min(columns, round(columns * share))
    return "█" * full + "░" * (columns - full)


class View:
    """Shows snapshots as they come. On a terminal it redraws its lines in place, with those of `tell` above them.
    Elsewhere, and if TERM is `dumb`, it prints plain lines. NO_COLOR is respected.

    The cursor stays visible. It rests on an empty line above the drawing, so a line that something else prints stays
    there, and the drawing moves down."""

    def __init__(self, stream: TextIO | None = None):
        stream = self._stream = stream or sys.stderr
        self._first: Snapshot | None = None
        self._last: Snapshot | None = None
        self._moment: Moment | None = None
        self._attempt: Attempt | None = None
        self._rates: list[tuple[float, float]] = []
        self._marks: list[tuple[float, str]] = []
        self._lock = threading.RLock()
        self._is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._label = "{}" if os.environ.get("NO_COLOR") else "\033[36m{}\033[39m"

    def tell(self, text: str, *, mark: bool = False) -> None:
        """Prints a line that stays. With `mark`, it gets a letter and the drawing shows when it was printed."""
        with self._lock:
            if mark and self._first is not None and self._last is not None:
                letter = chr(ord("A") + len(self._marks) % 26)
                self._marks.append((self._last.at - self._first.at, letter))
                text = f"{letter}. {text}"
            self._write(("\r\033[J" if self._is_live else "") + text + "\n")
            self._redraw()

    def record(self, event: Mapping[str, Any], *, mark: bool = False) -> None:
        """Tells an event of the agent. The drawing shows its last change and the effect of it."""
        with self._lock:
            if event["kind"] in ("decision", "proposal"):
                at = self._rates[-1][0] if self._rates else 0.0
                would = "" if event["kind"] == "decision" else "would change "
                self._attempt = Attempt(at=at, text=would + moves(event["before"], event["after"]))
            elif event["kind"] == "effect" and self._attempt and event["rows_per_s_before"]:
                times = event["rows_per_s_after"] / event["rows_per_s_before"]
                self._attempt = replace(self._attempt, effect=f"{times:.2g} times the rows")
            self.tell(line(event), mark=mark)

    def show(self, snapshot: Snapshot, fused: Container[str] = ()) -> None:
        with self._lock:
            before, self._last = self._last, snapshot
            if before is None or self._first is None:
                self._first = snapshot
                return
            rate, _ = rates(before, snapshot)
            self._rates.append((snapshot.at - self._first.at, rate))
            self._moment = Moment(
                before=before,
                after=snapshot,
                fused=fused,
                rates=self._rates,
                marks=self._marks,
            )
            if self._is_live:
                self._redraw()
                return
            stages = "; ".join(
                f"{name} {workers}, {100 * busy:.0f} % busy"
                for name, workers, busy in rows(before, snapshot, fused)
            )
            self._write(f"{summary(before, snapshot)} | {stages}\n")

    def close(self) -> None:
        """Stops drawing. The last drawing stays, with the cursor below it."""
        with self._lock:
            self._redraw(is_last=True)
            self._is_live = False

    def _redraw(self, *, is_last: bool = False) -> None:
        """Draws at the terminal's present size, from the cursor's line on."""
        if not self._is_live or self._moment is None:
            return
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            size = os.terminal_size((80, 24))
        drawn = draw(replace(self._moment, attempt=self._attempt), max(size.columns - 1, 1))
        drawn = drawn[: max(size.lines - 2, 0)]
        lines = [self._label.format(one[:_LABEL]) + one[_LABEL:] for one in drawn]
        back = "\n" if is_last else f"\r\033[{len(lines)}A"
        self._write("\r" + "\n".join(f"{one}\033[K" for one in ["", *lines]) + f"\033[J{back}")

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)
