"""`python -m agent evaluate` and `simulate`."""

from __future__ import annotations

import json

import pytest

from sluice.agent.lab import policies as simulated
from sluice.agent.lab.tables import Row, summary

pytestmark = pytest.mark.slow

SMALL = {
    "name": "small",
    "seconds": 12,
    "machine": {"cores": 4},
    "consumer": {"batch_rows": 1024},
    "stages": [{"name": "decode", "cost_s": 0.01}, {"name": "transform", "cost_s": 0.04}],
}


def row(policy: str, scenario: str = "a", score: float = 1.0, **values: object) -> Row:
    given = {
        "family": "scenario",
        "seed": 0,
        "end": score,
        "start": score / 2,
        "killed": False,
    } | values
    return Row(scenario=scenario, policy=policy, score=score, **given)  # type: ignore[arg-type]


def test_the_summary_is_over_all_runs_and_counts_kills():
    rows = [row("x", score=s, seed=i) for i, s in enumerate([0.5, 0.7, 0.9])]
    rows += [row("x", "b", 0.1, killed=True)]
    figures = summary(rows, ["x"])["x"]
    assert figures["median"] == pytest.approx(0.6)
    assert figures["start"] == pytest.approx(0.275)
    assert figures["kills"] == 1


def test_policies_are_measured_on_a_scenario_file(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    words = "--policy auto --policy oracle --seeds 2 --processes 1 --scenario"
    result = simulated.main([*words.split(), str(tmp_path / "small.json")])
    assert result["policies"].keys() == {"auto", "oracle"}
    assert result["policies"]["auto"].keys() >= {"mean", "median", "p5", "kills"}
    assert result["policies"]["auto"]["median"] > 0
