"""The agent's numbers: they are nowhere else, what cannot be is refused by name, another number decides otherwise."""

import pytest

from sluice.agent.costs.stage_cost import Point, StageCost
from sluice.agent.lab.simulator.scenario_json import shipped
from sluice.agent.planner_settings import PlannerSettings
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.runtime_settings import RuntimeSettings
from tests.raises import raises

POINTS = {1: Point(busy_s=1.0, cpu_s=1.0, seen=9)}


@pytest.mark.parametrize(
    ("settings", "setting", "bound"),
    [
        (PlannerSettings, {"min_gain_ratio": 0.9}, "at least 1"),
        (PlannerSettings, {"patience_ticks": 4.5}, "whole number"),
        (PlannerSettings, {"quick_look_s": 0.0}, "above 0"),
        (PlannerSettings, {"settle_ticks": 6}, "patience_ticks, 5"),
        (RuntimeSettings, {"early_share": 1.2}, "from 0 to 1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name(settings, setting, bound):
    with raises(ValueError, *setting, *setting.values(), bound):
        settings(**setting)


def test_what_is_learned_of_a_stage_follows_the_settings_also_in_the_next_run():
    planner, scenario = Planner(PlannerSettings(learning_weight=0.5)), shipped()[0]
    state = planner.initial(scenario.limits, scenario.first_knobs)
    learned = {
        "other_cpu_s": 0.0,
        "services": {"first": StageCost(name="first", points=POINTS).to_dict()},
    }
    for start in (state, planner.recall(state, learned)):
        assert {cost.settings for cost in start.services.values()} == {planner.settings}
    point = next(iter(POINTS.values()))
    assert point.towards(3.0, 1.0, learning=0.5).busy_s == 2.0
    assert point.towards(3.0, 1.0, learning=1.0).busy_s == 3.0
