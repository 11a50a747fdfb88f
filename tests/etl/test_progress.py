"""What a person sees of a job at work: on a terminal a line that moves, elsewhere plain lines."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace

import pytest

from sluice.etl.jobs.progress import JobProgress, Pass
from sluice.etl.spark.engine import passes_of
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
    shown = Pass("pass 1 of 2, ", 400, 2_400_000_000, lambda: next(clock))
    assert shown.text == "pass 1 of 2, [....................] 0%"
    shown.add(1200, 100)
    assert shown.text == "pass 1 of 2, [#####...............] 25%, 1,200 rows, 100 MB/s, 18 s left"


class Stages(list):
    """Spark's active stages, as its JVM hands them over: (number, tasks done, tasks, rows read, bytes read)."""

    size = list.__len__

    def apply(self, number: int) -> SimpleNamespace:
        names = ("stageId", "numCompleteTasks", "numTasks", "inputRecords", "inputBytes")
        return SimpleNamespace(
            **{
                name: lambda value=value: value
                for name, value in zip(names, self[number], strict=True)
            }
        )


def test_a_spark_pass_says_the_same_of_its_stages():
    active, clock = Stages([(1, 0, 4, 0, 0)]), iter((10.0, 14.0, 20.0, 20.0, 26.0))
    store = SimpleNamespace(activeStages=lambda: active)
    sc = SimpleNamespace(statusStore=lambda: store)
    so_far = passes_of(
        SimpleNamespace(sparkContext=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: sc))),
        lambda: next(clock),
    )
    assert so_far() == "[....................] 0%"
    active[:] = [(1, 1, 4, 5000, 200_000_000)]
    assert so_far() == "[#####...............] 25%, 5,000 rows, 50 MB/s, 12 s left"
    active[:] = [
        (1, 2, 4, 20, 200_000_000)
    ]  # batches of rows that are kept: how many rows, nobody knows
    assert so_far() == "[##########..........] 50%, 20 MB/s, 10 s left"
    active[:] = [
        (2, 3, 6, 7, 700)
    ]  # another stage: the clock begins anew, and no speed is known yet
    assert so_far() == "[##########..........] 50%, 7 rows"
    active[:] = [(2, 3, 6, 7, 0)]
    assert so_far() == "[##########..........] 50%, 7 rows, 6 s left"
    active.clear()
    assert so_far() == "…"


def test_a_terminal_shows_how_far_a_stage_is_and_then_how_long_it_took():
    out = Terminal("fitting 5 of 9")
    progress = JobProgress(out, every_s=0.001)
    progress.follow(lambda: "5 of 9")
    with progress.stage("fitting"):
        assert out.seen.wait(60)
    last = out.text.split("\x1b[2K")[-1]
    assert last.startswith("fitting: done in ")
    assert last.endswith(" s\n")


def test_elsewhere_a_long_stage_says_every_few_seconds_how_far_it_is():
    out = Terminal("fitting 5 of 9")
    out.isatty = lambda: False
    progress = JobProgress(out, every_s=0.001)
    progress.follow(lambda: "5 of 9")
    with progress.stage("fitting"):
        assert out.seen.wait(60)
    begun, between, *_ = out.text.splitlines()
    assert (begun, between) == ("fitting …", "fitting 5 of 9 0 s")
    assert "\x1b" not in out.text


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
