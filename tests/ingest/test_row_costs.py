"""What other conditions would bring: known answers of the model, and counters of which the costs are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.ingest.row_costs import RECEIVED_S, RowCosts, Share
from sluice.ingest.stats import Snapshot, StageStats


def pace(**given) -> RowCosts:
    stages = {
        "read": Share(workers=1, cpu_s=0.002, wait_s=0.008),
        "batch": Share(workers=1, cpu_s=0.001),
    }
    return RowCosts(**{"stages": stages, "cores": 4, "measured": 80.0, **given})


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        (lambda p: p, 100),  # one reader, ten milliseconds a row
        (lambda p: p.with_workers("read", 4), 400),
        (lambda p: p.with_workers("read", 20), 1000),  # the batch stage
        (
            lambda p: p.with_workers("read", 20).with_cores(1),
            1000 / 3,
        ),  # three milliseconds of one core
        (lambda p: p.with_store(4), 250),
        (lambda p: p.with_store(float("inf")), 500),
        (lambda p: replace(p, consumer=Share(workers=1, cpu_s=0, wait_s=0.05)), 20),
        (
            lambda p: replace(p, consumer=Share(workers=1, cpu_s=0.04, wait_s=0.01)).with_consumer(
                2
            ),
            40,
        ),
        (lambda p: p.with_remote(4), 400),
        (lambda p: p.with_remote(40), 1000),
        (lambda p: p.with_remote(40, cores=1), 500),  # two milliseconds of their core
        (lambda p: replace(p, cores=1).with_remote(40, cores=0), 1000 / 3),  # all on our own one
    ],
)
def test_the_narrowest_of_stages_cores_and_consumer_bounds_the_rate(case, bound):
    assert case(pace()).bound == pytest.approx(bound)
    assert pace().rate(case(pace())) == pytest.approx(0.8 * bound), (
        "what is left out of one is left out of the other"
    )


def test_rows_of_remote_workers_cost_their_bytes():
    one, few = replace(pace(), row_bytes=0.0), replace(pace(), row_bytes=1e6)
    assert few.with_remote(4).cpu_s - one.with_remote(4).cpu_s == pytest.approx(1e6 * RECEIVED_S)


def test_where_no_core_is_free_the_rate_bends_before_the_cores_end():
    """Two threads of others on one core: at each rate our part and theirs fill it, and all wait alike."""
    crowded = pace(stages={"read": Share(workers=1, cpu_s=0.01)}, cores=1, others=2, measured=1.0)
    assert crowded.bound == pytest.approx(100 / 3), "one thread of three on one core"
    assert crowded.with_workers("read", 2).bound == pytest.approx(50), "two of four"
    assert crowded.with_workers("read", 6).bound == pytest.approx(75), "six of eight"
    assert replace(crowded, cores=4).bound == pytest.approx(100), (
        "four cores are enough for three threads"
    )


def snapshot(
    at, rows, *, read_s, wait_s=0.0, shuffle_s=0.0, others_s=0.0, used_s=None, idle_s=None
):
    """Reading on two workers, shuffling by the same ones, and a stage of its own that takes a millisecond a row."""
    each = (
        ("read", read_s, wait_s, 2),
        ("shuffle", shuffle_s, 0.0, 2),
        ("batch", 0.001 * rows, 0.0, 1),
    )
    stages = tuple(
        StageStats(
            name=name,
            items=0,
            rows=rows,
            bytes=50 * rows,
            busy_s=2 * cpu + wait,
            cpu_s=cpu,
            core_wait_s=wait,
            wait_input_s=0,
            wait_output_s=0,
            workers=workers,
        )
        for name, cpu, wait, workers in each
    )
    used = sum(cpu for _, cpu, *_ in each) + others_s if used_s is None else used_s
    return Snapshot(
        at=at,
        sequence=0,
        stages=stages,
        batches=0,
        rows=rows,
        consumer_wait_s=0,
        consumer_compute_s=0,
        memory_used=0,
        memory_limit=1,
        cpu_quota=4,
        cpu_used_s=used,
        cores_idle_s=idle_s,
    )


def test_costs_are_read_from_two_snapshots():
    found = RowCosts.between(
        snapshot(0, 0, read_s=0),
        snapshot(10, 1000, read_s=4, shuffle_s=2, others_s=3),
        head=lambda name: "read" if name == "shuffle" else name,
        step_s=0.004,
        step_cpu_s=0.001,
    )
    assert found.measured == 100
    assert found.row_bytes == 50
    read = found.stages["read"]  # half of each stage's time it waited for a store
    assert (read.workers, read.cpu_s, read.wait_s) == (
        2,
        pytest.approx(0.006),
        pytest.approx(0.006),
    )
    assert found.stages.keys() == {"read", "batch"}
    assert found.other_cpu_s == pytest.approx(0.002), (
        "three seconds, of which one is the consumer's"
    )
    assert (found.consumer.cpu_s, found.consumer.wait_s) == (0.001, pytest.approx(0.003))
    assert found.others == 0, "nobody said how long cores were idle"
    assert found.narrowest == "read"


def test_others_are_counted_by_how_long_our_threads_wait_for_a_core():
    idle = RowCosts.between(
        snapshot(0, 0, read_s=0, idle_s=0), snapshot(10, 1000, read_s=4, idle_s=35)
    )
    assert idle.others == 0
    after = snapshot(
        10, 1000, read_s=9, wait_s=10, idle_s=0
    )  # one core of ours, and our threads wait as long again
    crowded = RowCosts.between(snapshot(0, 0, read_s=0, idle_s=0), after)
    assert crowded.others == pytest.approx(6), "the other three cores are wanted twice, too"
    assert crowded.stages["read"].wait_s == pytest.approx(0.009), (
        "a wait for a core is none for a store"
    )
