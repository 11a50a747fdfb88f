"""What the tuner does when a stage becomes dearer. All pipelines are drawn and simulated."""

from __future__ import annotations

import dataclasses
import random

import pytest

from sluice.agent.lab.simulator.rollout import run
from tests.product import Consumer, Scenario, ScheduledChange, SimMachine, SimStage, make

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
def test_a_dearer_stage_feeds_the_trainer_again_within_ten_seconds(seed, name):
    scenario = _slow(_pipeline(seed, buffers=4), name, random.Random(seed).uniform(2, 4))
    outcome = run(scenario, make("auto"), seed=seed)
    wanted = scenario.consumer.batch_rows / scenario.consumer.step_s
    assert sum(outcome.rates[FAULT_AT + 10 :]) > 0.97 * wanted * (60 - FAULT_AT - 10)
