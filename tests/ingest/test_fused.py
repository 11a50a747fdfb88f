"""Stages that are fused and split while batches come: rows, order, errors and counters stay what they were."""

import threading
from collections import deque
from random import Random

import pytest

from sluice import Knobs, Transform
from sluice.ingest.loader import BatchLoader
from sluice.ingest.memory.governor import Governor
from sluice.ingest.stages.batch import series_steps
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.quarantine import QuarantineError
from tests.ingest.test_pool import WAIT_S, Clock
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
                turns.append(frozenset(name for name in "bc" if random.random() < 0.5))
                loader.apply(
                    Knobs(
                        workers={name: random.randint(1, 3) for name in "abc"},
                        fused=turns[-1],
                        read_ahead_bytes=2**20,
                        prefetch_bytes=2**20,
                    )
                )

        assert contents(loader, turn) == expected
    assert len(turns) > 200
    assert len(set(turns)) == 4


def test_the_workers_of_the_stage_before_do_the_work_and_give_it_back(table):
    at_work = {"a": set(), "b": set()}

    def named(stage):
        return lambda columns: at_work[stage].add(threading.current_thread().name)

    with loading(table, (named("a"), named("b")), Knobs(fused=["b"])) as loader:
        list(loader)
        assert at_work["a"] == at_work["b"] == {"sluice-a-0"}
        assert not loader.pipeline._pools["b"]._threads, "nobody to hand over to"
        assert loader.snapshot().stage("b").workers == 1
        loader.apply(Knobs(workers={"a": 2, "b": 3}, fused=["b"]))
        assert loader.snapshot().stage("b").workers == 2, "those of a"
        loader.apply(Knobs(workers={"b": 3}))
        at_work["b"].clear()
        list(loader)
        assert at_work["b"] <= {"sluice-b-0", "sluice-b-1", "sluice-b-2"}
        assert at_work["b"]
        assert loader.snapshot().stage("b").workers == 3


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
        few, many = (loader.snapshot().stage("batch").items for loader in (plain, tuned))
    assert many >= len(tuned) / 2 > 1.5 * few


def test_the_time_of_a_worker_counts_for_the_stage_whose_work_it_does():
    clock = Clock()
    own, other = StageCounters("own", clock), StageCounters("other", clock)
    own.change(waiting=1)
    stint = WorkerClock(own, threading.RLock())
    for seconds, step in (
        (1, stint.begin),
        (2, lambda: stint.go_over(other)),
        (4, lambda: stint.go_over(own)),
        (8, lambda: stint.go_over(other)),
        (16, stint.end),
        (32, lambda: None),
    ):
        clock.now += seconds
        step()
        own.change()
        assert own.busy_s <= clock.now
    other.change()
    assert (own.busy_s, other.busy_s, own.wait_input_s) == (2 + 8, 4 + 16, 1 + 32)
    assert own.cpu_s + other.cpu_s > 0
    assert min(own.finished_s, other.finished_s) > 0


@pytest.mark.parametrize("fused", [[], ["b"]])
def test_an_error_names_its_own_stage(table, fused):
    functions = (plus, NAME + "fails_on_odd_labels")
    with (
        loading(table, functions, Knobs(fused=fused)) as loader,
        raises(QuarantineError, "row group", "row", "'b'", "ValueError"),
    ):
        next(iter(loader))


class TestPool:
    """Items are numbers; those that have `done` pass, the others come out negative."""

    def _pool(self, items, done, workers):
        return Pool(
            StageCounters("work"),
            iter(items),
            lambda _stint: lambda n, _charge: -n,
            workers=workers,
            limit_bytes=9,
            governor=Governor(10**9, 0),
            size=lambda _: 1,
            measure=lambda _: (1, 1),
            passes=done,
        )

    @pytest.mark.parametrize("seed", range(10))
    def test_any_mixture_comes_in_order_whatever_the_workers(self, seed):
        random = Random(seed)
        done = {n for n in range(1, 2000) if random.random() < 0.5}
        pool, taken = self._pool(range(1, 2000), done.__contains__, random.randint(0, 2)), []
        for n in pool:
            taken.append(n)
            if random.random() < 0.2:
                pool.resize(random.choice([0, 0, 1, 3]))
        assert taken == [n if n in done else -n for n in range(1, 2000)]
        pool.join(WAIT_S)
        assert pool.gone
