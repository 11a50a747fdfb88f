"""The benchmark of halved cores: what changes when, and a pipeline for which they do not matter."""

from __future__ import annotations

from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage, TrueCosts
from sluice.benchmarks.rescale import interval, ratios, scenario

WAITING = TrueCosts(
    SimMachine(cores=2),
    (SimStage(name="read", cost_s=0.05, cpu=0.01), SimStage(name="out", cost_s=0.001)),
    Consumer(),
)


def test_the_cores_are_halved_and_given_back():
    one = scenario("waiting", WAITING, 16)
    assert [one.truth_at(at).machine.cores for at in (0, 59, 60, 119, 120, 180)] == [
        16,
        16,
        8,
        8,
        16,
        16,
    ]


def test_a_pipeline_that_needs_no_core_loses_none_of_its_rows():
    found = ratios(scenario("waiting", WAITING, 16), seeds=1)
    assert abs(found["auto"] - 1) < 0.02
    assert found["best known"] >= max(1.0, found["auto"])


def test_an_interval_is_the_mean_between_its_bounds():
    mean, low, high = interval([0.9, 1.0, 1.1])
    assert low < mean == 1.0 < high
