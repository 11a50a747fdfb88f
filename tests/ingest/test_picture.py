"""The picture of a run: bars as high as the rate, a line of headroom, letters of events, and the line above it."""

from __future__ import annotations

import io

from sluice.tools.terminal import Picture, View, summary
from tests.ingest.test_stats import snapshot
from tests.raises import assert_names


def _column(lines, number):
    return "".join(line[9 + number] for line in lines[:-2])


def test_bars_line_and_letters_are_where_they_belong():
    picture = Picture(
        points=[(float(at), 100.0 if at <= 50 else 50.0) for at in range(1, 101)],
        headroom=200.0,
        marks=[(50.0, "A")],
    )
    lines = picture.lines(109, height=11)  # a column a second, a row for each 20
    assert len({len(line) for line in lines}) == 1
    assert _column(lines, 10).count("█") == 5
    assert _column(lines, 80).count("█") == 2
    assert lines[1].startswith("    200 ┤╌╌╌")
    assert all(_column(lines, n)[1] == "╌" for n in range(100))
    assert lines[-2][9 + 50] == "A"
    assert lines[-1].endswith("100 s")


def test_two_points_are_needed_and_any_width_will_do():
    assert Picture(points=[(1.0, 1.0)]).lines(80) == []
    for width in (1, 20, 300):
        assert Picture(points=[(1.0, 0.0), (2.0, 0.0)], marks=[(2.0, "A")]).lines(width)


def test_without_a_terminal_marked_lines_are_printed_as_plain_lines():
    stream = io.StringIO()
    view = View(stream)
    view.tell("before anything is seen", mark=True)
    for at in (1.0, 2.0, 3.0):
        view.show(snapshot(at=at, rows=int(100 * at), consumer_compute_s=at / 2))
    view.tell("a worker was killed", mark=True)
    view.close()
    assert view._picture.points == [(1.0, 100.0), (2.0, 100.0)]
    assert view._picture.headroom == 200.0
    assert view._picture.marks == [(2.0, "A")]
    lines = stream.getvalue().splitlines()
    assert lines[0] == "before anything is seen"
    assert lines[-1] == "A. a worker was killed"


def test_a_terminal_gets_the_picture_and_marked_lines_stay():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    view = View(stream)
    for at in (1.0, 2.0, 3.0):
        view.show(snapshot(at=at, rows=int(100 * at), consumer_compute_s=at / 2))
    view.tell("a worker was killed", mark=True)
    view.close()
    text = stream.getvalue()
    for word in ("A. a worker was killed", "└─", "╌╌╌", "stage"):
        assert word in text


def test_the_line_names_why_work_was_held_back():
    before = snapshot(at=1.0, held_back=2, held_back_pressure=1)
    after = snapshot(at=2.0, held_back=9, held_back_pressure=3)
    assert_names(summary(before, after), "7×", "memory", "5 limit", "2 pressure")
    assert "held back" not in summary(before, before)


def test_a_fused_stage_is_shown_as_fused(capsys):
    view = View()
    for at in (1.0, 2.0):
        view.show(snapshot(at=at), {"read"})
    assert "| read fused, " in capsys.readouterr().err
