"""Scenario files, the shipped scenarios, the generator and the run of a policy through them."""

from __future__ import annotations

import copy
import json

import pytest

from sluice.agent.lab.simulator.oracle import Oracle
from sluice.agent.lab.simulator.rollout import end_score, reference, run, score
from sluice.agent.lab.simulator.scenario import ScenarioError
from sluice.agent.lab.simulator.scenario_json import load, parse
from sluice.agent.policies.fixed import Fixed
from tests.product import shipped
from tests.raises import raises

pytestmark = pytest.mark.slow

GOOD = {
    "name": "mine",
    "seconds": 20,
    "machine": {"cores": 4, "memory_limit": "2GiB"},
    "consumer": {"batch_rows": 1024, "step_s": 0.01},
    "stages": [
        {"name": "decode", "cost_s": 0.02, "cpu": 0.3},
        {"name": "transform", "cost_s": 0.04},
    ],
    "start": {"decode": 2},
    "changes": [
        {"at": 5, "set": {"machine.cores": 8}},
        {"at": 10, "over": 4, "scale": {"stages.decode.cost_s": 4}},
    ],
}


def changed(path: list[object], value: object) -> dict[str, object]:
    values = copy.deepcopy(GOOD)
    place = values
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    return values


def test_a_scenario_says_how_things_truly_are_at_each_moment():
    scenario = parse(GOOD)
    assert scenario.truth_at(4.9).machine.cores == 4
    assert scenario.truth_at(5).machine.cores == 8
    costs = [scenario.truth_at(t).stages[0].cost_s for t in (9.9, 12, 14, 100)]
    assert costs == pytest.approx([0.02, 0.04, 0.08, 0.08])  # the same share every second
    assert scenario.truth_at(6) is scenario.truth_at(7), "nothing changed between"
    assert dict(scenario.first_knobs.workers) == {"decode": 2, "transform": 1}
    assert scenario.limits.workers["decode"] == (1, 8)


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        (changed(["stages", 1, "cost_s"], "much"), ["stages[1].cost_s", "'much'"]),
        (changed(["stages", 1, "sgima"], 0.1), ["stages[1].sgima", "'sigma'"]),
        (changed(["stages", 0], {"name": "decode"}), ["stages[0].cost_s", "missing"]),
        (changed(["machine", "memory_limit"], "520MiB"), ["machine.memory_limit", "would do"]),
        (changed(["changes", 0, "ta"], 1), ["changes[0].ta", "'at'"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_by_its_path(values, facts):
    with raises(ScenarioError, *facts):
        parse(values)


def test_a_file_that_is_no_json_or_not_there_is_named(tmp_path):
    (tmp_path / "broken.json").write_text('{"name": "x",\n  "stages": [}')
    with raises(ScenarioError, "broken.json", "line 2, column 14"):
        load(tmp_path / "broken.json")
    with raises(ScenarioError, "absent.json"):
        load(tmp_path / "absent.json")
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    assert load(tmp_path / "good.json").name == "mine"


def test_in_each_scenario_there_is_something_to_decide():
    scenarios = shipped()
    assert {int(s.name[:2]) for s in scenarios} == {*range(1, 14), 15}
    for scenario in scenarios:
        best = reference(scenario)
        assert not best.killed, scenario.name
        assert score(run(scenario, Oracle(scenario.truth_at)), best) > 0.9, scenario.name
        fixed = run(scenario, Fixed())
        spare = fixed.knobs.total_workers > best.knobs.total_workers
        assert spare or score(fixed, best) < 0.9, scenario.name


def test_the_example_in_the_documentation_is_one(repo):
    text = (repo / "docs" / "scenarios.md").read_text()
    example = parse(json.loads(text.split("```json\n")[1].split("```")[0]))
    assert len(example.stages) == 3
    assert example.truth_at(70).stages[1].cost_s == pytest.approx(0.2)


def test_scores_have_known_answers():
    """One stage, one core a worker, eight cores: one worker does an eighth."""
    scenario = parse(
        {
            "name": "known",
            "seconds": 40,
            "machine": {"cores": 8, "switch_cost": 0},
            "consumer": {"batch_rows": 1024},
            "stages": [{"name": "only", "cost_s": 0.1, "rows_per_item": 1024}],
        }
    )
    outcome, best = run(scenario, Fixed()), reference(scenario)
    assert score(outcome, best) == pytest.approx(1 / 8, rel=0.03)
    assert end_score(outcome, best) == pytest.approx(1 / 8, rel=0.03)
