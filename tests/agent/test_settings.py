"""The agent's numbers: they are nowhere else, what cannot be is refused by name, another number decides otherwise."""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest

from sluice.agent.costs.stage_cost import Point, StageCost
from sluice.agent.lab.simulator.rollout import Rollout, run
from sluice.agent.lab.simulator.scenario_json import shipped
from sluice.agent.planner_settings import PlannerSettings
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.runtime_settings import RuntimeSettings
from tests.raises import raises

POINTS = {1: Point(busy_s=1.0, cpu_s=1.0, seen=9)}


@pytest.mark.parametrize(
    ("setting", "bound"),
    [
        ({"min_gain_ratio": 0.9}, "at least 1"),
        ({"thinned_share": 1.2}, "from 0 to 1"),
        ({"patience_ticks": 4.5}, "whole number"),
        ({"window_ticks": 0}, "at least 1"),
        ({"handover_s": 0.0}, "above 0"),
        ({"doubt_look_s": float("nan")}, "above 0"),
        ({"halvings": True}, "whole number"),
        ({"settle_ticks": 6}, "patience_ticks, 5"),
        ({"memory_target": 0.97}, "memory_alarm, 0.95"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name(setting, bound):
    with raises(ValueError, *setting, *setting.values(), bound):
        PlannerSettings(**setting)


@pytest.mark.parametrize(
    ("setting", "bound"),
    [
        ({"early_share": 1.2}, "from 0 to 1"),
        ({"overdue_ratio": 0.9}, "at least 1"),
        ({"window_looks": 2.5}, "whole number"),
    ],
)
def test_so_is_a_number_of_the_controller_s(setting, bound):
    with raises(ValueError, *setting, *setting.values(), bound):
        RuntimeSettings(**setting)


@pytest.mark.parametrize(("settings", "others"), [(PlannerSettings, 2), (RuntimeSettings, 1)])
def test_every_number_has_a_sentence_and_its_default_fits(settings, others):
    """Sentences besides: the class's, and that of the planner's `own_effect_ticks`."""
    source = inspect.getsource(settings)
    for one in dataclasses.fields(settings()):
        assert f"    {one.name}: {one.type} = " in source
    assert source.count('"""') == 2 * (len(dataclasses.fields(settings)) + others)
    assert PlannerSettings().own_effect_ticks == 3 * PlannerSettings().patience_ticks


UNITS_AND_SIZES = {"_MIB", "_MINUTE_S", "FORMAT", "_MOST_BYTES", "_MOST_ENTRIES"}
"""Constants that tune nothing: units, the version of a form, how large and how many files the registry keeps."""
PLAIN = (0.0, 1.0, 0.5, 2.0, 60.0, 1e6)
"""Nothing, all, half and twice, a minute's seconds, a second's microseconds."""


def test_no_number_that_tunes_a_run_is_anywhere_else(repo):
    """It is neither a constant of a module nor a fraction within a function."""
    agent, found = repo / "agent", []
    for path in [
        agent / "controller.py",
        agent / "tuning.py",
        agent / "tunable.py",
        *agent.glob("costs/*.py"),
        *agent.glob("runtime/*.py"),
        *agent.glob("policies/planner/*.py"),
    ]:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            numbers = isinstance(node, ast.Assign) and any(
                isinstance(part, ast.Constant) and type(part.value) in (int, float)
                for part in ast.walk(node.value)
            )
            if numbers and not {ast.unparse(target) for target in node.targets} <= UNITS_AND_SIZES:
                found.append(f"{path.name}: {ast.unparse(node)}")
        found += [
            f"{path.name}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, float)
            and node.value not in PLAIN
        ]
    assert not found, "put these into PlannerSettings or RuntimeSettings"


def settled(**changed: object) -> Rollout:
    scenario = next(s for s in shipped() if s.name.startswith("01"))
    return run(
        dataclasses.replace(scenario, seconds=40),
        Planner(dataclasses.replace(PlannerSettings(), **changed)),
    )


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        (
            {"min_gain_ratio": 1e9},
            lambda found, usual: not any(found.changed) and any(usual.changed),
        ),
        (
            {"growth_from_one": 2, "growth_factor": 1},
            lambda found, usual: max(found.workers[:12]) < max(usual.workers[:12]),
        ),
        (
            {"settle_ticks": 5},
            lambda found, usual: found.changed.index(True) > usual.changed.index(True),
        ),
        ({"headroom": 3.0}, lambda found, usual: found.knobs != usual.knobs),
    ],
)
def test_one_number_is_turned_without_touching_a_module(changed, differs):
    assert differs(settled(**changed), settled())


def test_what_is_learned_of_a_stage_follows_the_settings_also_in_the_next_run():
    planner, scenario = Planner(PlannerSettings(learning_weight=0.5)), shipped()[0]
    state = planner.initial(scenario.limits, scenario.first_knobs)
    learned = {
        "other_cpu_s": 0.0,
        "services": {"first": StageCost(name="first", points=POINTS).to_dict()},
    }
    for one in (state, planner.recall(state, learned)):
        assert {cost.settings for cost in one.services.values()} == {planner.settings}
    point = next(iter(POINTS.values()))
    assert point.towards(3.0, 1.0, learning=0.5).busy_s == 2.0
    assert point.towards(3.0, 1.0, learning=1.0).busy_s == 3.0
