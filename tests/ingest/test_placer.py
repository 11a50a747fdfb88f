"""Rows that move from row groups to their places in batches: which they are, and whose memory they count as."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.flow.decoded import Decoded, ReadTask
from sluice.ingest.flow.placer import Placer
from sluice.ingest.flow.series import Chunks
from sluice.ingest.knobs import Knobs
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Governor
from sluice.ingest.row_order import RowsPlan
from tests.ingest import twin
from tests.open_loader import open_loader
from tests.raises import raises

COLUMNS = Columns(dense=("x",), sparse=("id",), label="y")


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("options", [{"batch_size": 80}, {"batch_size": 8}, {"window_rows": 1500}])
def test_rows_and_order_are_the_twins_whichever_worker_is_first(table, workers, options):
    """Batches that take one row of a stream, and windows of more row groups than are ordered as a whole, too."""
    files, knobs = twin.Table(table.files_of("train")), Knobs(workers={"decode": workers})
    how = {"batch_size": 80, "window_rows": 100} | options
    with open_loader(table, epochs=2, knobs=knobs, **how) as loader:
        for epoch in range(2):
            for batch, rows in zip(loader, twin.batches(loader.plan, epoch), strict=True):
                twin.expect(loader, files, batch, rows)
        stages = {stage.name: stage for stage in loader.snapshot().stages}
    assert list(stages) == ["decode"], "who places the last row of batches finishes them"


def drawn_plan(chance):
    """An order of rows in which windows have parts of row groups, or many whole ones."""
    groups = chance.integers(0, 40, chance.integers(1, 30))
    groups[0] += 8
    streams = int(chance.choice([1, 2, 4]))
    return RowsPlan(
        groups=(tuple(groups.tolist()),),
        batch_size=streams * int(chance.choice([1, 2, 7])),
        streams=streams,
        window_rows=int(chance.choice([3, 16, 200])),
        shuffle=bool(chance.random() < 0.8),
        last="pad",
    )


@pytest.mark.parametrize("seed", range(60))
def test_each_row_goes_to_the_batch_and_the_place_that_the_twin_names(seed):
    """From any step on. Row n of all holds n. Rows of earlier batches are not moved."""
    chance = np.random.default_rng(seed)
    plan = drawn_plan(chance)
    step, starts = int(chance.integers(0, plan.steps)), np.cumsum([0, *plan.groups[0]])
    chunks = Chunks(plan, COLUMNS, 1, Buffers())
    placer = Placer(plan, COLUMNS, str, Buffers())
    governor, schedule, placed = Governor(2**40, 0), plan.schedule(1, step=step), []
    for read in schedule.reads:
        numbers = np.arange(starts[read.group], starts[read.group + 1])
        table = pa.table({"x": numbers.astype(np.float32), "id": numbers, "y": numbers % 2})
        charge = governor.admit(1, True)
        placed.append(
            placer.place(Decoded(ReadTask(schedule, read), table, charge), chunks, charge)
        )
    expected = twin.batches(plan, 1)
    for number in range(step, plan.steps):
        chunk = chunks.take(1, number // chunks.steps)
        floats, ids = (array[number % chunks.steps] for array in chunk.arrays[:2])
        rows = [None if row is None else int(starts[row[1]] + row[2]) for row in expected[number]]
        there = [n for n, row in enumerate(rows) if row is not None]
        assert ids[0][there].tolist() == floats[0][there].tolist() == [rows[n] for n in there]
        assert sum(read.rows_in(number, 1) for read in placed) == len(there)
    assert sum(read.rows_in(0, step) for read in placed) == 0


def test_memory_is_charged_for_moved_rows_until_batches_have_them():
    plan = RowsPlan(groups=((64,),), batch_size=8, streams=2, window_rows=16)
    governor, schedule = Governor(2**40, 0), plan.schedule(0)
    numbers = np.arange(64)
    table = pa.table({"x": numbers / 1, "id": numbers, "y": numbers})
    placer = Placer(plan, COLUMNS, str, Buffers())
    chunks = Chunks(plan, COLUMNS, 1, Buffers())
    charge = governor.admit(1000, True)
    decoded = Decoded(ReadTask(schedule, schedule.reads[0]), table, charge)
    placed = placer.place(decoded, chunks, charge)
    assert placed.nbytes == 64 * chunks.row_bytes
    charge.correct(placed.nbytes)
    placed.give_away(48)
    assert governor.charged == 16 * chunks.row_bytes
    placed.give_away(16)
    assert governor.charged == 0
    assert placed.chunks == ()


def test_a_read_of_which_a_rank_needs_no_row_holds_no_memory():
    plan = RowsPlan(groups=((12,),), batch_size=8, streams=2, window_rows=16, last="pad")
    columns = replace(COLUMNS, sparse=("id", "bag"), bags={"bag": 2.0})
    bags = pa.array([[1, 2]] * 12, pa.list_(pa.int32()))
    table = pa.table({"x": np.ones(12), "id": np.arange(12), "y": np.ones(12), "bag": bags})
    schedule, charge = plan.schedule(0, 1, 2, step=1), Governor(2**40, 0).admit(9, True)
    [read] = schedule.reads
    emptied = replace(read, parts=tuple(replace(p, stop=p.start) for p in read.parts))
    decoded = Decoded(ReadTask(schedule, emptied), table, charge)
    placer = Placer(plan, columns, str, Buffers())
    placed = placer.place(decoded, Chunks(plan, columns, 2, Buffers()), charge)
    assert (placed.rows, placed.nbytes) == (0, 0)


@pytest.mark.parametrize(("row", "is_needed"), [(10, False), (40, True)])
def test_a_value_that_does_not_fit_is_named_by_its_row_if_the_rank_needs_it(row, is_needed):
    plan = RowsPlan(groups=((64,),), batch_size=8, streams=2, window_rows=16, shuffle=False)
    numbers = np.arange(64)
    ids = np.where(numbers == row, -7, numbers)
    table = pa.table({"x": numbers / 1, "id": ids, "y": numbers})
    schedule, charge = plan.schedule(0, 1, 2), Governor(2**40, 0).admit(1, True)
    decoded = Decoded(ReadTask(schedule, schedule.reads[0]), table, charge)
    place = partial(
        Placer(plan, COLUMNS, lambda _: "here", Buffers()).place,
        decoded,
        Chunks(plan, COLUMNS, 2, Buffers()),
        charge,
    )
    if not is_needed:
        assert place().rows == 32
        return
    with raises(ColumnError, f"here, row {row}", "'id'", "-7"):
        place()
