"""How policies are held against each other, and which twins learn what."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.learned import TWINS, Kept, Run, _policy, gain
from sluice.agent.policies.auto import Auto
from sluice.agent.policies.learned.residual import GainTrial, Residual
from sluice.agent.simulator.scenario_json import shipped

SCENARIO = shipped()[0]


def _run(policy, pipeline, seed, rows):
    return Run(policy=policy, family="changing", pipeline=pipeline, seed=seed, rows=rows, early=rows / 2, left=0,
               decisions=10, killed=False)


def test_a_gain_is_paired_with_the_same_seed_and_each_pipeline_counts_once():
    runs = [_run("planner", 0, 0, 100), _run("planner", 0, 1, 200), _run("planner", 1, 0, 400),
            _run("a", 0, 0, 110), _run("a", 0, 1, 220), _run("a", 1, 0, 400),
            _run("b", 0, 0, 110), _run("b", 0, 1, 220), _run("b", 1, 0, 200)]
    mean, least, most = gain(runs, "a", "changing", "rows")
    assert mean == pytest.approx(0.05)
    assert (least, most) == pytest.approx((0.0, 0.1)), "of two pipelines either may be drawn twice"
    assert gain(runs, "b", "changing", "early", beside="a")[0] == pytest.approx(-0.25)


def _known(policy):
    """Its state, when a kind has brought half the rows that were foretold."""
    state = policy.initial(SCENARIO.limits, SCENARIO.first_knobs)
    trial = GainTrial(kind="probe", foretold=0.1, rows_per_s=10.0, knobs=(), seconds=20.0, missing=80.0)
    return dataclasses.replace(state, residuals={"probe": Residual().learn(trial)})


@pytest.mark.parametrize("twin", TWINS)
def test_twins_differ_in_what_they_learn_alone(twin):
    one = dataclasses.make_dataclass("One", ["kind"])("probe")
    bounds = {}
    for how in ("", "+prior", "+residual", "+kept"):
        policy = _policy(twin + how, Path())
        assert isinstance(policy, Auto)
        policy._judge = dataclasses.make_dataclass("GainEstimator", [], namespace={"lower_bound": lambda _, one: 0.1})()
        fresh = policy.initial(SCENARIO.limits, SCENARIO.first_knobs)
        bounds[how] = [policy._bound(one, state) for state in (fresh, _known(policy))]
    assert bounds[""] == [0.1, 0.1]
    assert bounds["+prior"] == pytest.approx([0.1 + Residual().correction] * 2)
    assert bounds["+residual"] == bounds["+kept"]
    assert bounds["+residual"][0] == pytest.approx(bounds["+prior"][0])
    assert bounds["+residual"][1] < 0


def test_what_is_kept_begins_the_next_run_and_nothing_else_does():
    kept = _policy("distilled+kept", Path())
    assert isinstance(kept, Kept)
    kept._last = last = _known(kept)
    begun = kept.initial(SCENARIO.limits, SCENARIO.first_knobs)
    assert begun == dataclasses.replace(Auto(judge=kept._judge).initial(SCENARIO.limits, SCENARIO.first_knobs),
                                        residuals={"probe": last.residuals["probe"].aged()})
