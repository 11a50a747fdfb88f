"""What the planner does when a stage becomes dearer, or a worker dies. All pipelines are drawn and simulated."""

from __future__ import annotations

import dataclasses
import random

import pytest

from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario, ScheduledChange
from sluice.agent.policies import make
from sluice.agent.policies.planner.planner import Planner

SEEDS = range(4)
FAULT_AT = 20


def _pipeline(seed: int, buffers: float) -> Scenario:
    """A store and a lookup that wait, and a trainer that takes most of what two to four workers bring."""
    draw = random.Random(seed)
    wanted = draw.uniform(4000, 16000)
    stages = (
        SimStage(
            name="decode",
            cost_s=draw.uniform(1.2, 3.6) * 512 / wanted,
            cpu=0.05,
            rows_per_item=512,
            workers=64,
            workers_a_core=0,
            buffer_items=buffers,
        ),
        SimStage(
            name="lookup",
            cost_s=draw.uniform(1.2, 3.6) * 1024 / wanted,
            cpu=0.02,
            workers=64,
            workers_a_core=0,
            buffer_items=buffers,
        ),
        SimStage(name="collate", cost_s=0.001, workers=1, workers_a_core=0),
    )
    return Scenario(
        name=f"drawn {seed}",
        seconds=60,
        stages=stages,
        machine=SimMachine(cores=8),
        consumer=Consumer(batch_rows=1024, step_s=1024 / wanted),
    )


def _slow(scenario: Scenario, name: str, times: float) -> Scenario:
    (cost_s,) = [stage.cost_s for stage in scenario.stages if stage.name == name]
    return dataclasses.replace(
        scenario,
        changes=(ScheduledChange(at=FAULT_AT, key=f"stages.{name}.cost_s", value=times * cost_s),),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["decode", "lookup"])
def test_a_dearer_stage_gets_workers_before_the_trainer_waits(seed, name):
    scenario = _slow(_pipeline(seed, buffers=40), name, random.Random(seed).uniform(2, 4))
    last, made = scenario.first_knobs, []

    def note(snapshot, knobs, reason):
        nonlocal last
        if knobs != last and snapshot.at > FAULT_AT:
            made.append((last, knobs, reason))
        last = knobs

    run(scenario, make("planner"), seed=seed, observe=note)
    before, knobs, reason = made[0]
    assert knobs.workers[name] > before.workers[name]
    assert reason.details["stall"] == 0
    assert reason.details["demand_rows_per_s"] == pytest.approx(
        scenario.consumer.batch_rows / scenario.consumer.step_s, rel=0.05
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("died", [0, 1])
def test_a_worker_process_that_dies_ends_a_trial_that_started_none(seed, died):
    policy, scenario = Planner(), _slow(_pipeline(seed, buffers=2), "decode", 3)
    simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs, seed=seed)
    state = policy.initial(scenario.limits, simulator.knobs)
    while state.trial is None:
        knobs, state, _ = policy.decide(simulator.snapshot(), state)
        simulator.apply(knobs)
        simulator.advance(1)
    failures = state.failures
    snapshot = dataclasses.replace(simulator.snapshot(), restarts=died)
    knobs, state, _ = policy.decide(snapshot, state)
    assert (state.trial is None) == bool(died)
    assert (knobs, state.failures) == (simulator.knobs, failures)
