"""The learned policy: its inputs, its answers, and where it does not act."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from sluice.agent.lab.episodes import Episodes
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.policies.opening.contract import PolicyInput
from sluice.agent.policies.opening.policy import (
    PIPELINE_INPUTS,
    SHAPES,
    STAGE_INPUTS,
    Glimpse,
    NetworkPolicy,
    answer,
    observe,
    setting,
)
from sluice.agent.policies.opening.weights import WeightsError, write
from sluice.ingest.knobs import Limits
from tests.raises import assert_names, raises

WIDE = {
    "stages": [[-20.0, 20.0]] * len(STAGE_INPUTS),
    "pipelines": [[-20.0, 20.0]] * len(PIPELINE_INPUTS),
}


def weights(seed: int = 0, scale: float = 0.1) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        name: (scale * draw.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def given(number: int = 3, **more: object) -> PolicyInput:
    scenario = pipeline("training", number)
    simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs)
    begun = simulator.snapshot()
    simulator.advance(0.25)
    return PolicyInput(
        begun=begun,
        seen=simulator.snapshot(),
        knobs=scenario.first_knobs,
        limits=scenario.limits,
        **more,
    )  # type: ignore[arg-type]


def test_where_a_stage_stands_among_empty_places_makes_no_difference():
    lives = Episodes([pipeline("training", n) for n in (0, 1, 2, 3)])
    look = lives.look(0.25)
    inputs = observe(look)
    together = answer(weights(), inputs, look.real)
    for b in range(4):
        alone, own = (
            answer(
                weights(),
                type(inputs)(
                    *(
                        part[b : b + 1, look.real[b]]
                        if part.ndim > 1 and part.shape[1] == look.real.shape[1]
                        else part[b : b + 1]
                        for part in inputs
                    )
                ),
                look.real[b : b + 1, look.real[b]],
            ),
            look.real[b],
        )
        assert alone.workers[0] == pytest.approx(together.workers[b, own], abs=1e-5)
        assert alone.process[0] == pytest.approx(together.process[b, own], abs=1e-5)
        assert alone.pipelines[0] == pytest.approx(together.pipelines[b], abs=1e-5)


def test_an_initial_setting_lies_within_the_limits_and_predicts_a_rate():
    for number in range(12):
        one = given(number)
        opening = NetworkPolicy(weights(number, scale=0.5), {"lives": 10, "ranges": WIDE}).choose(
            one
        )
        one.limits.check(opening.knobs)
        assert set(opening.knobs.workers) == set(one.limits.workers)
        assert opening.rows_per_s is not None
        assert opening.rows_per_s > 0
        assert "10 simulated episodes" in opening.reason
        assert opening == NetworkPolicy(
            weights(number, scale=0.5), {"lives": 10, "ranges": WIDE}
        ).choose(one), "pure"


def test_without_a_correction_each_stage_has_the_workers_for_what_cores_and_trainer_allow():
    one = given(4)
    glimpse = Glimpse.of(one)
    inputs = observe(glimpse)
    nothing = answer({name: tensor * 0 for name, tensor in weights().items()}, inputs, glimpse.real)
    plain = setting(glimpse, inputs, nothing)
    use = np.maximum(glimpse.busy_s - glimpse.core_wait_s, glimpse.cpu_s) / glimpse.rows
    assert plain.workers == pytest.approx(np.clip(np.rint(use * inputs.bound), 1, glimpse.most))
    assert plain.rows_per_s == pytest.approx(inputs.bound)
    assert not plain.process.any()
    doubtful = nothing._replace(process=nothing.process + 0.5, pipelines=nothing.pipelines - 1)
    found = setting(glimpse, inputs, doubtful)
    assert not found.process.any(), "processes are dear, so it has to be sure of them"
    assert found.read_ahead_bytes == plain.read_ahead_bytes, "buffers get no smaller"
    assert found.rows_per_s < plain.rows_per_s


def test_an_input_outside_its_training_is_refused_with_the_range():
    ranges = json.loads(json.dumps(WIDE))
    ranges["pipelines"][PIPELINE_INPUTS.index("cores")] = [math.log(48) / 3, math.log(64) / 3]
    one = given()
    opening = NetworkPolicy(weights(), {"lives": 10, "ranges": ranges}).choose(one)
    assert opening.knobs == one.knobs
    assert opening.rows_per_s is None
    assert_names(opening.reason, "cores", f"{one.seen.cpu_quota:.3g}", "48 to 64")
    ranges = json.loads(json.dumps(WIDE))
    ranges["stages"][STAGE_INPUTS.index("has worked")] = [2.0, 3.0]
    outside = NetworkPolicy(weights(), {"lives": 10, "ranges": ranges}).choose(one)
    assert "'stage0'" in outside.reason


def test_a_fused_stage_counts_with_the_one_whose_workers_do_its_work():
    one = given(3)
    first, second, *others = one.limits.workers
    limits = Limits(
        workers=one.limits.workers, backends=one.limits.backends, fusable={second: first}
    )
    fused = dataclasses.replace(
        one, limits=limits, knobs=dataclasses.replace(one.knobs, fused=frozenset([second]))
    )
    glimpse, apart = Glimpse.of(fused), Glimpse.of(one)
    assert glimpse.real.shape == (1, 1 + len(others))
    assert glimpse.busy_s[0, 0] == pytest.approx(apart.busy_s[0, :2].sum())
    assert glimpse.rows[0, 0] == apart.rows[0, 1], "what leaves the last of them"
    opening = NetworkPolicy(weights(), {"lives": 10, "ranges": WIDE}).choose(fused)
    assert opening.knobs.fused == {second}
    limits.check(opening.knobs)


def test_weights_are_read_as_they_were_written_and_others_are_refused(tmp_path):
    record = {"lives": 10, "ranges": WIDE, "seed": 3}
    write(tmp_path / "a.safetensors", weights(), record)
    loaded = NetworkPolicy.load(tmp_path / "a.safetensors")
    assert loaded.record == record
    assert loaded.choose(given()) == NetworkPolicy(weights(), record).choose(given())
    write(tmp_path / "b.safetensors", {**weights(), "see.bias": np.zeros(3, np.float32)}, record)
    with raises(WeightsError, "b.safetensors", "see.bias", "(3,)"):
        NetworkPolicy.load(tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"nonsense" * 10)
    for name in ("c.safetensors", "absent"):
        with raises(WeightsError, tmp_path / name, "sluice.agent.lab.teach"):
            NetworkPolicy.load(tmp_path / name)
