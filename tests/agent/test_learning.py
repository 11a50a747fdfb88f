"""The environment keeps gymnasium's rules; what has a known optimum is learned; a training goes on where it was."""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from sluice.agent.learn import advantage_training, train
from sluice.agent.learn.advantage_training import HORIZON, Samples, chosen_gains, collect, fit, predict
from sluice.agent.learn.gym_env import STAGES, Tuning
from sluice.agent.policies.learned.advantage import NEVER, SHAPES, load
from sluice.agent.policies.learned.candidates import KINDS, STAGE_INPUTS, WHOLE_INPUTS, Candidate
from sluice.agent.policies.learned.residual import TRIAL_S, Residual
from sluice.etl.common.errors import UsageError

pytestmark = pytest.mark.slow


def test_the_environment_keeps_the_rules():
    from gymnasium.utils.env_checker import check_env

    check_env(Tuning(), skip_render_check=True)


def test_a_step_does_what_its_kind_says_and_pays_the_rows_of_the_interval():
    environment = Tuning()
    environment.reset(seed=1, options={"pipeline": 6})
    for _ in range(4):
        _, reward, killed, _, info = environment.step(KINDS.index("planner"))
        assert info["kind"] == "planner"
        assert 0 <= reward <= 1.1
        assert not killed
    before = environment.simulator.knobs
    kinds = [one.kind for one in environment.found]
    one = environment.found[-1]
    assert one.knobs != before
    environment.step(KINDS.index(kinds[-1]))
    assert environment.simulator.knobs == one.knobs


def test_trying_out_leaves_the_pipeline_as_it_is_and_the_same_try_brings_the_same():
    environment = Tuning()
    environment.reset(seed=1, options={"pipeline": 5})
    environment.step(0)
    before = environment.simulator.snapshot()
    first = [environment.try_out(one, 5) for one in environment.found]
    assert [environment.try_out(one, 5) for one in environment.found] == first
    after = environment.simulator.snapshot()
    assert dataclasses.replace(after, sequence=before.sequence) == before


def _toy(noise, seed, count=600):
    """One decision with a known optimum: `bold` brings the context, `half` half of its opposite; `probe` is chance."""
    random, rows = np.random.default_rng(seed), []
    for moment in range(count):
        context = random.uniform(-0.4, 0.4)
        for kind, gain in (("bold", context), ("half", -context / 2), ("probe", 0.0)):
            whole = np.zeros(WHOLE_INPUTS)
            whole[0] = 5 * context
            whole[WHOLE_INPUTS - len(KINDS) + KINDS.index(kind)] = 1
            one = Candidate(kind=kind, knobs=None, state=None, reason=None, whole=whole,
                            stages=random.normal(size=(1 + moment % STAGES, STAGE_INPUTS)))
            rows.append((one, gain + noise * random.normal(), moment, moment % 60))
    return Samples.of(rows)


@pytest.fixture(scope="module")
def quick():
    """Fewer steps of training on less at a time: a toy needs no more."""
    patch = pytest.MonkeyPatch()
    for name, value in (("_STEPS", 500), ("_BATCH", 64), ("_FOLDS", 2)):
        patch.setattr(advantage_training, name, value)
    yield
    patch.undo()


def test_a_toy_with_a_known_optimum_is_solved(quick):
    samples, unseen = _toy(0.05, seed=0), _toy(0.0, seed=1, count=200)
    advantage = fit(samples, seed=0)
    spread, margin = advantage.weights["caution"]
    weights = {n: w for n, w in advantage.weights.items() if n != "caution"}
    found = predict(weights, unseen)
    gains = chosen_gains(unseen, found.mean(0) - spread * found.std(0) - margin)
    best = unseen.gain.reshape(-1, 3).max(1)
    assert gains.sum() >= 0.8 * best.sum()
    assert gains.min() > -0.02, "it is left only where that pays"
    one = Candidate(kind="bold", knobs=None, state=None, reason=None, whole=unseen.whole[0],
                    stages=unseen.stages[0, :unseen.count[0]])
    assert advantage.of(one) == pytest.approx(found[:, 0], abs=1e-4), "numpy at run time, torch in training: the same"


def test_where_nothing_can_be_known_nothing_is_left(quick, monkeypatch):
    monkeypatch.setattr(advantage_training, "_STEPS", 100)
    samples = _toy(0.0, seed=2, count=300)
    chance = np.random.default_rng(3).normal(-0.05, 0.2, len(samples.gain)).astype(np.float32)
    assert fit(dataclasses.replace(samples, gain=chance), seed=0).weights["caution"][1] >= 0.02


def test_collecting_has_a_gain_for_each_candidate_beside_the_first(monkeypatch):
    monkeypatch.setattr(advantage_training, "_OFTEN", 0.2)
    monkeypatch.setattr(advantage_training, "HORIZON", 5)
    samples = collect([4], None, seed=0)
    assert len(samples.gain) == len(samples.moment) == len(samples.whole) > 0
    assert set(samples.pipeline) == {4}
    assert np.isfinite(samples.gain).all()
    joined = Samples.join([samples, samples])
    assert len(np.unique(joined.moment)) == 2 * len(np.unique(samples.moment))


def test_collecting_leaves_the_planner_as_auto_does(monkeypatch):
    """Otherwise the next round would learn of moments that `auto` never gets into."""
    for chance in ("_OFTEN", "_SELDOM"):
        monkeypatch.setattr(advantage_training, chance, 0.0)
    taken, step = [], Tuning.step
    monkeypatch.setattr(Tuning, "step", lambda self, action: taken.append((self.simulator.now, KINDS[action])) or step(
        self, action))

    def left(promised):
        taken.clear()
        keen = SimpleNamespace(lower_bound=lambda candidate: promised)
        assert len(collect([4], keen, seed=0).gain) == 0
        return [at for at, kind in taken if kind != "planner"]

    at = left(0.5)
    assert len(at) > 2
    assert min(later - sooner for sooner, later in itertools.pairwise(at)) >= TRIAL_S == HORIZON
    assert left(-0.9 * Residual().correction) == [], "too little for a kind that was never tried"


def test_training_goes_on_where_it_was_broken_off_and_one_seed_is_one_result(tmp_path, quick, monkeypatch):
    argv = ["--policy", "auto", "--pipelines", "10", "--rounds", "1", "--processes", "1",
            "--work", str(tmp_path / "work"), "--out", str(tmp_path / "auto.safetensors")]
    collected = []

    def few(pipelines, judge, seed):
        collected.append(list(pipelines))
        return _toy(0.05, seed=pipelines[0], count=60)

    monkeypatch.setattr(advantage_training, "collect", few)
    monkeypatch.setattr(advantage_training, "_STEPS", 20)
    monkeypatch.setattr(advantage_training, "_PROOF", 1)
    told = train.main(argv)
    assert collected == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert json.loads(json.dumps(told))["tries"] == 540
    first = load(tmp_path / "auto.safetensors")
    (tmp_path / "work" / "seed0-8-9.npz").unlink()
    train.main(argv)
    assert collected[3:] == [[8, 9]], "what was there was not tried out again"
    again = load(tmp_path / "auto.safetensors")
    assert all((again.weights[n] == w).all() for n, w in first.weights.items())


def test_wrong_usage_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--pipelines"):
        train.main(["--policy", "auto", "--pipelines", "3", "--work", str(tmp_path)])


def test_never_is_never():
    assert NEVER > 100 * advantage_training._CLIP


def test_what_does_harm_in_whole_pipelines_is_not_used(tmp_path, monkeypatch):
    """However well it does at single moments."""
    keen = advantage_training.Advantage({"caution": np.array([0.0, 0.0])})
    monkeypatch.setattr(advantage_training, "collect", lambda pipelines, judge,
                        seed: _toy(0.0, seed=pipelines[0], count=4))
    monkeypatch.setattr(advantage_training, "fit", lambda samples, seed: keen)
    told = []
    for gain, never in ((-0.01, True), (0.01, False)):
        monkeypatch.setattr(advantage_training, "proven", lambda judge, pipelines, gain=gain: gain)
        judge, _ = advantage_training.teach(10, 1, 0, tmp_path, processes=1, tell=told.append)
        assert judge.never == never
    assert "whole pipelines" in told[1]


def test_a_judge_that_never_leaves_proves_nothing():
    shy = advantage_training.Advantage({n: np.zeros(s) for n, s in SHAPES.items()})
    assert advantage_training.proven(shy, [2]) == 0
