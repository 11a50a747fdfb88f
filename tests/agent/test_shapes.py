"""Layouts of stages: which stage may hold the lock, and which stages are fused."""

import dataclasses
import itertools
import math

import pytest

from sluice import Knobs
from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.stage_cost import Point, StageCost
from sluice.agent.costs.stage_layouts import locked
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.planner_settings import DEFAULT
from sluice.agent.policies import make
from sluice.ingest.knobs import Limits
from tests.agent.made_figures import pipeline_rates, stage_rates

NAMES = ("decode", "shuffle", "python", "collate")
LIMITS = Limits(
    workers={"decode": (1, 2), "shuffle": (1, 2), "python": (1, 2), "collate": (1, 1)},
    backends={"python": ("thread", "process")},
)


@pytest.mark.parametrize(
    ("cpu", "lock", "cost", "stages"),
    [
        (1.0, 0.9, 0.9, ["python"]),
        (2.0, 0.9, 0.9, []),  # no core is free
        (1.0, 0.2, 0.9, []),  # its code lets the lock go
        (1.0, 0.9, 0.1, []),  # another stage, or the trainer, holds it
    ],
)
def test_a_stage_that_holds_the_lock_may_leave_the_threads(cpu, lock, cost, stages):
    rates = {n: stage_rates(busy=1.0) for n in NAMES}
    seen = pipeline_rates(cpu=cpu, cpu_quota=2.0, memory_limit=2**34, stages=rates, lock=lock)
    point = {1: Point(busy_s=1.0, cpu_s=cost)}
    costs = {n: StageCost(name=n, points=point, backend="thread") for n in NAMES}
    knobs = Knobs(workers=dict.fromkeys(NAMES, 1))
    forecast = Forecast.of(seen, knobs, LIMITS, costs, other_cpu_s=0.0, demand=math.inf)
    relieved = locked(forecast, seen, StageCost.relieved)
    assert [cost.stage for cost in relieved] == stages


def _stages(cost_s, **more):
    """Four in a row, of which the third and the fourth may be fused with the one before."""
    return [
        SimStage(name=n, cost_s=cost_s, rows_per_item=1024, fusable=n in "cd", **more)
        for n in "abcd"
    ]


def _settled(stages, machine):
    """The simulator after so many decisions, and how fast it is then."""
    scenario = Scenario(name="fused", stages=tuple(stages), machine=machine)
    knobs = scenario.first_knobs
    simulator, policy = Simulator(scenario.truth_at, scenario.limits, knobs), make("planner")
    state, reasons = policy.initial(scenario.limits, knobs), []
    for _ in range(60):
        knobs, state, reason = policy.decide(simulator.snapshot(), state)
        reasons.append(reason.text)
        simulator.apply(knobs)
        simulator.advance(1.0)
    before = simulator.snapshot()
    simulator.advance(5.0)
    return simulator, (simulator.snapshot().rows - before.rows) / 5.0, reasons


def test_cheap_stages_are_fused_where_handing_over_takes_cores_that_are_short():
    machine = SimMachine(cores=2, handover_s=DEFAULT.handover_s)
    apart = [dataclasses.replace(s, fusable=False) for s in _stages(1.2 * DEFAULT.handover_s)]
    simulator, rate, reasons = _settled(_stages(1.2 * DEFAULT.handover_s), machine)
    assert simulator.knobs.fused == {"c", "d"}
    assert any("from b to c" in text for text in reasons)
    assert rate > _settled(apart, machine)[1]


@pytest.mark.parametrize(
    ("cost", "machine"),
    [
        (
            100 * DEFAULT.handover_s,
            SimMachine(cores=2, handover_s=DEFAULT.handover_s),
        ),  # it is nothing beside the work
        (
            1.2 * DEFAULT.handover_s,
            SimMachine(cores=64, handover_s=DEFAULT.handover_s),
        ),  # cores are free
    ],
)
def test_nothing_is_fused_where_that_would_save_nothing_that_counts(cost, machine):
    simulator, _, _ = _settled(_stages(cost, workers=4, workers_a_core=0), machine)
    assert simulator.knobs.fused == frozenset()


def test_a_fusion_that_brought_nothing_is_undone_and_not_tried_again():
    """As though handing over took time, but it is the trainer's loop on the same cores."""
    scenario = Scenario(
        name="trainer",
        stages=tuple(_stages(1.2 * DEFAULT.handover_s)),
        machine=SimMachine(cores=2),
        consumer=Consumer(batch_rows=1024, step_s=DEFAULT.handover_s, cpu=1.0),
    )
    fused = []
    run(
        scenario, make("planner"), observe=lambda snapshot, knobs, reason: fused.append(knobs.fused)
    )
    assert any(fused), "it was tried"
    assert fused[-1] == frozenset()
    assert len([1 for before, after in itertools.pairwise(fused) if before < after]) <= 2
