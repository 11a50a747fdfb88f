"""How policies on live pipelines are scored, on a pipeline that exists only in numbers."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage, TrueCosts
from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.contest import (
    Contest,
    LiveError,
    Settled,
    Turn,
    contest,
    score,
    settle,
    table,
)
from sluice.ingest.knobs import Knobs, Limits
from tests.raises import raises

STORE = TrueCosts(
    SimMachine(cores=2, timer_noise=0),
    (SimStage(name="read", cost_s=0.05, cpu=0.02),),
    Consumer(batch_rows=1024),
)
TRAINER = TrueCosts(STORE.machine, STORE.stages, Consumer(batch_rows=1024, step_s=0.03))
FAIL = TrueCosts(STORE.machine, (SimStage(name="read", cost_s=1e6),), STORE.consumer)
LIMITS = Limits(workers={"read": (1, 64)})


class Moving(Simulator):
    """Time passes whenever somebody looks."""

    def snapshot(self):
        self.advance(0.5)
        return super().snapshot()


class Bench:
    def __init__(self, truth: TrueCosts = STORE, decided: threading.Event | None = None) -> None:
        self.tunable = (Simulator if decided is None else Moving)(
            lambda _: truth, LIMITS, Knobs(workers={"read": 1})
        )
        self.decided = decided

    def setting(self, text: str) -> Knobs:
        return Knobs(workers={"read": 1}).parse(text)

    def run(self, seconds: float):
        before = self.tunable.snapshot()
        if self.decided is not None:  # the controller's thread is at work meanwhile
            assert self.decided.wait(60)
        else:
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


class Eight(Policy):
    """Eight readers at the second look."""

    name = "eight"

    def __init__(self) -> None:
        self.decided = threading.Event()

    def initial(self, limits: Limits, knobs: Knobs) -> int:
        return 0

    def decide(self, snapshot: Any, state: int):
        if state == 1:
            self.decided.set()
        return Knobs(workers={"read": 8}), state + 1, Reason(text="eight")


def test_a_score_is_the_share_of_the_gain():
    half = score([15, 16, 14], [10, 10, 10], [20, 20, 20])
    assert half.value == pytest.approx(0.5)
    assert half.low < 0.5 < half.high
    assert score([20, 20], [10, 10], [20, 20]).value == pytest.approx(1)
    assert score([5, 5], [10, 10], [20, 20]).value == pytest.approx(-0.5)


def test_a_score_without_a_gain_is_no_number():
    assert math.isnan(score([10], [10], [10]).value)


def test_a_score_needs_as_many_rounds_of_each():
    with raises(ValueError, "2, 1 and 1 rounds"):
        score([1, 2], [1], [2])


def test_the_best_of_the_survey_is_measured_again_with_cores():
    found = contest(Bench, ["read=1", "read=4", "read=16"], {}, rounds=3, seconds=2.0, settle_s=1.0)
    assert found.best == "read=16"
    assert {name: len(turns) for name, turns in found.arms.items()} == {
        "cores": 3,
        "best": 3,
        "best again": 3,
    }
    assert found.spread == pytest.approx(8, rel=0.05)
    assert found.score("best again").value == pytest.approx(1, abs=0.02)
    assert found.to_dict()["counts"] is True


def test_where_a_setting_keeps_the_trainer_fed_the_leanest_is_an_arm():
    found = contest(
        lambda: Bench(TRAINER),
        ["read=1", "read=2", "read=16"],
        {},
        rounds=2,
        seconds=2.0,
        settle_s=1.0,
    )
    assert "lean" in found.arms
    assert found.cpu_ratio("best") == pytest.approx(1, rel=0.05)
    assert found.to_dict()["counts"] is False


def test_a_policy_settles_on_a_pipeline_of_its_own():
    policy = Eight()
    bench = Bench(decided=policy.decided)
    bench.tunable.advance(1.0)  # while nothing has come yet, no policy is asked
    found = settle(bench, policy, 1.0)
    assert found.knobs.workers == {"read": 8}
    assert len(found.changes) == 1
    assert found.frozen is None
    assert 0 <= found.cost < 1


def test_a_start_is_measured_by_ten_seconds_and_by_when_it_reaches_the_best():
    """Five seconds at a tenth of the best rate, then the best: a look a second, of which two together count."""
    rows = tuple((float(t), 10 * min(t, 5) + 100 * max(0, t - 5)) for t in range(13))
    found = Settled(Knobs(workers={"read": 8}), (3.0,), 1e-3, None, rows)
    assert found.share(100) == pytest.approx(0.55)
    assert found.reached_s(100) == 5.0
    assert found.reached_s(200) == math.inf
    assert Settled(found.knobs, (), 0.0, None).share(100) == 0


def test_policies_begin_as_often_as_is_asked_in_turns_and_the_last_start_takes_part():
    policies = {"eight": Eight(), "also": Eight()}
    began = []

    def opened():
        began.append(Bench())
        return began[-1]

    found = contest(
        opened, ["read=1", "read=4"], policies, rounds=1, seconds=2.0, settle_s=1.0, starts=3
    )
    assert {name: len(starts) for name, starts in found.starts.items()} == {"eight": 3, "also": 3}
    assert len(began) == 7, "each start has a pipeline of its own, and all arms one together"
    assert found.settled["eight"] is found.starts["eight"][-1]
    assert found.to_dict()["policies"]["also"]["start"]["starts"] == 3


def test_the_table_and_the_json_say_what_a_policy_reached():
    turns = {
        "cores": [Turn(10, 1, 1)] * 2,
        "best": [Turn(20, 0, 1)] * 2,
        "best again": [Turn(20, 0, 1)] * 2,
        "lean": [Turn(20, 0, 1)] * 2,
        "eight": [Turn(19, 0, 1.2)] * 2,
    }
    settled = Settled(Knobs(workers={"read": 8}), (3.0,), 1e-3, None)
    found = Contest({"read=8": Turn(20, 0, 1)}, turns, {"eight": settled})
    told = found.to_dict()["policies"]["eight"]
    assert (told["score"], told["decisions"], told["last_change_s"], told["cpu_ratio"]) == (
        0.9,
        1,
        3.0,
        1.2,
    )
    assert "0.90 (0.90 to 0.90)" in table({"far store": found})
    flat = Contest(found.survey, {**turns, "best": [Turn(11, 0, 1)] * 2}, found.settled)
    assert "does not count" in table({"far store": flat})


def test_a_contest_that_cannot_be_scored_is_refused():
    with raises(LiveError, "'cores'"):
        contest(Bench, ["read=1"], {"cores": Eight()}, rounds=1, seconds=1.0, settle_s=1.0)
    with raises(LiveError, "no rows", "read=1"):
        contest(lambda: Bench(FAIL), ["read=1"], {}, rounds=1, seconds=1.0, settle_s=1.0)
