"""A server under load, decided without sockets: who is let in, how large a batch is, which connection goes."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from sluice.dlrm.serving.batcher import BATCH_S, Batcher, Full
from sluice.dlrm.serving.connections import Connections
from sluice.dlrm.serving.decode import ARROW, JSON, rows_at_most
from sluice.dlrm.serving.pace import Pace
from sluice.dlrm.serving.server import affordable
from tests.dlrm import clicks_table
from tests.dlrm.serving.test_serving import arrow, as_json
from tests.raises import assert_names


@pytest.mark.parametrize(("fixed", "each"), [(1e-3, 5e-5), (2e-2, 1e-6), (1e-4, 1e-3)])
def test_a_pace_is_learned_from_batches_of_any_size_whatever_it_begins_with(fixed, each):
    draw = random.Random(1)
    for first in (Pace(), Pace(fixed * 100, each * 100), Pace(fixed / 100, each / 100)):
        pace = first
        for _ in range(300):
            units = int(10 ** draw.uniform(0, 4))
            pace = pace.after(units, (fixed + each * units) * draw.uniform(0.9, 1.1))
        for units in (1, 100, 10_000):
            assert pace.seconds(units) == pytest.approx(fixed + each * units, rel=0.35)
    assert Pace.from_two_batches((1, 0.002), (257, 0.0276)) == Pace(
        pytest.approx(0.0019), pytest.approx(1e-4)
    )
    held_up = Pace.from_two_batches((1, 0.5), (1025, 0.1))  # the small one by other programs
    assert held_up.seconds(1025) > 0.1
    assert held_up.each > 4e-5
    assert (
        Pace(0.001, 1e-4).after(1000, 60.0).seconds(1000) < 0.3
    )  # one that was held up is no rule


def test_a_request_waits_only_if_it_can_be_answered_in_time():
    pace = Pace(fixed=0.0, each=1e-3)
    assert pace.retry_after(0.0, 10**6, 10.0) == 0  # nothing before it: it has its try
    assert pace.retry_after(9.0, 1000, 10.0) == 0
    assert pace.retry_after(9.5, 1000, 10.0) == 1
    assert pace.retry_after(25.0, 1000, 10.0) == 16
    assert pace.units_within(0.5) == 500
    assert Pace(fixed=1.0, each=1.0).units_within(0.5) == 1


def test_batches_are_bounded_by_time_and_late_requests_learn_when_to_retry():
    """On a clock that moves by what the work takes: the machine of this test has no part in it."""
    now = [0.0]
    batches: list[int] = []
    loop_thread = threading.get_ident()
    threads: set[bool] = set()

    def work(requests: list[int]) -> list[float]:
        threads.add(threading.get_ident() == loop_thread)
        batches.append(sum(requests))
        now[0] += 0.001 + 1e-4 * sum(requests)
        return [now[0]] * len(requests)

    async def run() -> list[object]:
        batcher: Batcher[int, float] = Batcher(
            work,
            size=lambda _: 1,
            size_limit=10**9,
            request_limit=64,
            waiting_limit=10**6,
            units=lambda n: n,
            answer_s=2.0,
            pace=Pace(0.001, 1e-4),
            clock=lambda: now[0],
        )
        found = await asyncio.gather(
            *(batcher.ask(400) for _ in range(128)), return_exceptions=True
        )
        assert batcher.ahead_s == 0.0
        return [*found, await batcher.ask(5)]

    *found, last = asyncio.run(run())
    refused = [one for one in found if isinstance(one, Full)]
    answered = [one for one in found if not isinstance(one, Full)]
    assert len(answered) == 49  # two seconds' worth
    assert max(answered) <= 2.2
    assert {one.retry_after for one in refused} == {1}
    assert_names(str(refused[0]), "2 s", "again in 1 s")
    assert max(batches) * 1e-4 + 0.001 <= BATCH_S
    assert threads == {
        True,
        False,
    }  # what takes long is done beside the loop, what does not is done on it
    assert last == now[0]


def test_rows_are_counted_without_being_read():
    raw = clicks_table.raw_rows(50)
    assert rows_at_most(JSON, as_json(raw)) == 51
    assert rows_at_most(f"{JSON}; charset=utf-8", b'{"rows":[' + b"{}," * 4095 + b"{}]}") == 4097
    assert rows_at_most(ARROW, arrow(raw)) == 50
    for spoilt in (b"", b"\xff" * 100, arrow(raw)[:60], arrow(raw)[:-200]):
        assert 0 <= rows_at_most(ARROW, spoilt) <= 50


def test_the_longest_idle_connection_goes_and_never_one_with_a_request_under_way():
    held: Connections[str] = Connections(3)
    assert [held.add(name) for name in "abc"] == [None] * 3
    held.start_request("a")
    assert held.add("d") == "b"
    held.end_request("a")  # it has been idle for the shortest time now
    assert held.add("e") == "c"
    assert held.add("f") == "d"
    held.remove("d")  # told once more when its socket is closed
    for name in "aef":
        held.start_request(name)
    assert held.add("g") == "g"  # all others are at work: the new one is sent away
    held.remove("g")
    assert len(held) == 3
    held.remove("f")
    assert held.add("h") is None


def test_no_more_connections_than_files():
    assert affordable(1024, 1024, 4096) == (1024, 1536)
    assert affordable(1024, -1, -1) == (1024, -1)
    assert affordable(1024, 65536, 65536) == (1024, 65536)
    assert affordable(1024, 256, 1024) == (512, 1024)
