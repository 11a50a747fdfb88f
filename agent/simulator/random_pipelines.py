"""Random pipelines: a family to train on, and a held-out one from another generator with what training never shows.

Training's stages follow the plain capacity curve (contention, coherence, caps, waiting); now and then a lock. The
held-out ones share their costs out differently and each has one to three mechanisms that no such curve contains:
coupled interpreter locks, shared bandwidth, bursty stores, heavy tails, drifting costs, second threads, unseen
neighbours, cliffs, memory that lags, trainers slowed by the pool, slow starts of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from sluice.agent.simulator.physics import GIB, MIB, Consumer, SimMachine, SimStage
from sluice.agent.simulator.scenario import Scenario, ScheduledChange

HELD_OUT_SEEDS = 1_000_000  # held-out seeds begin here; training's stay below
_Values = dict[str, Any]


def training(seed: int) -> Scenario:
    """A pipeline to learn from; every other one changes during its run."""
    if not 0 <= seed < HELD_OUT_SEEDS:
        raise ValueError(f"seed {seed}: training's are from 0 to {HELD_OUT_SEEDS - 1}")
    random = np.random.default_rng((1, seed))
    cores = int(2 ** random.uniform(1, 7))
    rows = int(2 ** random.integers(10, 15))
    width = float(random.uniform(80, 600))
    stages = []
    for i in range(int(random.integers(2, 10))):
        cpu = 1.0 if random.random() < 0.6 else float(random.uniform(0.05, 0.9))
        both = i > 0 and random.random() < 0.25
        stages.append(SimStage(
            name=f"stage{i}", cost_s=float(rows * 10 ** random.uniform(-6.7, -4.7)), rows_per_item=rows,
            bytes_per_row=width, cpu=cpu, lock=float(random.uniform(0, 0.5)) if both else 0.0,
            sigma=float(random.uniform(0, 0.1)) if random.random() < 0.4 else 0.0,
            kappa=float(10 ** random.uniform(-4, -1.7)) if random.random() < 0.4 else 0.0,
            item_bytes=rows * width * float(random.uniform(0.8, 2.5)),
            backends=("thread", "process") if both else ("thread",)))
    if random.random() < 0.2:
        capped = int(random.integers(len(stages)))
        stages[capped] = dataclasses.replace(
            stages[capped], cap_rows_per_s=_cores_bound(stages, cores) * float(random.uniform(0.3, 1.2)))
    machine = SimMachine(cores=cores, memory_limit=_memory(stages, cores, float(random.uniform(0.3, 3))))
    consumer = _consumer(random, _cores_bound(stages, cores), rows)
    scenario = Scenario(name=f"training {seed}", family="training", seconds=120, machine=machine,
                        stages=tuple(stages), consumer=consumer)
    return _changing(scenario, random, 40, 80) if seed % 2 else scenario


def held_out(number: int, *, changing: bool) -> Scenario:
    """The held-out pipeline of that number, with or without changes during its run."""
    random = np.random.default_rng((2, HELD_OUT_SEEDS + number, int(changing)))
    cores = int(random.choice([2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]))
    count = int(random.integers(2, 10))
    row_s = float(10 ** random.uniform(-5.5, -4))  # seconds a row of the whole pipeline
    shares = random.dirichlet(np.full(count, 0.7))
    width = float(random.gamma(2, 120)) + 20
    stages = []
    for i, share in enumerate(shares):
        rows = int(random.choice([1024, 4096, 8192, 16384, 32768]))
        first = i == 0
        stages.append(SimStage(
            name=f"part{i}", cost_s=max(1e-5, float(share) * row_s * rows), rows_per_item=rows,
            cpu=float(random.beta(1, 2)) if first and random.random() < 0.5 else float(random.beta(9, 1)),
            sigma=float(random.exponential(0.01)), kappa=float(random.exponential(0.0008)), bytes_per_row=width,
            item_bytes=rows * width * float(random.gamma(3, 0.6) + 0.5)))
    machine = SimMachine(cores=cores, switch_cost=float(random.uniform(0.02, 0.15)),
                         memory_limit=_memory(stages, cores, float(random.uniform(0.4, 4))))
    values: _Values = {"machine": machine, "stages": stages, "consumer": _consumer(
        random, _cores_bound(stages, cores), int(random.choice([2048, 8192, 16384])))}
    chosen = random.choice(len(MECHANISMS), size=int(random.integers(1, 4)), replace=False)
    names = [list(MECHANISMS)[i] for i in sorted(chosen)]
    for name in names:
        MECHANISMS[name](random, values)
    scenario = Scenario(name=f"held out {number}{' changing' if changing else ''}", about=", ".join(names),
                        family="changing" if changing else "stationary", seconds=180 if changing else 120,
                        machine=values["machine"], stages=tuple(values["stages"]), consumer=values["consumer"])
    return _changing(scenario, random, 50, 110) if changing else scenario


def _cores_bound(stages: list[SimStage], cores: float) -> float:
    """The rows a second if only the cores limited them."""
    return cores / max(1e-12, sum(s.cost_s * max(s.cpu, 0.05) / s.rows_per_item for s in stages))


def _memory(stages: list[SimStage], cores: float, generosity: float) -> float:
    """A memory limit: the least for one item in each stage, and `generosity` times what the cores could keep in
    flight."""
    least = 512 * MIB + sum(s.held_bytes + s.rows_per_item * s.bytes_per_row for s in stages)
    mean = sum(s.held_bytes for s in stages) / len(stages)
    return min(1024 * GIB, 1.5 * least + generosity * 2 * cores * mean + 200 * MIB)


def _consumer(random: np.random.Generator, bound: float, batch: int) -> Consumer:
    """A trainer. Every third one takes all it can get; the others take from 0.3 to 1.3 times what the cores allow."""
    if random.random() < 1 / 3:
        return Consumer(batch_rows=batch)
    return Consumer(batch_rows=batch, step_s=batch / (bound * float(random.uniform(0.3, 1.3))))


def _changing(scenario: Scenario, random: np.random.Generator, first: float, second: float) -> Scenario:
    """Adds two changes to a scenario, one from `first` on and another from `second` on."""
    changes = []
    for at in (first, second):
        kind = random.choice(["cost", "cores", "demand"] if scenario.consumer.step_s else ["cost", "cores"])
        if kind == "cost":
            stage = scenario.stages[int(random.integers(len(scenario.stages)))]
            factor = float(np.exp(random.uniform(0.7, 1.6) * random.choice([-1, 1])))
            change = (f"stages.{stage.name}.cost_s", stage.cost_s * factor)
        elif kind == "cores":
            change = ("machine.cores", max(1.0, round(scenario.machine.cores * float(random.choice([0.25, 0.5, 2])))))
        else:
            change = ("consumer.step_s", scenario.consumer.step_s * float(random.choice([0.4, 0.6, 2])))
        over = float(random.choice([0, 0, 20]))
        changes.append(ScheduledChange(at=at, key=change[0], value=change[1], over=over))
    return dataclasses.replace(scenario, changes=tuple(changes))


# Mechanisms that no capacity curve of a single stage contains. Each alters the parts of a pipeline in place.

def _any(random: np.random.Generator, values: _Values, **changes: Any) -> None:
    stages: list[SimStage] = values["stages"]
    i = int(random.integers(len(stages)))
    stages[i] = dataclasses.replace(stages[i], **changes)


def _locks(random: np.random.Generator, values: _Values) -> None:
    for _ in range(2):
        _any(random, values, lock=float(random.uniform(0.2, 0.9)), backends=("thread", "process"),
             process_start_s=float(random.uniform(0.5, 3)))
    values["machine"] = dataclasses.replace(values["machine"], convoy=float(random.uniform(0.02, 0.2)))


def _bandwidth(random: np.random.Generator, values: _Values) -> None:
    stages: list[SimStage] = values["stages"]
    for i in range(len(stages)):
        stages[i] = dataclasses.replace(stages[i], memory_bound=float(random.uniform(0.1, 0.7)))
    flow = _cores_bound(stages, values["machine"].cores) * sum(s.bytes_per_row for s in stages)
    values["machine"] = dataclasses.replace(values["machine"], bandwidth=flow * float(random.uniform(0.5, 1.1)))


def _bursts(random: np.random.Generator, values: _Values) -> None:
    stages: list[SimStage] = values["stages"]
    stages[0] = dataclasses.replace(
        stages[0], cpu=min(stages[0].cpu, 0.4), burst_factor=float(random.uniform(2, 8)),
        burst_every_s=float(random.uniform(8, 30)), burst_s=float(random.uniform(1, 5)))


def _tails(random: np.random.Generator, values: _Values) -> None:
    for _ in range(2):
        _any(random, values, tail=float(random.uniform(0.8, 3)))


def _drift(random: np.random.Generator, values: _Values) -> None:
    _any(random, values, drift=float(random.uniform(0.01, 0.05)))


def _second_threads(random: np.random.Generator, values: _Values) -> None:
    values["machine"] = dataclasses.replace(values["machine"], smt=float(random.uniform(0.2, 0.6)))


def _neighbour(random: np.random.Generator, values: _Values) -> None:
    machine: SimMachine = values["machine"]
    values["machine"] = dataclasses.replace(machine, neighbour_cores=machine.cores * float(random.uniform(0.1, 0.4)))


def _cliff(random: np.random.Generator, values: _Values) -> None:
    machine: SimMachine = values["machine"]
    _any(random, values, cliff_workers=max(1, int(machine.cores * random.uniform(0.2, 0.8))),
         cliff_factor=float(random.uniform(1.5, 3.5)))


def _lagging_memory(random: np.random.Generator, values: _Values) -> None:
    values["machine"] = dataclasses.replace(values["machine"], memory_lag_s=float(random.uniform(5, 20)))


def _slowed_trainer(random: np.random.Generator, values: _Values) -> None:
    consumer: Consumer = values["consumer"]
    cores: float = values["machine"].cores
    step = consumer.step_s or consumer.batch_rows / _cores_bound(values["stages"], cores)
    values["consumer"] = dataclasses.replace(
        consumer, step_s=step, cpu=float(random.uniform(0.3, 0.9)), cores=max(1.0, cores / 8),
        interference=float(random.uniform(0.1, 0.6)))


MECHANISMS: dict[str, Callable[[np.random.Generator, _Values], None]] = {
    "coupled locks": _locks, "shared bandwidth": _bandwidth, "bursty store": _bursts, "heavy tails": _tails,
    "drifting cost": _drift, "second threads": _second_threads, "unseen neighbour": _neighbour, "cliff": _cliff,
    "lagging memory": _lagging_memory, "slowed trainer": _slowed_trainer,
}
