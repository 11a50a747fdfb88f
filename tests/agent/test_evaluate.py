"""`python -m sluice.agent.lab.judge`."""

from __future__ import annotations

import json

import pytest

from sluice.agent.lab import judge

pytestmark = pytest.mark.slow

SMALL = {
    "name": "small",
    "seconds": 12,
    "machine": {"cores": 4},
    "consumer": {"batch_rows": 1024},
    "stages": [{"name": "decode", "cost_s": 0.01}, {"name": "transform", "cost_s": 0.04}],
}


def test_policies_are_judged_on_a_scenario_file(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    words = ["--policy", "auto", "--policy", "oracle", "--folder", str(tmp_path / "kept")]
    result = judge.main([*words, "--scenario", str(tmp_path / "small.json")])
    assert result["policies"].keys() == {"auto", "oracle"}
    assert result["policies"]["auto"]["median"] > 0
    assert result["pairs"].keys() == {"auto"}


def test_an_earlier_version_is_compared_case_by_case(tmp_path):
    words = ["--policy", "fixed", "--count", "2", "--folder", str(tmp_path)]
    judge.main(words)
    before = tmp_path / judge.digest("fixed") / "fixed"
    better, worse = sorted(before.iterdir())
    for file, points in ((better, -0.03), (worse, 0.02)):
        scores = json.loads(file.read_text())
        file.write_text(json.dumps(scores | {"score": scores["score"] + points}))
    earlier = before.rename(tmp_path / "earlier")
    compared = judge.main([*words, "--before", str(earlier)])["pairs"]["before"]
    assert compared["mean"] == pytest.approx(0.5), "points gained in the mean"
    assert compared["worse"] == 0.5, "one of two lost more than a point"
    (earlier / worse.name).unlink()
    compared = judge.main([*words, "--before", str(earlier)])["pairs"]["before"]
    assert compared["mean"] == pytest.approx(3.0), "a case without an earlier result is no pair"
