"""The ablation of the planner's rules: each rule is in the planner, and off in its own context only."""

from __future__ import annotations

import pytest

from sluice.agent.planner_settings import DEFAULT
from sluice.agent.policies.planner import changes, planner
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.simulator.physics import SimMachine, SimStage
from sluice.agent.simulator.rollout import run
from sluice.agent.simulator.scenario import Scenario
from sluice.benchmarks import ablation
from sluice.benchmarks.ablation import RULES, Edit, Rule, cases, off, table
from sluice.common.errors import UsageError
from tests.raises import raises


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_of_the_list_is_in_the_planner_and_comes_back(rule):
    """A changed line that has a rule fails here, until the list is changed."""
    before = {
        name: function for module in (planner, changes) for name, function in vars(module).items()
    }
    with off([rule]) as settings:
        assert bool(rule.settings) == (settings != DEFAULT)
    assert {
        name: function for module in (planner, changes) for name, function in vars(module).items()
    } == before


def test_a_rule_that_several_modules_import_is_off_in_all_of_them():
    rule = Rule("steps", [Edit(changes, "range_of", "return (least, ", "return (1, ")])
    with off([rule]):
        assert planner.range_of is changes.range_of
        assert "return (1, " not in ablation.inspect.getsource(planner._plan)
        limited = Planner().initial(*_start())
        assert planner.range_of(limited, "udf", False)[0] == 1
    assert planner.range_of(Planner().initial(*_start()), "udf", False)[0] == 3


def _start():
    scenario = Scenario(
        name="start", stages=(SimStage(name="read", cost_s=0.01), SimStage(name="udf", cost_s=0.1))
    )
    limits = ablation.replace(scenario.limits, workers={"read": (1, 8), "udf": (3, 8)})
    return limits, limits.clamp(scenario.first_knobs)


def test_rules_of_one_function_are_off_at_once():
    """A stage that holds the lock goes to processes by any of these rules. Two are lines of one function."""
    scenario = Scenario(
        name="lock",
        seconds=30,
        machine=SimMachine(cores=16),
        stages=(
            SimStage(name="read", cost_s=0.005, rows_per_item=4096),
            SimStage(
                name="udf",
                cost_s=0.08,
                rows_per_item=4096,
                lock=0.8,
                backends=("thread", "process"),
            ),
            SimStage(name="out", cost_s=0.002, rows_per_item=4096),
        ),
    )
    some = [rule for rule in RULES if rule.name.startswith(("switch", "reshape", "fuse"))]
    assert sum(edit.function == "_go_faster" for rule in some for edit in rule.edits) == 2
    rows = run(scenario, Planner()).rows
    with off(some) as settings:
        outcome = run(scenario, Planner(settings))
    assert outcome.knobs.backend["udf"] == "thread"
    assert outcome.rows < 0.9 * rows
    assert run(scenario, Planner()).rows == rows


def test_a_line_that_is_no_longer_there_is_an_error():
    with (
        raises(UsageError, "_plan", "'no such line'", "0 times", "benchmarks/ablation.py"),
        off([Rule("gone", [Edit(planner, "_plan", "no such line", "")])]),
    ):
        pass


def test_a_rule_may_leave_that_brings_nothing_in_the_mean_and_in_the_fifth_percentile():
    """One that pays, one that pays in the worst cases alone, one that keeps from being killed, and one for nothing."""
    found = [
        {
            "all": (0.9, False),
            "pays": (0.8, False),
            "shields": (0.9, i == 0),
            "idles": (0.9001, False),
            "rescues": (0.86 if i < 2 else 0.9, False),
        }
        for i in range(20)
    ]
    rows = {row["rule"]: row for row in table(["pays", "rescues", "shields", "idles"], found)}
    assert {name for name, row in rows.items() if row["candidate"]} == {"idles"}
    assert rows["pays"]["mean"] == pytest.approx(10)
    assert rows["shields"]["kills"] == 1
    assert rows["rescues"]["p5"] == pytest.approx(4)


def test_the_pipelines_are_mixed_from_the_first_on_and_the_same_each_time():
    some = cases(40)
    assert [case.scenario.family for case in some[:20]].count("changing") == 6
    assert {case.scenario.family for case in some} == {"held out", "hidden", "changing"}
    assert len({case.scenario.name for case in some}) == 40
    assert [case.scenario for case in cases(20)] == [case.scenario for case in some[:20]]
