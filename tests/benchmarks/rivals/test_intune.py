"""The reconstruction of InTune: its reward, its steps, its layers, and that it learns."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from sluice.agent.costs.rates import rates
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.physics import SimMachine, SimStage
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.lab.yardsticks import make_policy
from sluice.agent.policies.opening.weights import WeightsError
from sluice.benchmarks.rivals.intune import (
    DISCOUNT,
    FACTORS,
    INPUTS,
    PLACES,
    SIZES,
    STAGES,
    STEPS,
    Hardware,
    InTune,
    Transition,
    hardware,
    learned,
    move,
    observe,
    reward,
    values,
)
from sluice.benchmarks.rivals.intune_ceiling import Ceiling
from sluice.ingest.knobs import Knobs, Limits
from tests.raises import raises

MACHINE = Hardware(bytes_per_s=0, speed=1)


def _layers(seed=0):
    draw = np.random.default_rng(seed)
    return tuple(
        (draw.normal(0, (2 / a) ** 0.5, (b, a)).astype(np.float32), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(SIZES)
    )


@pytest.mark.parametrize(("used", "expected"), [(0, 100.0), (25, 75.0), (100, 0.0), (150, 0.0)])
def test_the_reward_is_throughput_times_the_free_share_and_never_negative(used, expected):
    assert reward(100.0, used, 100) == expected


def test_a_step_is_bounded_and_the_workers_stay_within_the_cores():
    limits = Limits(workers={"a": (1, 64), "b": (1, 64)})
    knobs = Knobs(workers={"a": 3, "b": 4})
    for first in STEPS:
        for second in STEPS:
            after = move(knobs, limits, [first, second], 1.0, cores=10)
            assert all(
                n >= 1 and abs(n - before) <= max(STEPS)
                for n, before in zip(after.workers.values(), knobs.workers.values(), strict=True)
            )
            assert after.total_workers <= 10
    assert dict(move(knobs, limits, [5, 0], 1.0, cores=10).workers) == {"a": 6, "b": 4}
    assert dict(move(knobs, limits, [-5, 1], 1.0, cores=10).workers) == {"a": 1, "b": 5}


def test_the_prefetched_bytes_are_multiplied_within_their_limits():
    limits = Limits(workers={"a": (1, 64)}, prefetch_bytes=(2**20, 2**24))
    knobs = Knobs(workers={"a": 3}, prefetch_bytes=2**22)
    after = [move(knobs, limits, [0], factor, cores=10).prefetch_bytes for factor in FACTORS]
    assert after == [2**20, 2**21, 2**22, 2**23, 2**24]
    assert move(knobs, limits, [0], 8.0, cores=10).prefetch_bytes == 2**24


def test_its_inputs_are_the_published_six_factors_and_the_prefetched_bytes():
    """Latency (per stage), free processors, free memory, model latency, bandwidth and speed: each place says what it
    is of, and another machine shows in its two places alone."""
    scenario = Scenario(
        name="two",
        machine=SimMachine(cores=16),
        stages=(SimStage(name="read", cost_s=0.05), SimStage(name="udf", cost_s=0.15)),
    )
    simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs)
    before = simulator.snapshot()
    simulator.advance(5)
    now = simulator.snapshot()
    seen = rates(before, now)
    inputs = observe(seen, now, simulator.knobs, MACHINE)
    assert inputs.shape == (INPUTS,) == (STAGES + 6,)
    assert inputs[: len(scenario.stages)].max() == pytest.approx(7), "the slowest stage"
    assert not inputs[len(scenario.stages) : STAGES].any()
    for machine, place in (
        (Hardware(bytes_per_s=1e8, speed=1), 3),
        (Hardware(bytes_per_s=0, speed=2), 4),
    ):
        assert np.flatnonzero(inputs != observe(seen, now, simulator.knobs, machine)).tolist() == [
            STAGES + place
        ]
    more = dataclasses.replace(simulator.knobs, prefetch_bytes=2 * simulator.knobs.prefetch_bytes)
    assert np.flatnonzero(inputs != observe(seen, now, more, MACHINE)).tolist() == [STAGES + 5]


def test_this_machine_is_measured_once():
    found = hardware()
    assert 1e8 < found.bytes_per_s < 1e13
    assert 0.01 < found.speed < 100
    assert hardware() is found


def test_a_step_of_learning_follows_the_gradient_that_torch_finds():
    import torch

    draw, layers = np.random.default_rng(1), _layers()
    seen = [
        Transition(
            draw.normal(3, 2, INPUTS).astype(np.float32),
            draw.integers(len(STEPS), size=PLACES),
            float(draw.normal()),
            draw.normal(3, 2, INPUTS).astype(np.float32),
        )
        for _ in range(5)
    ]
    present = np.isin(np.arange(PLACES), (0, 1, 2, STAGES))
    tensors = [torch.from_numpy(t).clone().requires_grad_() for layer in layers for t in layer]

    def worth(inputs):
        for i in range(0, len(tensors), 2):
            inputs = inputs @ tensors[i].T + tensors[i + 1]
            inputs = torch.relu(inputs) if i < len(tensors) - 2 else inputs
        return inputs.reshape(-1, PLACES, len(STEPS))

    share = torch.from_numpy(present / present.sum()).float()
    with torch.no_grad():
        goal = (
            torch.tensor([s.gain for s in seen])
            + DISCOUNT * worth(torch.from_numpy(np.stack([s.after for s in seen]))).amax(2) @ share
        )
    chosen = torch.from_numpy(np.stack([s.chosen for s in seen]))[:, :, None]
    found = worth(torch.from_numpy(np.stack([s.inputs for s in seen]))).gather(2, chosen)[:, :, 0]
    wanted = torch.autograd.grad((share * (found - goal[:, None]) ** 2).sum(1).mean(), tensors)
    length = sum(float((part**2).sum()) for part in wanted) ** 0.5
    assert length > 1, "so steep that it is cut to the length 1"
    after = [t for layer in learned(layers, seen, present, rate=0.5) for t in layer]
    before = [t for layer in layers for t in layer]
    for old, new, gradient in zip(before, after, wanted, strict=True):
        assert (old - new) / 0.5 == pytest.approx(gradient.numpy() / length, rel=1e-2, abs=1e-4)


def test_it_goes_on_learning_in_the_live_pipeline_and_a_frozen_one_does_not():
    """The same pipeline, the same weights: what the gains were changes the values, the same way each time."""
    scenario = Scenario(
        name="live",
        seconds=40,
        machine=SimMachine(cores=16),
        stages=(SimStage(name="read", cost_s=0.05), SimStage(name="udf", cost_s=0.15)),
    )
    ends = {}
    for rate in (0.0, 1e-2):
        policy = InTune(_layers(), machine=MACHINE, rate=rate)
        state, simulator = (
            policy.initial(scenario.limits, scenario.first_knobs),
            Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs),
        )
        for _ in range(40):
            simulator.advance(1.0)
            knobs, state, _ = policy.decide(simulator.snapshot(), state)
            simulator.apply(knobs)
        ends[rate] = state
    probe = np.full((1, INPUTS), 3, np.float32)
    assert (values(ends[0.0].layers, probe) == values(_layers(), probe)).all()
    assert (values(ends[1e-2].layers, probe) != values(_layers(), probe)).any()
    assert len(ends[1e-2].seen) == 38
    assert ends[1e-2].best > 0


@pytest.mark.parametrize("content", [b"", b"nonsense" * 10])
def test_weights_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with raises(WeightsError, "x.safetensors"):
        InTune(tmp_path / "x.safetensors")
    with raises(WeightsError, "absent"):
        InTune(tmp_path / "absent")


def test_the_ceiling_of_intunes_actions_knows_the_truth_and_keeps_to_them():
    """Five workers a look, as many in all as there are cores, stages where they are, four times the prefetched bytes:
    so it is best at processors that are shared out, and far from it where a store has to be waited for."""
    parts = (
        SimStage(name="read", cost_s=0.02),
        SimStage(name="udf", cost_s=0.3, lock=0.9, backends=("thread", "process")),
    )
    scenario = Scenario(name="lock", seconds=30, stages=parts, machine=SimMachine(cores=24))
    seen: list[Any] = []
    run(
        scenario,
        Ceiling(scenario.truth_at),
        observe=lambda snapshot, knobs, reason: seen.append(knobs),
    )
    assert all(
        abs(after.workers[n] - before.workers[n]) <= 5
        and after.backend["udf"] == "thread"
        and after.total_workers <= 24
        and after.prefetch_bytes <= 4 * before.prefetch_bytes
        for before, after in itertools.pairwise(seen)
        for n in after.workers
    )
    plain = Scenario(
        name="even",
        seconds=60,
        machine=SimMachine(cores=24),
        stages=(SimStage(name="read", cost_s=0.05), SimStage(name="udf", cost_s=0.15)),
    )
    rows = {name: run(plain, make_policy(name, plain)).rows for name in ("intune-ceiling", "fixed")}
    assert rows["intune-ceiling"] > rows["fixed"]
