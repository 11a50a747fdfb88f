"""The rows plan on a grid: it is the order's contract, so what is checked here must hold for ever."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from sluice.ingest.permutations import permutation, window_halves
from tests.ingest import twin
from tests.product import PlanError, Position, Read, RowsPlan, WindowPart, compose_order
from tests.raises import raises

pytestmark = pytest.mark.slow

TABLES = {
    "even": ((64, 64), (64, 64), (64, 64)),
    "uneven": ((100, 100, 3), (1,), (57, 100)),
    "one group": ((1000,),),
    "empty groups": ((0,), (40, 0, 40), (), (40,)),
    "many small": tuple((7, 5, 2) for _ in range(20)),
}
GRID = [
    (name, batch, streams, window, last)
    for name, (batch, streams), window, last in itertools.product(
        TABLES, [(8, 8), (24, 4), (60, 2), (5, 1)], [1, 50, 10_000], ["drop", "pad"]
    )
][::5]  # each value of each dimension is among them


PLANS = [
    RowsPlan(
        groups=TABLES[name],
        batch_size=batch,
        streams=streams,
        window_rows=window,
        last=last,
        seed=5,
    )
    for name, batch, streams, window, last in GRID
]


def on_the_grid(test):
    """Runs a test on every plan; not as so many tests, each of which would be checked for what it leaves behind."""

    def run():
        for plan in PLANS:
            print(plan)  # shown if it fails
            test(plan)

    return run


@on_the_grid
def test_each_row_comes_once_and_what_is_left_out_is_counted(plan):
    everything = Counter(
        (f, g, n)
        for f, counts in enumerate(plan.groups)
        for g, rows in enumerate(counts)
        for n in range(rows)
    )
    got = Counter(row for batch in twin.batches(plan, 1) for row in batch)
    filling = got.pop(None, 0)
    assert filling == plan.steps * plan.batch_size - plan.used
    assert max(got.values()) == 1
    assert got <= everything
    assert sum((everything - got).values()) == plan.dropped
    assert (plan.dropped == 0) or plan.last == "drop"
    assert (filling == 0) or plan.last == "pad"
    assert plan.dropped < plan.batch_size
    assert filling < plan.batch_size


@on_the_grid
def test_a_schedule_reads_each_window_once_and_in_the_order_of_need(plan):
    for step in {0, plan.steps // 2, plan.steps - 1}:
        schedule = plan.schedule(3, step=step)
        assert [(w.first, w.stream) for w in schedule.windows] == sorted(
            (w.first, w.stream) for w in schedule.windows
        )
        rows = {n: {} for n in range(len(schedule.windows))}
        for read in schedule.reads:
            assert read.rows == plan.groups[read.file][read.group]
            for part in read.parts:
                for n in range(part.stop - part.start):
                    assert part.at + n not in rows[part.window]
                    rows[part.window][part.at + n] = (read.file, read.group, part.start + n)
        firsts = [read.parts[0].window for read in schedule.reads]
        assert firsts == sorted(firsts)
        for number, window in enumerate(schedule.windows):
            assert [rows[number][n] for n in range(window.rows)] == [
                (s.file, s.group, n) for s in window.slices for n in range(s.start, s.stop)
            ]
            assert window.rows <= plan.widest


@on_the_grid
def test_a_later_step_leaves_out_only_windows_that_are_done(plan):
    all_windows = plan.schedule(0).windows
    for step in range(0, plan.steps + 1, 1 + plan.steps // 7):
        kept = plan.schedule(0, step=step).windows
        assert set(kept) == {w for w in all_windows if w.first + w.rows > step * plan.stream_rows}


def test_row_groups_at_a_cut_are_read_once():
    plan = RowsPlan(groups=((32,) * 31,), batch_size=32, streams=8, window_rows=32)
    assert len(plan.schedule(0).windows) > 31
    assert len(plan.schedule(0).reads) == 31


def test_a_row_group_of_many_windows_is_read_once():
    plan = RowsPlan(groups=((1000,) * 8,), batch_size=8, streams=8, window_rows=100, shuffle=False)
    assert len(plan.schedule(0).windows) == 8 * 13
    assert len(plan.schedule(0).reads) == 8


@pytest.mark.parametrize("seed", range(20))
def test_pieces_have_each_row_and_each_part_without_rows_once(seed):
    draw = random.Random(seed)
    rows = draw.randint(1, 30)
    starts = [draw.randrange(rows) for _ in range(5)]
    parts = [
        WindowPart(window, 7 * window, start, draw.randint(start, min(rows, start + 9)))
        for window, start in enumerate(starts)
    ]
    cuts = sorted({0, rows, *draw.choices([*starts, *range(rows)], k=4)})

    def spans(read):
        for part in read.parts:
            assert 0 <= part.start <= part.stop <= read.rows
            yield part.window, part.at, read.first + part.start, part.stop - part.start

    read = Read(file=0, group=0, rows=rows, parts=tuple(parts))
    made = [span for piece in read.cut_at(cuts) for span in spans(piece)]
    one_by_one = [
        [(w, at + n, start + n) for w, at, start, count in some for n in range(count)]
        for some in (sorted(made), spans(read))
    ]
    assert one_by_one[0] == one_by_one[1]
    empty = [[span for span in some if not span[3]] for some in (sorted(made), spans(read))]
    assert empty[0] == empty[1]


def test_each_epoch_and_seed_has_an_order_of_its_own_also_of_row_groups():
    orders = set()
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        plan = RowsPlan(groups=((100,) * 20,), batch_size=40, seed=seed, streams=1)
        orders.add(tuple(read.group for read in plan.schedule(epoch).reads))
    assert len(orders) == 3


def test_the_order_is_the_one_of_the_first_release():
    """Golden: a change here breaks every saved position."""
    plan = RowsPlan(groups=((6, 6), (5,)), batch_size=4, streams=2, window_rows=6, seed=1)
    flat = [f * 100 + g * 10 + n for batch in twin.batches(plan, 0) for f, g, n in batch]
    assert flat == GOLDEN, flat
    assert plan.digest == GOLDEN_DIGEST
    assert permutation(8, "golden").tolist() == GOLDEN_PERMUTATION


GOLDEN = [1, 0, 10, 12, 2, 3, 11, 13, 4, 5, 14, 103, 101, 100, 102, 104]
GOLDEN_DIGEST = "214d3d78b5815ba4"
GOLDEN_PERMUTATION = [4, 6, 0, 3, 1, 2, 5, 7]


@pytest.mark.parametrize("n", [1, 2, 5, 4096, 4097, 32768])
def test_the_order_of_a_window_is_a_permutation(n):
    orders = [compose_order(*window_halves(n, 0, 0, 0, number), n) for number in range(3)]
    assert all(np.array_equal(np.sort(order), np.arange(n)) for order in orders)
    assert n < 5 or len({order.tobytes() for order in orders}) == 3


@on_the_grid
def test_state_goes_there_and_back(plan):
    for position in (Position(0, 0), Position(3, plan.steps - 1)):
        assert plan.position(plan.state(position)) == position
    assert plan.position(plan.state(Position(3, plan.steps))) == Position(4, 0)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"seed": 2}, ("seed", 1, 2)),
        ({"batch_size": 48}, ("batch_size", 40, 48)),
        ({"groups": ((100, 100, 3), (1,), (57, 101))}, ("rows", 361, 362)),
        ({"groups": ((100, 100, 4), (1,), (57, 99))}, ("row groups", "numbers of rows")),
        ({"shuffle": False}, ("shuffle", True, False)),
    ],
)
def test_a_state_of_another_order_is_refused_with_the_difference(change, facts):
    values = {"groups": TABLES["uneven"], "batch_size": 40, "seed": 1}
    state = RowsPlan(**values).state(Position(1, 2))
    with raises(PlanError, *facts):
        RowsPlan(**{**values, **change}).position(state)


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"batch_size": 10, "streams": 8}, ("batch_size 10", "8 streams", 2)),
        ({"batch_size": 4000}, ("batch_size 4000", 361, 360, "last='pad'")),
        ({"last": "keep"}, ("last", "'keep'", "drop", "pad")),
        ({"groups": ((0,),)}, ("no rows",)),
        ({"window_rows": -1}, ("window_rows", -1)),
    ],
)
def test_plans_that_cannot_be_are_refused(values, facts):
    with raises(PlanError, *facts):
        RowsPlan(**{"groups": TABLES["uneven"], "batch_size": 8, **values})
