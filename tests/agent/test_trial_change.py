"""When a change is kept, when it is undone, and when it is too early to say."""

from __future__ import annotations

import dataclasses

import pytest

from sluice.agent.costs.rates import PipelineRates, StageRates
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.ingest.knobs import Knobs


def _seen(rate, stall=1.0):
    return PipelineRates(
        seconds=1.0,
        rows_per_s=rate,
        stall=stall,
        demand_rows_per_s=None,
        cpu=1,
        cpu_quota=2,
        memory_used=0,
        memory_limit=1,
        stages={},
    )


def _attempt(kind="grow", hoped=2.0):
    return TrialChange(
        kind=kind,
        before=Knobs(workers={"read": 1}),
        rows_per_s=100.0,
        predicted=100.0 * hoped,
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


def test_a_trainer_that_no_longer_waits_settles_it():
    assert _attempt().verdict(2, _seen(101, stall=0.0)) is True


def test_harm_is_undone_after_three_looks_unless_others_may_have_done_it():
    work = StageRates(
        rows_per_s=90, busy=2, cpu=1, starved=0, blocked=0, workers=4, queue_bytes=0, core_wait=1.0
    )
    alone = dataclasses.replace(_seen(90), stages={"work": work}, idle=1.0)
    assert [_attempt().verdict(age, alone) for age in (2, 3)] == [None, False]
    contended = dataclasses.replace(alone, idle=0.0)
    assert [_attempt().verdict(age, contended) for age in (3, 5)] == [None, False]
    assert _attempt("switch").verdict(3, alone) is None  # its workers are still starting


def test_a_crash_is_not_one_of_workers_that_start_up_or_of_a_trainer_that_is_fed():
    assert _attempt().crashed(3, _seen(40))
    assert not _attempt().crashed(2, _seen(40))
    assert not _attempt().crashed(3, _seen(60))
    assert not _attempt().crashed(3, _seen(40, stall=0.0))
    assert not _attempt("switch").crashed(3, _seen(10))
    assert _attempt("switch").crashed(6, _seen(10))
    assert not _attempt("release").crashed(3, _seen(10))


def test_a_change_explains_dearer_rows_of_what_it_changed_and_at_first_of_others():
    before = Knobs(workers={"read": 1, "lookup": 2}, backend={"lookup": "process"})
    trial = dataclasses.replace(_attempt(), before=before)
    grown = before.with_workers(read=4)
    assert trial.explains("read", grown, 9)
    assert [trial.explains("lookup", grown, age) for age in (2, 3)] == [True, False]
    moved = dataclasses.replace(grown, backend={})
    assert trial.explains("lookup", moved, 9)
