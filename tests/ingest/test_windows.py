"""Windows whose rows readers place at once: which they are, in which order they come, and that nothing else changes."""

from __future__ import annotations

from random import Random

import pytest

from sluice.ingest.columns import ColumnError
from sluice.ingest.knobs import Knobs
from sluice.ingest.memory.governor import Governor
from sluice.ingest.row_order import RowsPlan
from sluice.ingest.stages.completed_windows import CompletedWindows, ReadDone, ReadWorker
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.shuffle import Block, Decoded, Gathering, ReadTask
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


def plan_of(*groups, **options):
    return RowsPlan(
        groups=(tuple(groups),), **{"batch_size": 8, "streams": 2, "window_rows": 16} | options
    )


class TestOrder:
    def finished(self, plan, order):
        """What the reads bring that are decoded in that order, in the order of the plan."""
        schedule, windows = plan.schedule(0), CompletedWindows()
        found = {n: ReadDone(schedule, 1, 8, windows.add(decoded(schedule, n))) for n in order}
        return schedule, windows, [found[n] for n in range(len(schedule.reads))]

    @pytest.mark.parametrize("seed", range(5))
    def test_windows_come_in_their_order_whichever_read_was_decoded_first(self, seed):
        plan = plan_of(*[10] * 40)
        order = list(range(len(plan.schedule(0).reads)))
        Random(seed).shuffle(order)
        schedule, windows, done = self.finished(plan, order)
        assert [w.window for w in windows.in_order(iter(done))] == list(schedule.windows)

    def test_an_error_comes_in_its_windows_turn(self):
        plan = plan_of(*[10] * 40)
        _, windows, done = self.finished(plan, range(len(plan.schedule(0).reads)))
        broken = done[2].windows[0][0]
        done[2].windows[0] = broken, ColumnError("this one")
        came = []
        with raises(ColumnError, "this one"):
            came.extend(windows.in_order(iter(done)))
        assert len(came) == broken


def test_a_window_that_cannot_be_placed_gives_its_memory_back():
    def gather(window, charge):
        raise ColumnError("this one")

    schedule, governor = plan_of(16).schedule(0), Governor(2**40, 0)
    clock = WorkerClock(StageCounters("decode"), governor.lock)
    worker = ReadWorker(
        lambda task, charge: Decoded(task, Rows(), charge),
        CompletedWindows(),
        gather,
        clock=clock,
        shuffle=StageCounters("shuffle"),
        charge_window=lambda _: governor.admit(100, True),
    )
    clock.begin()
    done = worker(ReadTask(schedule, schedule.reads[0]), governor.admit(Rows.nbytes, True))
    assert {str(error) for _, error in done.windows} == {"this one"}
    assert governor.charged == Rows.nbytes


class Counted:
    """Counts what the shuffle stage gets: windows that readers placed, and others."""

    def __init__(self, monkeypatch):
        self.placed = self.others = 0
        in_order = CompletedWindows.in_order

        def counted(windows, reads):
            for window in in_order(windows, reads):
                self.placed += isinstance(window, Block)
                self.others += isinstance(window, Gathering)
                yield window

        monkeypatch.setattr(CompletedWindows, "in_order", counted)


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
