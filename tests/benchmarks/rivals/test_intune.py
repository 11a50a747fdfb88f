"""The reimplementation of InTune: its reward, its steps, what it learns, and a simulated run."""

import dataclasses

import numpy as np

from sluice import Knobs
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario_json import shipped
from sluice.agent.lab.yardsticks import make_policy
from sluice.agent.policies import make
from sluice.benchmarks.rivals.intune import (
    PLACES,
    STAGES,
    STEPS,
    InTune,
    MachineSpeed,
    Transition,
    learned,
    load,
    move,
    reward,
    values,
)
from sluice.benchmarks.rivals.intune_teacher import Explorer, teach
from tests.product import Limits

CHOICES = np.arange(PLACES) % len(STEPS)


def test_the_reward_is_throughput_times_the_free_share_and_never_negative():
    assert [reward(100.0, used, 100) for used in (0, 25, 100, 150)] == [100, 75, 0, 0]


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


def test_learning_moves_the_values_of_what_was_chosen_towards_what_it_brought():
    """The gain is far above every value. Places without a stage have no part in it."""
    layers = load()
    inputs = np.random.default_rng(0).normal(size=(2, layers["weight0"].shape[1])).astype("f4")
    share = np.where(np.isin(np.arange(PLACES), [0, 1, STAGES]), 1 / 3, 0.0)
    seen = [Transition(inputs[0], CHOICES, 50.0, inputs[1], share)]
    before = values(layers, inputs[:1])[0]
    for _ in range(5):
        layers = learned(layers, seen)
    risen = (values(layers, inputs[:1])[0] - before)[np.arange(PLACES), CHOICES]
    assert (risen[share > 0] > 0.01).all()


def test_a_simulated_pipeline_gets_more_rows_than_with_its_first_setting():
    """The network goes on learning, and the same run gives the same rows."""
    scenario = dataclasses.replace(shipped()[0], seconds=30)
    rows = [run(scenario, make_policy("intune", scenario)).rows for _ in range(2)]
    assert rows[0] == rows[1] > 1.5 * run(scenario, make("fixed")).rows
    states = []

    class Watched(InTune):
        def decide(self, snapshot, before):
            result = super().decide(snapshot, before)
            states.append(result[1])
            return result

    run(scenario, Watched(machine=MachineSpeed(0.0, 1.0)))
    assert len(states[-1].seen) > 20
    assert np.abs(states[-1].layers["weight0"] - load()["weight0"]).max() > 1e-4


def test_the_teacher_learns_what_its_decisions_bring():
    """The values of what it did come nearer to what that brought."""
    taught = teach(2, seed=0)
    inputs, chosen, gains, after, share = map(np.stack, zip(*taught.remembered, strict=True))

    def error(layers):
        goals = gains + 0.8 * (values(layers, after).max(axis=2) * share).sum(axis=1)
        known = np.take_along_axis(values(layers, inputs), chosen[..., None], 2)[..., 0]
        return float((share * (known - goals[:, None]) ** 2).sum(axis=1).mean())

    assert error(taught.layers) < 0.5 * error(Explorer(0).layers)
