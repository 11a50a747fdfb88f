"""The reconstruction: its reward, its steps, its layers, and that it learns what can be learned."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.agent.costs.rates import rates
from sluice.agent.learn.intune_teacher import learn, save
from sluice.agent.policies.intune import (
    HIDDEN,
    INPUTS,
    STAGES,
    STEPS,
    InTune,
    IntuneWeightsError,
    load,
    move,
    observe,
    reward,
)
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.random_pipelines import training
from sluice.ingest.knobs import Knobs, Limits


@pytest.mark.parametrize(("used", "expected"), [(0, 100.0), (25, 75.0), (100, 0.0), (150, 0.0)])
def test_the_reward_is_throughput_times_the_free_share_and_never_negative(used, expected):
    assert reward(100.0, used, 100) == expected


def test_a_step_is_bounded_and_the_workers_stay_within_the_cores():
    limits = Limits(workers={"a": (1, 64), "b": (1, 64)})
    knobs = Knobs(workers={"a": 3, "b": 4})
    for first in STEPS:
        for second in STEPS:
            after = move(knobs, limits, [first, second], cores=10)
            assert all(n >= 1 and abs(n - before) <= max(STEPS)
                       for n, before in zip(after.workers.values(), knobs.workers.values(), strict=True))
            assert after.total_workers <= 10
    assert dict(move(knobs, limits, [5, 0], cores=10).workers) == {"a": 6, "b": 4}
    assert dict(move(knobs, limits, [-5, 1], cores=10).workers) == {"a": 1, "b": 5}


def test_its_inputs_are_the_published_six_factors():
    """Latency (per stage), free processors, free memory, model latency, bandwidth and speed."""
    scenario = training(2)
    simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs)
    before = simulator.snapshot()
    simulator.advance(5)
    now = simulator.snapshot()
    seen = rates(before, now)
    inputs = observe(seen, now)
    assert inputs.shape == (INPUTS,)
    assert len(inputs) == STAGES + 5
    assert inputs[:len(scenario.stages)].max() == pytest.approx(7), "the slowest stage"
    assert not inputs[len(scenario.stages):STAGES].any()
    blind = observe(seen, now, model_latency=False)
    assert np.flatnonzero(inputs != blind).tolist() in ([], [STAGES + 2])


@pytest.mark.slow
def test_three_layers_of_relu_and_one_seed_one_network(tmp_path):
    network, _ = learn(400, seed=3)
    again, _ = learn(400, seed=3)
    assert [type(m).__name__ for m in network] == ["Linear", "ReLU"] * 3 + ["Linear"]
    save(network, tmp_path / "a.safetensors")
    save(again, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert [w.shape for w, _ in load(tmp_path / "a.safetensors")][1] == (HIDDEN, HIDDEN)
    policy = InTune(tmp_path / "a.safetensors")
    import torch

    inputs = np.linspace(-1, 7, INPUTS, dtype=np.float32)
    with torch.no_grad():
        assert policy.values(inputs).ravel() == pytest.approx(network(torch.from_numpy(inputs)).numpy(), abs=1e-4)


@pytest.mark.parametrize("content", [b"", b"nonsense" * 10])
def test_weights_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(IntuneWeightsError, match=r"x\.safetensors"):
        InTune(tmp_path / "x.safetensors")
    with pytest.raises(IntuneWeightsError, match="absent"):
        InTune(tmp_path / "absent")
