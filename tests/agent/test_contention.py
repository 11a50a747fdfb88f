"""Rates, and what others take of the cores: by arithmetic, and in the simulator, where it is known."""

import dataclasses

import pytest

from tests.agent.made_figures import pipeline_rates, snapshot, stage_rates
from tests.product import Contention, rates


def _seen(cpu, core_wait, idle=None):
    stage = stage_rates(busy=cpu + core_wait, cpu=cpu, workers=8, core_wait=core_wait)
    return pipeline_rates(cpu=cpu, stages={"work": stage}, idle=idle)


@pytest.mark.parametrize(
    "counter", ["rows", "consumer_wait_s", "consumer_compute_s", "cpu_used_s", "at"]
)
def test_a_counter_that_fell_gives_no_rates(counter):
    """Such a pipeline was restarted, or is another one."""
    before = snapshot(1.0)
    after = snapshot(2.0, rows=9, consumer_wait_s=0.25, consumer_compute_s=0.5)
    seen = rates(before, after)
    assert (seen.rows_per_s, seen.demand_rows_per_s) == (9, 18)
    assert rates(dataclasses.replace(before, **{counter: 10}), after) is None


def test_free_cores_and_our_own_crowd_are_no_pressure():
    assert Contention.of(_seen(2.0, 0.0)) == Contention(cores=4.0)
    crowd = Contention.of(_seen(4.0, 4.0))  # eight of ours on four cores, nobody else
    assert (crowd.others, crowd.slow, crowd.cores) == (0.0, 1.0, 4.0)


def test_fair_shares_tell_how_many_others_there_are():
    """Four of ours and four others on four cores: each runs half of the time."""
    shares = Contention.of(_seen(2.0, 2.0))
    # eight of ours beside the four
    assert (shares.others, shares.slow, shares.cores) == pytest.approx((4.0, 2.0, 4 * 8 / 12))


def test_who_waits_while_cores_are_idle_waits_for_no_other_program():
    assert Contention.of(_seen(1.0, 1.0)).slow > 1.3
    shares = Contention.of(_seen(1.0, 1.0, idle=3.0))
    assert (shares.others, shares.slow, shares.cores) == (0.0, 1.0, 4.0)
    assert Contention.of(_seen(2.0, 2.0, idle=0.0)) == Contention.of(_seen(2.0, 2.0))


def test_what_our_own_trainer_takes_is_no_other_programs():
    seen = _seen(2.0, 2.0, idle=0.0)
    assert Contention.of(dataclasses.replace(seen, cpu=4.0)).others == 0
    assert Contention.of(dataclasses.replace(seen, cpu=3.0)).others == pytest.approx(
        2.0
    )  # one runs, another waits


def test_a_little_work_says_nothing():
    assert Contention.of(_seen(0.01, 1.0)) == Contention(cores=4.0)


def test_threads_that_may_run_on_one_core_wait_for_each_other_there():
    """Four of ours on one of four cores, and the trainer on another: nobody else takes any."""
    seen = _seen(1.0, 3.0)
    assert Contention.of(dataclasses.replace(seen, cpu=2.0), most=1) == Contention(cores=1)
    assert Contention.of(seen).others > 0
