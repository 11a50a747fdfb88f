"""How policies on live pipelines are scored, on a pipeline that exists only in numbers."""

import pytest

from sluice import Knobs
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.benchmarks.rivals.contest import (
    contest,
    score,
)

STORE = Scenario(
    name="store",
    machine=SimMachine(cores=2, timer_noise=0),
    stages=(SimStage(name="decode", cost_s=0.05, cpu=0.02, workers=64),),
    consumer=Consumer(batch_rows=1024),
    start={"decode": 1},
)


class Bench:
    def __init__(self) -> None:
        self.tunable = Simulator(STORE)

    def setting(self, text: str) -> Knobs:
        return Knobs(workers={"decode": 1}).parse(text)

    def run(self, seconds: float):
        before = self.tunable.snapshot()
        self.tunable.advance(seconds)
        return before, self.tunable.snapshot()

    def measure(self, knobs: Knobs, seconds: float):
        self.tunable.apply(knobs)
        self.run(2.0)
        return self.run(seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_score_is_the_share_of_the_gain():
    half = score([15, 16, 14], [10, 10, 10], [20, 20, 20])
    assert half.value == pytest.approx(0.5)
    assert half.low < 0.5 < half.high
    assert score([20, 20], [10, 10], [20, 20]).value == pytest.approx(1)
    assert score([5, 5], [10, 10], [20, 20]).value == pytest.approx(-0.5)


def test_the_best_of_the_survey_is_measured_again_with_cores():
    result = contest(
        Bench, ["decode=1", "decode=4", "decode=16"], {}, rounds=3, seconds=2.0, settle_s=1.0
    )
    assert result.best == "decode=16"
    assert {name: len(turns) for name, turns in result.arms.items()} == {
        "cores": 3,
        "best": 3,
        "best again": 3,
    }
    assert result.spread == pytest.approx(8, rel=0.05)
    assert result.score("best again").value == pytest.approx(1, abs=0.02)
    assert result.to_dict()["counts"] is True
