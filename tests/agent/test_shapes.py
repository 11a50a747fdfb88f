"""Which stage may hold the lock, and moves to processes."""

import itertools
import math

import pytest

from sluice import Knobs
from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.stage_cost import Point, StageCost
from sluice.agent.costs.stage_layouts import locked
from sluice.agent.lab.simulator.physics import SimMachine, SimStage
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario
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


def test_a_move_that_brought_nothing_is_undone_and_not_tried_again():
    """The lock is held by a stage that takes three times as long in processes."""
    common = {"rows_per_item": 1024, "backends": ("thread", "process"), "workers": 4, "lock": 1.0}
    stages = [
        SimStage(name="a", cost_s=1e-3, process_cost_s=2e-3, **common),
        SimStage(name="b", cost_s=1e-3, process_cost_s=2e-3, **common),
    ]
    scenario = Scenario(name="lock", stages=tuple(stages), machine=SimMachine(cores=4))
    layouts = []
    run(
        scenario,
        make("planner"),
        observe=lambda snapshot, knobs, reason: layouts.append(
            {n for n, kind in knobs.backend.items() if kind == "process"}
        ),
    )
    moves = [after - before for before, after in itertools.pairwise(layouts) if after - before]
    print(moves, layouts[-1])
    assert moves, "it was tried"
    assert len(moves) == len({name for move in moves for name in move})
