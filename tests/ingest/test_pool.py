"""The ordered, elastic pool: order, resizing, bounds in bytes, errors in their place, and its end."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from dataclasses import replace

import pytest

from sluice.ingest.errors import Closed
from sluice.ingest.memory.governor import Governor
from sluice.ingest.stages.counters import StageCounters
from sluice.ingest.stages.pool import Gatherer, Pool
from tests.ingest.twin import eventually
from tests.raises import raises

WAIT_S = 60.0


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make():
    """Makes pools whose items are 1 byte, and sends their workers home after the test."""
    made = []

    def pool(
        upstream,
        work,
        *,
        workers=1,
        limit_bytes=1,
        governor=None,
        size=lambda _: 1,
        gatherer=None,
    ):
        made.append(
            Pool(
                StageCounters("work"),
                iter(upstream),
                lambda: lambda item, _charge: work(item),
                workers=workers,
                limit_bytes=limit_bytes,
                governor=governor or Governor(1000, 0),
                size=size,
                measure=lambda _: (1, 1),
                gatherer=gatherer,
            )
        )
        return made[-1]

    yield pool
    for made_pool in made:
        made_pool.close()
    for made_pool in made:
        made_pool.join(WAIT_S)
        assert made_pool.gone


def test_results_come_in_the_order_of_the_work(make):
    assert list(make(range(500), lambda n: n * n, workers=7, limit_bytes=5)) == [
        n * n for n in range(500)
    ]


def test_an_error_of_measuring_memory_comes_in_the_place_of_the_item_that_needed_it(make):
    """A control group's file may be unreadable. The item is neither lost nor waited for."""
    asked = itertools.count()

    class Unreadable(Governor):
        def admit(self, size, due):
            if next(asked) == 3:
                raise PermissionError("memory.current")
            return super().admit(size, due)

    results, got = make(range(9), lambda n: n, governor=Unreadable(1000, 0)), []
    with raises(PermissionError, "memory.current"):
        for result in results:
            got.append(result)
    assert got == [*range(len(got))]


def test_with_the_first_item_stuck_the_others_complete(make):
    free, done = threading.Event(), threading.Semaphore(0)

    def work(n):
        if n == 0:
            assert free.wait(WAIT_S)
        else:
            done.release()
        return n

    pool = make(range(50), work, workers=2, limit_bytes=20)
    for _ in range(19 + 2):
        assert done.acquire(timeout=WAIT_S)
    free.set()
    assert list(pool) == list(range(50))


def test_a_grown_pool_works_on_four_items_at_once(make):
    barrier = threading.Barrier(4)
    first = threading.Event()

    def work(n):
        if n == 0:
            first.set()
        else:
            barrier.wait(WAIT_S)
        return n

    pool = make(range(9), work, workers=1, limit_bytes=9)
    assert first.wait(WAIT_S)
    pool.resize(4)
    assert list(pool) == list(range(9))


def test_a_shrunk_pool_goes_on_with_fewer_and_drops_nothing(make):
    all_in, free, lock = threading.Barrier(5), threading.Event(), threading.Lock()
    at_once, seen = 0, {}

    def work(n):
        nonlocal at_once
        with lock:
            at_once += 1
            seen[n] = at_once
        if n < 4:
            all_in.wait(WAIT_S)
            assert free.wait(WAIT_S)
        with lock:
            at_once -= 1
        return n

    pool = make(range(40), work, workers=4, limit_bytes=40)
    all_in.wait(WAIT_S)
    pool.resize(1)
    free.set()
    assert list(pool) == list(range(40))
    assert [seen[n] for n in range(4, 40)] == [1] * 36
    assert pool._live_workers == 1


def test_random_resizes_lose_and_repeat_nothing(make):
    pool = make(range(3000), lambda n: n, workers=3, limit_bytes=8)
    sizes = [1, 9, 2, 4, 16, 1, 3]
    got = []
    for n in pool:
        got.append(n)
        if n % 40 == 0:
            pool.resize(sizes[n // 40 % len(sizes)])
            pool.limit(1 + n % 7)
    assert got == list(range(3000))


def test_what_waits_is_bounded_in_bytes(make):
    limit, workers = 10, 2
    taken, beyond = itertools.count(), threading.Event()

    def size(_item):
        if next(taken) == limit + workers:
            beyond.set()  # this one gets no room: the bound, and one in each worker's hands, are used up
        return 1

    pool = make(itertools.count(), lambda n: n, workers=workers, limit_bytes=limit, size=size)
    assert beyond.wait(WAIT_S)
    eventually(lambda: pool.waiting_bytes == limit + workers)
    assert next(taken) == limit + workers + 1


def test_an_error_comes_in_its_place_and_what_is_at_work_comes_after_it(make):
    at_work, asked = threading.Event(), threading.Event()

    def work(n):
        if n == 1:
            assert at_work.wait(WAIT_S)
            raise ValueError("one")
        if n == 2:
            at_work.set()
            assert asked.wait(WAIT_S)
        return n

    pool = make(range(10), work, workers=2, limit_bytes=10)
    assert next(pool) == 0
    with raises(ValueError, "one"):
        next(pool)
    threading.Timer(0.1, asked.set).start()
    assert next(pool) == 2


def test_work_that_enlarges_its_items_reserves_as_much_as_it_makes_of_the_next():
    reserved, governor = [], Governor(1000, 0)
    pool = Pool(
        StageCounters("work"),
        iter(range(3)),
        lambda: lambda _item, charge: reserved.append(charge.bytes),
        workers=1,
        limit_bytes=1,
        governor=governor,
        size=lambda _: 5,
        measure=lambda _: (1, 20),
    )
    assert list(pool) == [None] * 3
    pool.join(WAIT_S)
    assert reserved == [5, 20, 20]
    assert governor.charged == 3 * 20


def test_an_error_of_the_input_comes_after_what_was_taken(make):
    def upstream():
        yield from range(3)
        raise OSError("gone")

    pool = make(upstream(), lambda n: n, workers=3, limit_bytes=10)
    assert [next(pool), next(pool), next(pool)] == [0, 1, 2]
    with raises(OSError, "gone"):
        next(pool)


def test_closing_wakes_a_waiting_consumer(make):
    never = threading.Event()

    def upstream():
        yield 0
        never.wait(WAIT_S)

    pool = make(upstream(), lambda n: n)
    assert next(pool) == 0
    ended = []

    def consume():
        try:
            next(pool)
        except Closed:
            ended.append("closed")

    consumer = threading.Thread(target=consume)
    consumer.start()
    pool.close()
    consumer.join(WAIT_S)
    never.set()
    assert ended == ["closed"]


def test_a_closed_pool_lets_go_of_what_was_on_its_way(make):
    """A pool may be held for long: Petastorm's Reader lies in a circle of references."""

    class Rows:
        pass

    def upstream():
        held = Rows()
        made.append(weakref.ref(held))
        yield from itertools.count()

    def work(_n):
        rows = Rows()
        made.append(weakref.ref(rows))
        return rows

    made = []
    pool = make(upstream(), work, limit_bytes=2)
    eventually(lambda: pool.waiting_bytes > 1)
    gc.disable()
    try:
        pool.close()
        pool.join(WAIT_S)
        assert not any(ref() for ref in made)
    finally:
        gc.enable()
    with pytest.raises(Closed):
        next(pool)


def test_memory_holds_back_early_work_but_never_the_next_item(make):
    governor = Governor(limit=10, minimum=8)
    pool = make(
        range(20), lambda n: n, workers=4, limit_bytes=100, governor=governor, size=lambda _: 4
    )
    # No early item of 4 bytes fits into the 2 above the minimum, so one is in work or waits at a time.
    got = []
    for n in pool:
        got.append(n)
        assert governor.charged <= 10 + 4 * len(got)  # nobody releases here
    assert got == list(range(20))
    assert governor.reasons.total() > 0


def test_a_closed_pool_is_no_end_for_the_one_behind_a_generator(make):
    never = threading.Event()

    def upstream():
        yield 0
        never.wait(WAIT_S)

    first = make(upstream(), lambda n: n)
    second = make((n for n in first), lambda n: n, workers=2)
    assert next(second) == 0
    first.close()
    with pytest.raises(Closed):
        next(second)
    never.set()


def threes(finish=lambda item, _charge: item, check=lambda result: None):
    """A gatherer that makes one item of each three results, and none of what is left."""
    held = []

    def add(result):
        check(result)
        held.append(result)
        if len(held) == 3:
            yield tuple(held)
            held.clear()

    return Gatherer(add, len, finish)


def test_items_of_a_gatherer_come_in_order_through_resizes(make):
    pool = make(range(3001), lambda n: n, workers=3, limit_bytes=8, gatherer=threes())
    got = []
    for item in pool:
        got.append(item)
        if len(got) % 20 == 0:
            pool.resize(1 + len(got) // 20 * 5 % 7)
            pool.limit(1 + len(got) % 11)
    assert got == [(n, n + 1, n + 2) for n in range(0, 3000, 3)]


def test_memory_holds_back_what_would_be_finished_early_but_never_the_next_item(make):
    governor, started = Governor(limit=100, minimum=40), threading.Event()

    def work(n):
        assert started.wait(WAIT_S)
        return n

    def finish(item, charge):
        assert charge.early or item[0] == 3 * pool._next_out
        return item[0]

    gatherer = replace(threes(finish), size=lambda _: 40)
    pool = make(range(30), work, limit_bytes=1000, governor=governor, gatherer=gatherer)
    started.set()
    eventually(lambda: governor.reasons.total() > 0)  # nobody releases here
    assert list(pool) == [*range(0, 30, 3)]


def test_the_worker_that_completes_an_item_finishes_it_while_others_go_on(make):
    """The first result comes last, so its worker finishes what it completes; another one reads on meanwhile."""
    others, on, finished = threading.Event(), threading.Event(), []

    def work(n):
        if n == 0:
            assert others.wait(WAIT_S)
        elif n == 2:
            others.set()
        elif n == 4:
            on.set()
        return n, threading.get_ident()

    def finish(item, _charge):
        if item[0][0] == 0:
            assert on.wait(WAIT_S)
        finished.append(threading.get_ident())
        return item

    pool = make(range(6), work, workers=2, limit_bytes=20, gatherer=threes(finish))
    first, second = pool
    assert [n for n, _ in first + second] == [*range(6)]
    assert finished[-1 if finished[0] != first[0][1] else 0] == first[0][1]


@pytest.mark.parametrize("fails", ["work", "add", "finish"])
def test_an_error_comes_where_its_item_would(make, fails):
    def fail_at(where, n):
        if where == fails and n == 4:
            raise ValueError("four")
        return n

    gatherer = threes(
        lambda item, _charge: [fail_at("finish", n) for n in item],
        lambda n: fail_at("add", n),
    )
    pool = make(range(12), lambda n: fail_at("work", n), workers=2, gatherer=gatherer)
    assert next(pool) == [0, 1, 2]
    with raises(ValueError, "four"):
        next(pool)
    rest = [*pool]
    assert rest == ([[6, 7, 8], [9, 10, 11]] if fails == "finish" else [])
