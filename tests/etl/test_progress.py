"""What a person sees of a job at work: on a terminal a line that moves, elsewhere plain lines."""

from threading import Event

import pytest

from sluice.etl.jobs.progress import JobProgress, Pass
from tests.etl.jobs import Said


class Terminal(Said):
    """Tells when a line with `until` was written."""

    def __init__(self, until: str) -> None:
        super().__init__()
        self.until, self.seen = until, Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.until in text:
            self.seen.set()
        return super().write(text)


def test_a_pass_says_its_rows_its_speed_and_the_time_left():
    clock = iter((0.0, 2.0, 6.0))
    shown = Pass("pass 1 of 2, ", 800_000_000, lambda: next(clock))
    assert shown.text == "pass 1 of 2, [....................] 0%"
    shown.add(1200, 200_000_000)
    assert shown.text == "pass 1 of 2, [#####...............] 25%, 1,200 rows, 33 MB/s, 18 s left"


def test_a_terminal_shows_how_far_a_stage_is_and_then_how_long_it_took():
    out = Terminal("fitting 5 of 9")
    progress = JobProgress(out, every_s=0.001)
    progress.follow(lambda: "5 of 9")
    with progress.stage("fitting"):
        assert out.seen.wait(60)
    last = out.text.split("\x1b[2K")[-1]
    assert last.startswith("fitting: done in ")
    assert last.endswith(" s\n")


def test_elsewhere_a_stage_is_two_lines_and_one_that_fails_is_not_said_to_be_done():
    out = Said()
    with JobProgress(out).stage("fitting"):
        pass
    with pytest.raises(RuntimeError), JobProgress(out).stage("writing"):
        raise RuntimeError
    begun, ended, failed = out.text.splitlines()
    assert (begun, failed) == ("fitting …", "writing …")
    assert ended.startswith("fitting: done in ")
    assert "\x1b" not in out.text
