"""`python -m agent evaluate` and `simulate`."""

from __future__ import annotations

import json

import pytest

from sluice.agent.lab import policies as simulated
from sluice.agent.lab.simulator.scenario import ScenarioError
from sluice.agent.lab.tables import Row, comparison, lead_over, missed, summary
from sluice.common.errors import UsageError
from sluice.ingest.knobs import KnobError

pytestmark = pytest.mark.slow

SMALL = {
    "name": "small",
    "seconds": 12,
    "machine": {"cores": 4},
    "consumer": {"batch_rows": 1024},
    "stages": [{"name": "read", "cost_s": 0.01}, {"name": "transform", "cost_s": 0.04}],
    "passes": [{"metric": "end_score", "at_least": 0.9}],
}


def row(policy: str, scenario: str = "a", score: float = 1.0, **values: object) -> Row:
    given = {
        "family": "scenario",
        "seed": 0,
        "end": score,
        "killed": False,
        "failed": (),
        "bare_score": 0.5,
        "bare_killed": False,
    } | values
    return Row(scenario=scenario, policy=policy, score=score, **given)  # type: ignore[arg-type]


def test_the_summary_is_over_all_runs_and_counts_kills_and_passes():
    rows = [row("x", score=s, seed=i) for i, s in enumerate([0.5, 0.7, 0.9])]
    rows += [
        row("x", "b", 0.1, killed=True, failed=("kills ≤ 0: 1",), bare_score=0.0, bare_killed=True)
    ]
    found = summary(rows, ["x"])["x"]
    assert found["median"] == pytest.approx(0.6)
    assert found["kills"] == found["bare_kills"] == 1
    assert (found["passes"], found["of"]) == (1, 2)
    assert missed(rows, ["x"]) == ["x: b: kills ≤ 0: 1"]


def test_the_table_pairs_policies_by_scenario_and_seed_and_draws_scenarios_anew():
    """Two seeds of a scenario count as one: what is drawn anew are scenarios, or an interval would be too narrow."""
    gains = {"a": (0.1, 0.3), "b": (0.4, 0.4), "c": (0.0, 0.0)}
    rows = [row("auto", name, 0.9, seed=i) for name in gains for i in (0, 1)]
    rows += [
        row("x", name, 0.9 - gain, seed=i)
        for name, both in gains.items()
        for i, gain in enumerate(both)
    ]
    rows += [
        row("auto", "far", 0.8, family="held out"),
        row("x", "far", 0.9, family="held out", killed=True),
    ]
    mean, low, high = lead_over([r for r in rows if r.family == "scenario"], "auto", "x")
    assert mean == pytest.approx(0.2, abs=1e-4)
    assert (low, high) == (0, pytest.approx(0.4)), (
        "of three scenarios, the same one may be drawn three times"
    )
    drawn = comparison(rows, ["auto", "x"]).splitlines()
    assert "3 scenarios × 2 seeds: mean, median, 5 %" in drawn[0]
    assert (
        "| x | 0.700, 0.700, 0.500 | 0 | +20.0 (+0.0 to +40.0) | 0.900, 0.900, 0.900 | 1 | -10.0 "
        in drawn[3]
    )
    assert "| auto | 0.900, 0.900, 0.900 | 0 |  | 0.800, 0.800, 0.800 | 0 |  |" in drawn[2]


def test_policies_are_measured_on_a_scenario_file(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    words = ["--policy", "planner", "--policy", "oracle", "--seeds", "2", "--processes", "1"]
    found = simulated.main([*words, "--scenario", str(tmp_path / "small.json")])
    assert found["policies"].keys() == {"planner", "oracle"}
    assert found["policies"]["planner"].keys() >= {"mean", "median", "p5", "kills"}
    assert found["policies"]["planner"]["median"] > 0


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--policy", "plannner"], KnobError),
        (["--scenario", "/nowhere/x.json"], ScenarioError),
        (["--seeds", "0"], UsageError),
    ],
)
def test_wrong_usage_is_refused(argv, error):
    with pytest.raises(error):
        simulated.main(argv)
