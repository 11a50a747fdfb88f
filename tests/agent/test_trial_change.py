"""When a change is kept, when it is undone, and when it is too early to say."""

import pytest

from sluice import Knobs
from sluice.agent.policies.planner.state import ticks
from sluice.agent.policies.planner.trial_change import TrialChange
from tests.agent.made_figures import pipeline_rates


def _seen(rate, stall=1.0):
    return pipeline_rates(rows_per_s=rate, stall=stall)


def _attempt(kind="grow"):
    return TrialChange(
        kind=kind,
        before=Knobs(workers={"decode": 1}),
        rows_per_s=100.0,
        predicted=200.0,
        start_up=3 * (kind == "switch"),
    )


@pytest.mark.parametrize(
    ("kind", "rate", "age", "verdict"),
    [
        ("grow", 160, 1, None),
        ("grow", 160, 2, True),  # half of what was hoped for is clear
        ("grow", 110, 4, None),
        ("grow", 110, 5, True),
        ("grow", 102, 5, False),
        ("switch", 110, 7, None),
        ("switch", 110, 8, True),
        ("switch", 60, 8, False),
        ("release", 98, 2, True),
        ("release", 95, 4, None),
        ("release", 95, 5, True),
        ("release", 90, 5, False),
        ("memory", 10, 5, True),
    ],
)
def test_verdicts(kind, rate, age, verdict):
    assert _attempt(kind).verdict(age, _seen(rate)) is verdict


def test_a_look_of_slow_items_counts_as_one_tick():
    assert [ticks(seconds) for seconds in (0.25, 1.0, 7.0)] == [0.25, 1.0, 1.0]


def test_a_trainer_that_no_longer_waits_settles_it():
    assert _attempt().verdict(2, _seen(101, stall=0.0)) is True


def test_a_crash_is_not_one_of_workers_that_start_up_or_of_a_trainer_that_is_fed():
    assert _attempt().crashed(3, _seen(40))
    assert not _attempt().crashed(2, _seen(40))
    assert not _attempt().crashed(3, _seen(60))
    assert not _attempt().crashed(3, _seen(40, stall=0.0))
    assert not _attempt("switch").crashed(3, _seen(10))
    assert _attempt("switch").crashed(6, _seen(10))
    assert not _attempt("release").crashed(3, _seen(10))
