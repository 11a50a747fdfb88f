"""The product's policies: the contract of each, `auto` without a learned policy, and unknown names."""

import dataclasses

import pytest

from sluice.agent.choice import value
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario_json import shipped
from sluice.agent.policies import PRODUCT, make
from tests.agent.policy_contract import PolicyContract


@pytest.mark.parametrize("name", PRODUCT)
class TestEachOfTheProducts(PolicyContract):
    """What holds of every policy."""


@pytest.mark.parametrize(
    "scenario", [s for s in shipped() if s.name[:2] in ("04", "06")], ids=lambda s: s.name[:2]
)
def test_auto_decides_as_the_planner_without_weights(monkeypatch, tmp_path, scenario):
    monkeypatch.setattr(value, "SHIPPED", tmp_path / "absent")
    scenario = dataclasses.replace(scenario, seconds=60)
    decided = {}
    for name in ("auto", "planner"):
        assert make(name).name == name
        decided[name] = []
        run(
            scenario,
            make(name),
            observe=lambda _, knobs, reason, seen=decided[name]: seen.append((knobs, reason)),
        )
    assert decided["auto"] == decided["planner"]
    assert len({str(knobs) for knobs, _ in decided["auto"]}) > 1, (
        "nothing was decided that could differ"
    )
