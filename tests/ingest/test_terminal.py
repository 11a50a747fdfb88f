"""What a person sees of `sluice bench`: on a terminal a few lines that are redrawn in place, elsewhere plain lines."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import pytest

from sluice.ingest.knobs import Knobs
from sluice.tools import terminal
from sluice.tools.terminal import Attempt, Moment, View, draw, summary
from tests.ingest.test_stats import snapshot, stage
from tests.raises import assert_names

DECISION = {
    "kind": "decision",
    "sequence": 1,
    "before": {"workers": {"decode": 1}},
    "after": {"workers": {"decode": 4}},
    "reason": {"text": "decode is the bottleneck"},
}
EFFECT = {"kind": "effect", "sequence": 1, "rows_per_s_before": 50.0, "rows_per_s_after": 95.0}


def moment(**changes):
    stages = [("decode", 0.5, 4), ("shuffle", 0.0, 1), ("batch", 0.1, 1)]
    before, after = (
        snapshot(
            at=at,
            rows=int(100 * at),
            consumer_wait_s=0.25 * at,
            consumer_compute_s=0.75 * at,
            memory_used=2**30,
            memory_limit=2**32,
            cpu_used_s=at,
            held_back=int(at),
            stages=tuple(
                stage(
                    name,
                    workers=workers,
                    busy_s=busy * at,
                    wait_input_s=0.0 if name == "shuffle" else (1 - busy) * at,
                    wait_output_s=0.0,
                )
                for name, busy, workers in stages
            ),
        )
        for at in (19.0, 20.0)
    )
    return Moment(
        **{
            "before": before,
            "after": after,
            "fused": {"shuffle"},
            "rates": [(float(at), 50.0 if at <= 9 else 100.0) for at in range(1, 21)],
            "marks": [(10.0, "A")],
            "attempt": Attempt(at=8.0, text="decode 1 → 4", effect="1.9 times the rows"),
            **changes,
        }
    )


def test_the_lines_are_rate_waiting_workers_memory_cores_and_the_last_change():
    lines = draw(moment(), 88)  # a bar of 40 characters: 2 for each second
    assert lines == [
        f"rows/s   100        {'▄' * 19}{'█' * 21}  20 s, 133 possible",
        f"{'':40}A",
        f"waiting  25 %       {'█' * 10}{'░' * 30}",
        "workers  decode 4× 50 %   shuffle fused 0 %   batch 1× 10 %",
        f"memory   1 GiB      {'█' * 10}{'░' * 30}  of 4 GiB, work waited 1×",
        "cores    1.0 of 2",
        "agent    decode 1 → 4, 12 s ago: 1.9 times the rows",
    ]


@pytest.mark.parametrize("width", [1, 12, 40, 79, 80, 200, 1000])
def test_no_line_is_wider_than_the_terminal_and_a_wide_one_gets_longer_bars(width):
    lines = draw(moment(), width)
    assert lines
    assert max(map(len, lines)) <= width
    if width >= 40:
        shown = " ".join(" ".join(lines).split())
        assert "decode 4× 50 % shuffle fused 0 % batch 1× 10 %" in re.sub(" +", " ", shown)


@pytest.mark.parametrize(
    ("wait_s", "used_s", "facts"),
    [
        (0.01, 1.0, ["1.0 %", "brings nothing"]),
        (0.5, 1.0, ["50 %", "2 times the rows", "decode (90 %)", "--knobs decode=5"]),
        (0.5, 1.5, ["decode (90 %)", "1.5 of 2 cores", "--workers"]),
    ],
)
def test_the_advice_names_the_gain_and_the_busiest_stage(wait_s, used_s, facts):
    """Reading is busy for 30 %, and shuffling, which its workers do, for 60 % of their time."""
    times = {"decode": (0.3, 0.1), "shuffle": (0.6, 0.0), "batch": (0.8, 0.2)}

    def at(share):
        return snapshot(
            at=share,
            rows=int(100 * share),
            consumer_wait_s=wait_s * share,
            consumer_compute_s=(1 - wait_s) * share,
            cpu_used_s=used_s * share,
            stages=tuple(
                stage(name, busy_s=share * busy, wait_input_s=share * waits, wait_output_s=0.0)
                for name, (busy, waits) in times.items()
            ),
        )

    knobs = Knobs(workers={"decode": 4, "batch": 1}, fused={"shuffle"})
    assert_names(terminal.advice(at(0), at(1), knobs), *facts)


class Screen(io.StringIO):
    """What is on a terminal: it follows the few controls that `View` writes."""

    def isatty(self):
        return True

    def fileno(self):
        raise OSError("no size")

    def lines(self):
        shown, row = [""], 0
        column = 0
        for part in re.findall(r"\033\[\d*[A-Za-z]|[\r\n]|[^\033\r\n]+", self.getvalue()):
            if part == "\n":
                row, column = row + 1, 0
                shown += [""] * (row + 1 - len(shown))
            elif part == "\r":
                column = 0
            elif part.endswith("A") and part.startswith("\033"):
                row -= int(part[2:-1])
            elif part == "\033[J":
                shown[row:] = [shown[row][:column]]
            elif part == "\033[K":
                shown[row] = shown[row][:column]
            elif not part.startswith("\033"):
                shown[row] = (
                    shown[row][:column].ljust(column) + part + shown[row][column + len(part) :]
                )
                column += len(part)
            assert row >= 0
        return shown, row


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen()


def _watch(view, moments=(1.0, 2.0, 3.0)):
    for at in moments:
        view.show(snapshot(at=at, rows=int(100 * at), consumer_compute_s=at / 2))


def test_a_terminal_is_redrawn_in_place_below_the_lines_that_stay(screen):
    view = View(screen)
    view.tell("before anything is seen", mark=True)
    _watch(view)
    view.record(DECISION)
    view.record(EFFECT)
    view.tell("a worker was killed", mark=True)
    print("a library's warning", file=screen)
    _watch(view, (4.0, 5.0))
    shown, row = screen.lines()
    assert shown[0] == "before anything is seen"
    assert shown[1].startswith("decision 1: decode is the bottleneck")
    assert shown[2].startswith("after decision 1 there were 95 rows/s")
    assert shown[3:6] == ["A. a worker was killed", "a library's warning", ""]
    assert row == 5, "the cursor rests above the drawing, on an empty line"
    labels = [line.split()[0] for line in shown[6:] if line]
    assert labels == ["rows/s", "A", "waiting", "workers", "memory", "cores", "agent"]
    assert shown[-1] == "agent    decode 1 → 4, 2 s ago: 1.9 times the rows"
    view.close()
    again, row = screen.lines()
    assert [*shown, ""] == again
    assert row == len(again) - 1, "what comes next is printed below"


@pytest.mark.parametrize(("is_terminal", "kind"), [(False, "xterm"), (True, "dumb"), (True, None)])
def test_elsewhere_lines_are_plain(monkeypatch, is_terminal, kind):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.delenv("TERM", raising=False)
    if kind:
        monkeypatch.setenv("TERM", kind)
    view = View(stream)
    view.tell("before anything is seen", mark=True)
    _watch(view)
    view.record(DECISION)
    view.tell("a worker was killed", mark=True)
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "before anything is seen"
    assert lines[1] == (
        "100 rows/s, stall 0 %, 0.0 of 2 cores, 1 B | decode 1×, 0 % busy; collate 1×, 0 % busy"
    )
    assert lines[-1] == "A. a worker was killed"
    assert "\033" not in stream.getvalue()


def test_the_line_names_why_work_was_held_back():
    before = snapshot(at=1.0, held_back=2, held_back_pressure=1)
    after = snapshot(at=2.0, held_back=9, held_back_pressure=3)
    assert_names(summary(before, after), "7×", "memory", "5 limit", "2 pressure")
    assert "held back" not in summary(before, before)


# ---- the program


def _on_terminal(table, *more, until=None):
    """Runs the program with a terminal of 60 columns. Interrupts it when it has written `until`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice", "bench", table.uri, "--batch-size", "160", *more],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    said = b""
    try:
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                said += os.read(ours, 4096)
                if until and until in said:
                    until = None
                    process.send_signal(signal.SIGINT)
    finally:
        os.close(ours)
        out, _ = process.communicate(timeout=60)
    return process.returncode, out, Screen(said.decode().replace("\r\n", "\n"))


@pytest.mark.slow
def test_a_terminal_gets_the_drawing(table):
    code, out, screen = _on_terminal(table, "--seconds", "2.5")
    assert code == 0
    assert json.loads(out)["rows"] > 0
    shown, _ = screen.lines()
    labels = [line.split()[0] for line in shown if line[:9].strip() in ("rows/s", "memory")]
    assert labels == ["rows/s", "memory"], "once, as it is redrawn in place"
    assert max(len(line) for line in shown if "░" in line) <= 59


@pytest.mark.slow
def test_an_interrupt_leaves_a_clean_terminal(table):
    code, out, screen = _on_terminal(table, "--seconds", "60", until="█".encode())
    assert (code, out) == (130, "")
    shown, row = screen.lines()
    assert shown[row - 1] == "interrupted"
    assert any(line.startswith("memory") for line in shown[: row - 1])
    assert "\033[?25l" not in screen.getvalue()
