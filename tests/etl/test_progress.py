"""What a person sees of a job at work: on a terminal a line that moves, elsewhere plain lines."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace

import pytest

from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spark.engine import tasks_of
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


def tracked(*stages: tuple[int, int]) -> SimpleNamespace:
    """A session whose active stages have so many tasks done, of so many."""
    found = dict(enumerate(SimpleNamespace(numCompletedTasks=done, numTasks=of) for done, of in stages))
    tracker = SimpleNamespace(getActiveStageIds=lambda: list(found), getStageInfo=found.get)
    return SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))


def test_a_terminal_shows_how_far_a_stage_is_and_then_how_long_it_took():
    out = Terminal("5/9 tasks")
    progress = JobProgress(out)
    progress.follow(tasks_of(tracked((2, 4), (3, 5))))
    with progress.stage("fitting"):
        assert out.seen.wait(20)
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
