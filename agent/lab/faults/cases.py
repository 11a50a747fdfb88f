"""Draws the cases of the fault study: `slow_case` (slow items), `fluid_case`, and the demo's `twin`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.simulator.scenario import Scenario, ScheduledChange

TRAINER_AT = 40.0
"""In every second case the trainer becomes faster then, so that each policy changes something."""
NEAR_S = 5.0
AFTER_S = 60.0
"""Seconds after the fault that count."""
_FIRST_FLUID = 5000
_ITEM_BYTES = 2.0**23
"""Of a row group: the buffers hold few of them, so a slower stage is felt soon."""


@dataclass(frozen=True, slots=True)
class FaultCase:
    """A pipeline with a fault."""

    scenario: Scenario
    at: float
    stage: str
    """The stage with the fault. Empty: the cores."""
    is_near: bool

    @property
    def settled_at(self) -> float:
        """When all changes of the scenario are over."""
        return max(self.at, TRAINER_AT if self.is_near else 0.0) + 0.01


def slow_pipeline(number: int, tail: bool) -> Scenario:
    """Returns a pipeline of slow items, with room for more workers after a fault of up to 4 times."""
    r = np.random.default_rng((9, number))
    rows = int(r.choice([256, 512, 1024]))
    read_s = float(np.exp(r.uniform(math.log(0.3), math.log(2.0))))
    look_up_s = float(np.exp(r.uniform(math.log(0.05), math.log(0.6))))
    demand = rows / read_s * float(r.uniform(3, 12))
    batch = max(16, rows // 8)
    tails = [1.0, 1.0] if tail else [float(t) for t in r.choice([0.0, 0.1, 0.3], 2)]
    sigma, cap = [0.0, 0.0], [0.0, 0.0]
    if r.random() < 0.25:
        bent, seconds = int(r.integers(2)), (read_s, look_up_s)
        if r.random() < 0.5:
            sigma[bent] = float(r.uniform(0.005, 0.05))
        else:
            cap[bent] = int(r.integers(6, 24)) * (rows, rows // 2)[bent] / seconds[bent]
    stages: tuple[SimStage, ...] = (
        SimStage(
            name="fetch",
            cost_s=read_s,
            rows_per_item=rows,
            cpu=0.02,
            tail=tails[0],
            sigma=sigma[0],
            cap_rows_per_s=cap[0],
            workers=64,
            buffer_items=1,
        ),
        SimStage(name="decode", cost_s=0.2 * rows / demand, rows_per_item=rows, cpu=0.9, workers=2),
        SimStage(
            name="batch", cost_s=0.1 * batch / demand, rows_per_item=batch, cpu=0.9, workers=4
        ),
        SimStage(
            name="lookup",
            cost_s=look_up_s,
            rows_per_item=rows // 2,
            cpu=0.02,
            tail=tails[1],
            sigma=sigma[1],
            cap_rows_per_s=cap[1],
            workers=32,
            backends=("process",),
            process_start_s=float(r.choice([0.0, 1.0])),
            process_bytes=2.0**26,
        ),
    )
    stages = tuple(dataclasses.replace(s, bytes_per_row=_ITEM_BYTES / rows) for s in stages)
    return Scenario(
        name=f"slow items {number}",
        seconds=TRAINER_AT + AFTER_S,
        machine=SimMachine(cores=2.0, host_cores=16),
        consumer=Consumer(batch_rows=batch, step_s=batch / demand),
        stages=stages,
    )


def slow_case(number: int) -> FaultCase:
    """Returns a slow-item fault of 1.5 to 4 times. Each second is near a change; each third has heavy tails."""
    r = np.random.default_rng((11, number))
    near = number % 2 == 0
    scenario = slow_pipeline(number, tail=number % 3 == 2)
    at = TRAINER_AT + r.uniform(-NEAR_S, NEAR_S) if near else r.uniform(30, 50)
    name, factor = str(r.choice(["fetch", "lookup"])), _factor(r)
    return _case(scenario, float(at), name, factor, near=near)


def fluid_case(number: int) -> FaultCase:
    """Returns a drawn pipeline of the fluid simulator with a fault of a stage's cost, its lock or the cores."""
    r = np.random.default_rng((12, number))
    scenario = pipeline("held out" if number % 3 else "training", _FIRST_FLUID + number)
    near = number % 2 == 0 and scenario.consumer.step_s > 0
    at = float(TRAINER_AT + r.uniform(-NEAR_S, NEAR_S) if near else r.uniform(30, 50))
    kind, cores = r.random(), scenario.machine.cores
    movable = [s for s in scenario.stages if len(s.backends) > 1]
    if kind < 0.2 and cores >= 2:
        fewer = max(1.0, round(cores * float(r.choice([0.25, 0.5]))))
        change = ScheduledChange(at=at, key="machine.cores", value=fewer)
        return _with(scenario, at, "", change, near=near)
    if kind < 0.35 and movable:
        name = movable[int(r.integers(len(movable)))].name
        change = ScheduledChange(at=at, key=f"stages.{name}.lock", value=0.9)
        return _with(scenario, at, name, change, near=near)
    shares = np.array([s.cost_s / s.rows_per_item / max(1, s.workers) for s in scenario.stages])
    stage = scenario.stages[int(r.choice(len(shares), p=shares / shares.sum()))]
    return _case(scenario, at, stage.name, _factor(r), near=near)


def twin(seed: int) -> list[FaultCase]:
    """Returns the demo's training as slow items, once with its slow store and once with its slow lookup."""
    r = np.random.default_rng((13, seed))
    stages = tuple(
        SimStage(name=name, cost_s=s, rows_per_item=rows, cpu=cpu, workers=most, **more)
        for name, s, rows, cpu, most, more in (
            ("fetch", 0.61, 512, 0.02, 64, {"buffer_items": 1}),
            ("decode", 0.015, 512, 0.9, 2, {}),
            ("batch", 0.001, 64, 0.9, 4, {}),
            ("levels", 0.135, 512, 0.02, 16, {"backends": ("process",), "process_bytes": 2.0**26}),
        )
    )
    stages = tuple(dataclasses.replace(s, bytes_per_row=_ITEM_BYTES / 512) for s in stages)
    scenario = Scenario(
        name="twin of the demo",
        machine=SimMachine(cores=2.0, host_cores=16),
        consumer=Consumer(batch_rows=64, step_s=64 / 7300),
        stages=stages,
    )
    return [
        _case(scenario, float(at + r.uniform(-4, 4)), name, factor, near=False)
        for at, name, factor in ((46.4, "fetch", 1.4 / 0.6), (40.0, "levels", 2.95))
    ]


def _factor(r: np.random.Generator) -> float:
    return float(np.exp(r.uniform(math.log(1.5), math.log(4))))


def _case(scenario: Scenario, at: float, name: str, factor: float, *, near: bool) -> FaultCase:
    """Returns the scenario with a stage's cost multiplied at a moment."""
    stage = next(s for s in scenario.stages if s.name == name)
    changes = [ScheduledChange(at=at, key=f"stages.{name}.cost_s", value=factor * stage.cost_s)]
    if stage.cap_rows_per_s:
        cap = stage.cap_rows_per_s / factor
        changes.append(ScheduledChange(at=at, key=f"stages.{name}.cap_rows_per_s", value=cap))
    return _with(scenario, at, name, *changes, near=near)


def _with(
    scenario: Scenario, at: float, name: str, *changes: ScheduledChange, near: bool
) -> FaultCase:
    if near:
        faster = scenario.consumer.step_s / 1.5
        trainer = ScheduledChange(at=TRAINER_AT, key="consumer.step_s", value=faster)
        changes = (*changes, trainer)
    whole = dataclasses.replace(scenario, seconds=at + AFTER_S + 1, changes=changes)
    return FaultCase(whole, at, name, near)
