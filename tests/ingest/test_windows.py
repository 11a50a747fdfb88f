"""Windows whose rows readers place at once: which they are, in which order they come, and that nothing else changes."""

from __future__ import annotations

from random import Random

import pytest

from sluice.ingest.columns import ColumnError
from sluice.ingest.knobs import Knobs
from sluice.ingest.memory.governor import Governor
from sluice.ingest.row_order import RowsPlan
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.shuffle import Decoded, ReadTask, ReadWorker, Windows
from tests.ingest import twin
from tests.open_loader import open_loader
from tests.raises import raises

JOINED = frozenset({"shuffle"})


class Rows:
    """Stands for a table: only its size counts here."""

    nbytes = 8


def decoded(schedule, number):
    return Decoded(
        ReadTask(schedule, schedule.reads[number]), Rows(), Governor(2**40, 0).admit(8, True)
    )


def windows_of(plan, place=None, charge_early=lambda *_: None):
    return Windows(plan, place, StageCounters("shuffle"), charge_early)


def plan_of(*groups, **options):
    return RowsPlan(
        groups=(tuple(groups),), **{"batch_size": 8, "streams": 2, "window_rows": 16} | options
    )


class TestOrder:
    def finished(self, plan, order):
        """The windows of reads that are decoded in that order, and the reads in the order of the plan."""
        schedule, windows = plan.schedule(0), windows_of(plan)
        reads = [decoded(schedule, n) for n in range(len(schedule.reads))]
        for n in order:
            for window in windows.add(reads[n]):
                window.ready = True
        return schedule, windows, iter(reads)

    @pytest.mark.parametrize("seed", range(5))
    def test_windows_come_in_their_order_whichever_read_was_decoded_first(self, seed):
        plan = plan_of(*[10] * 40)
        order = list(range(len(plan.schedule(0).reads)))
        Random(seed).shuffle(order)
        schedule, windows, reads = self.finished(plan, order)
        assert [w.window for w in windows.in_order(reads)] == list(schedule.windows)

    def test_an_error_comes_in_its_windows_turn(self):
        plan = plan_of(*[10] * 40)
        _, windows, reads = self.finished(plan, range(len(plan.schedule(0).reads)))
        windows._windows[0, 3].error = ColumnError("this one")
        came = []
        with raises(ColumnError, "this one"):
            came.extend(windows.in_order(reads))
        assert len(came) == 3


def test_a_window_that_cannot_be_placed_gives_its_memory_back():
    def place(window, charge):
        raise ColumnError("this one")

    plan = plan_of(16)
    schedule, governor = plan.schedule(0), Governor(2**40, 0)
    windows = windows_of(plan, place, lambda *_: governor.admit(100, True))
    clock = WorkerClock(StageCounters("decode"), governor.lock)
    worker = ReadWorker(lambda task, charge: Decoded(task, Rows(), charge), windows, clock)
    clock.begin()
    read = worker(ReadTask(schedule, schedule.reads[0]), governor.admit(Rows.nbytes, True))
    with raises(ColumnError, "this one"):
        next(windows.in_order(iter([read])))
    assert governor.charged == Rows.nbytes


class Counted:
    """Counts what the shuffle stage gets: windows that readers placed, and others."""

    def __init__(self, monkeypatch):
        self.placed = self.others = 0
        in_order = Windows.in_order

        def counted(windows, reads):
            for window in in_order(windows, reads):
                self.placed += window.chunks is not None
                self.others += window.chunks is None
                yield window

        monkeypatch.setattr(Windows, "in_order", counted)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_readers_place_windows_and_rows_and_order_are_the_twins(table, monkeypatch, workers):
    files, came = twin.Table(table.files_of("train")), Counted(monkeypatch)
    knobs = Knobs(workers={"decode": workers}, fused=JOINED)
    with open_loader(table, batch_size=80, epochs=2, knobs=knobs, window_rows=100) as loader:
        for epoch in range(2):
            for batch, rows in zip(loader, twin.batches(loader.plan, epoch), strict=True):
                twin.expect(loader, files, batch, rows)
        stages = {stage.name: stage for stage in loader.snapshot().stages}
    assert came.placed > came.others  # some may be complete long before they are due
    assert stages["shuffle"].items == came.placed + came.others
    assert stages["shuffle"].rows == stages["batch"].rows
