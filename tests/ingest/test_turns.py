"""Stages that are resized while batches come: rows, order, errors and counters stay what they were."""

from collections import deque
from random import Random

import pytest

from sluice import Knobs, Transform
from sluice.ingest.loader import BatchLoader
from sluice.ingest.stages.batch import series_steps
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.quarantine import QuarantineError
from tests.ingest.test_pool import Clock
from tests.ingest.worker_functions import minus, plus, twice
from tests.open_loader import open_loader
from tests.raises import raises

pytestmark = pytest.mark.slow

EPOCHS = 6
NAME = "tests.ingest.worker_functions:"


def loading(table, functions, knobs=None, **options):
    """Transforms a, b, c, …, each a stage of its own."""
    transforms = [
        Transform(function, name, apart=True)
        for name, function in zip("abc", functions, strict=False)
    ]
    return open_loader(
        table, transforms=transforms, knobs=knobs, **{"batch_size": 80, "window_rows": 60} | options
    )


def contents(loader, between=lambda: None):
    """What came in some epochs, and the order hashes. In any other order, the functions would give other numbers."""
    batches, hashes = [], []
    for _ in range(EPOCHS):
        for batch in loader:
            batches.append((batch.epoch, batch.step, batch.checksum, float(batch.dense.sum())))
            between()
        hashes.append(loader.order_hash)
    return batches, hashes


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_turns_with_resizes_change_neither_rows_nor_order(table, seed):
    functions, random, turns = (plus, twice, minus), Random(seed), []
    with loading(table, functions, epochs=EPOCHS) as loader:
        expected = contents(loader)
    with loading(
        table, functions, Knobs(read_ahead_bytes=2**20, prefetch_bytes=2**20), epochs=EPOCHS
    ) as loader:

        def turn():
            for _ in range(random.randint(0, 2)):
                turns.append({name: random.randint(1, 3) for name in "abc"})
                loader.apply(
                    Knobs(
                        workers=turns[-1],
                        read_ahead_bytes=2**20,
                        prefetch_bytes=2**20,
                    )
                )

        assert contents(loader, turn) == expected
    assert len(turns) > 200
    assert len({tuple(turn.values()) for turn in turns}) == 27


def test_batches_pass_a_users_function_by_the_time_that_it_takes_so_they_come_steadily(
    table, monkeypatch
):
    for steps, times in (
        (32, []),
        (2, [(0.0, 0, 1)]),  # nothing is known yet
        (4, [(0.1, 2048 * 100, 1), (4.0, 2048 * 64, 1)]),  # of 62 ms each
        (1, [(9.0, 2048, 1)]),
        (12, [(1.0, 2048 * 200, 4)]),  # of 5 ms each: four workers share a quarter second
        (4, [(1.0, 2048 * 200, 64)]),  # a piece of work has 20 ms
    ):
        assert series_steps(32, 2048, times) == steps
    with (
        BatchLoader(table, batch_size=64) as plain,
        BatchLoader(table, batch_size=64, transforms=[Transform(twice, "twice")]) as tuned,
    ):
        for name in ("LONG_S", "SHORT_S"):
            monkeypatch.setattr(
                f"sluice.ingest.stages.batch.{name}", 0.0
            )  # every function takes too long
        for loader in (plain, tuned):
            deque(loader, maxlen=0)
        assert plain.order_hash == tuned.order_hash
        few, many = (loader.pipeline._pools["decode"]._made for loader in (plain, tuned))
    assert many >= len(tuned) / 2 > 1.5 * few


def test_the_time_of_a_worker_counts_for_its_stage():
    clock = Clock()
    own = StageCounters("own", clock)
    own.change(waiting=1)
    stint = WorkerClock(own)
    for seconds, step in ((1, stint.begin), (2, stint.end), (4, lambda: None)):
        clock.now += seconds
        step()
        own.change()
    assert (own.busy_s, own.wait_input_s) == (2, 1 + 4)
    assert min(own.cpu_s, own.finished_s) > 0


def test_an_error_names_its_own_stage(table):
    with (
        loading(table, (plus, NAME + "fails_on_odd_labels")) as loader,
        raises(QuarantineError, "row group", "row", "'b'", "ValueError"),
    ):
        next(iter(loader))
