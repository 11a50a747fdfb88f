"""The reconstruction of InTune: its reward, its steps, its layers, and that it learns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.physics import SimMachine, SimStage
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.benchmarks.rivals.intune import (
    INPUTS,
    SIZES,
    STEPS,
    Hardware,
    InTune,
    move,
    reward,
    values,
)
from sluice.ingest.knobs import Knobs, Limits

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
