"""Makes random pipelines for training, evaluation and the final test of policies: `pipeline(split, number)`.

A family of pipelines distributes the costs over the stages in its own way, and belongs to one split. All splits have
the same mechanisms over the same ranges: heavy and light processes, cliffs, neighbours, bursts, drift, bandwidth,
stores that throttle, and trainers on the same cores. No two splits draw the same value. A range is cut into cells, and
each split has its own third of every cell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sluice.agent.lab.simulator.physics import MIB, Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.scenario import Scenario, ScheduledChange
from sluice.ingest.knobs import FETCH

SPLITS = ("training", "held out", "hidden")
_CELLS = 24
_SECONDS = 60.0
_CHANGING_SECONDS = 180.0
_CHANGES_AT = (50.0, 110.0)
_Stages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Draw:
    """A random generator that gives each split different values."""

    random: np.random.Generator
    split: int

    def between(self, low: float, high: float) -> float:
        """Returns a value from `low` to `high`, uniform in its logarithm."""
        place = (
            self.random.integers(_CELLS) + (self.split + self.random.random()) / len(SPLITS)
        ) / _CELLS
        return float(low * (high / low) ** place)

    def chance(self, share: float) -> bool:
        """Returns True in this share of all cases."""
        return bool(self.random.random() < share)

    def one_of(self, count: int) -> int:
        """Returns a whole number from 0 to `count` - 1."""
        return int(self.random.integers(count))


# A family says how the seconds of a row are distributed over the stages, and which stages wait for a store.


def _even(draw: Draw, count: int) -> _Stages:
    return [{"cost": draw.between(0.5, 2)} for _ in range(count)]


def _one_heavy(draw: Draw, count: int) -> _Stages:
    stages = _even(draw, count)
    stages[draw.one_of(count)]["cost"] *= draw.between(5, 50)
    return stages


def _far_store(draw: Draw, count: int) -> _Stages:
    cost = count * draw.between(0.3, 10)
    decoding = draw.between(0.02, 0.4)
    return [_fetching(cost * (1 - decoding)), {"cost": cost * decoding}, *_even(draw, count - 2)]


def _fetching(cost: float) -> dict[str, Any]:
    """Returns a stage that waits for a store. Its workers are row groups in flight."""
    return {"name": FETCH, "cost": cost, "cpu": 0.0}


def _thin(draw: Draw, count: int) -> _Stages:
    """Gives most of the work to a few stages."""
    stages = [{"cost": draw.between(1e-4, 1e-1)} for _ in range(count)]
    for _ in range(1 + count // 3):
        stages[draw.one_of(count)]["cost"] = draw.between(0.5, 2)
    return stages


def _dirichlet(draw: Draw, count: int) -> _Stages:
    return [{"cost": float(share) + 1e-3} for share in draw.random.dirichlet(np.full(count, 0.6))]


def _python_within(draw: Draw, count: int) -> _Stages:
    """Puts one stage in pure Python, which holds the interpreter's lock, among cheap stages."""
    stages = [{"cost": draw.between(0.1, 1)} for _ in range(count)]
    stages[draw.one_of(count)] = {"cost": draw.between(1, 8), "lock": draw.between(0.5, 1)}
    return stages


def _rising(draw: Draw, count: int) -> _Stages:
    """Raises or lowers the cost by the same factor from stage to stage."""
    step = draw.between(1.2, 2) ** draw.random.choice([-1, 1])
    return [{"cost": float(step**i)} for i in range(count)]


def _two_stores(draw: Draw, count: int) -> _Stages:
    """Puts one store at the start, and a service at or near the end."""
    stages = [{"cost": draw.between(0.2, 1)} for _ in range(count)]
    late = count - 1 - draw.one_of(2)
    stages[late] = {"cost": draw.between(1, 20), "cpu": draw.between(0.02, 0.5)}
    stages[0] = _fetching(draw.between(1, 20))
    return stages


FAMILIES: dict[str, dict[str, Callable[[Draw, int], _Stages]]] = {
    "training": {"even": _even, "one heavy": _one_heavy, "far store": _far_store, "thin": _thin},
    "held out": {"dirichlet": _dirichlet, "python within": _python_within},
    "hidden": {"rising": _rising, "two stores": _two_stores},
}


# A mechanism changes the parts of a pipeline in place.


@dataclass(slots=True)
class _Parts:
    """The parts of a pipeline before it becomes a `Scenario`."""

    stages: list[SimStage]
    machine: SimMachine
    bound: float
    """The rows a second that the cores allow."""
    consumer: dict[str, float] = field(default_factory=dict)

    def alter(self, i: int, **changes: Any) -> None:
        self.stages[i] = dataclasses.replace(self.stages[i], **changes)


def _processes(draw: Draw, parts: _Parts) -> None:
    size = draw.between(10, 800) * MIB
    start = draw.between(0.1, 8)
    for i, stage in enumerate(parts.stages):
        if i and (stage.lock or draw.chance(0.5)):
            parts.alter(
                i,
                lock=stage.lock or draw.between(0.05, 0.9),
                backends=("thread", "process"),
                process_bytes=size,
                process_start_s=start,
                process_cost_s=stage.cost_s * draw.between(0.01, 0.3),
            )


def _cliff(draw: Draw, parts: _Parts) -> None:
    parts.alter(
        draw.one_of(len(parts.stages)),
        cliff_factor=draw.between(1.5, 6),
        cliff_workers=max(1, int(parts.machine.cores * draw.between(0.15, 0.9))),
    )


def _strict_neighbour(draw: Draw, parts: _Parts) -> None:
    parts.machine = dataclasses.replace(
        parts.machine, neighbour_cores=parts.machine.cores * draw.between(0.05, 0.5)
    )


def _fair_neighbour(draw: Draw, parts: _Parts) -> None:
    parts.machine = dataclasses.replace(
        parts.machine, neighbour_threads=parts.machine.cores * draw.between(0.1, 2)
    )


def _bursts(draw: Draw, parts: _Parts) -> None:
    stage = parts.stages[0]
    parts.alter(
        0,
        cpu=min(stage.cpu, draw.between(0.05, 0.5)),
        burst_factor=draw.between(2, 8),
        burst_every_s=draw.between(5, 30),
        burst_s=draw.between(1, 5),
    )


def _drift(draw: Draw, parts: _Parts) -> None:
    parts.alter(draw.one_of(len(parts.stages)), drift=draw.between(0.005, 0.05))


def _tails(draw: Draw, parts: _Parts) -> None:
    parts.alter(draw.one_of(len(parts.stages)), tail=draw.between(0.5, 3))


def _crowding(draw: Draw, parts: _Parts) -> None:
    parts.alter(
        draw.one_of(len(parts.stages)),
        sigma=draw.between(0.003, 0.1),
        kappa=draw.between(1e-4, 0.02),
    )


def _bandwidth(draw: Draw, parts: _Parts) -> None:
    for i in range(len(parts.stages)):
        parts.alter(i, memory_bound=draw.between(0.1, 0.8))
    flow = parts.bound * sum(stage.bytes_per_row for stage in parts.stages)
    parts.machine = dataclasses.replace(parts.machine, bandwidth=flow * draw.between(0.4, 1.2))


def _throttled_store(draw: Draw, parts: _Parts) -> None:
    rows_per_s = parts.bound * draw.between(0.2, 1.2)
    parts.alter(0, cap_rows_per_s=rows_per_s, credit_rows=rows_per_s * draw.between(0.5, 40))


def _trainer_on_cores(draw: Draw, parts: _Parts) -> None:
    """Lets the trainer compute on the same cores, where other threads slow it down."""
    parts.consumer = {
        "cpu": draw.between(0.1, 1),
        "cores": parts.machine.cores * draw.between(0.05, 0.6),
        "interference": draw.between(0.02, 0.5),
    }


def _second_threads(draw: Draw, parts: _Parts) -> None:
    parts.machine = dataclasses.replace(parts.machine, smt=draw.between(0.15, 0.7))


MECHANISMS = {
    "processes": _processes,
    "cliff": _cliff,
    "strict neighbour": _strict_neighbour,
    "fair neighbour": _fair_neighbour,
    "bursts": _bursts,
    "drift": _drift,
    "tails": _tails,
    "crowding": _crowding,
    "bandwidth": _bandwidth,
    "throttled store": _throttled_store,
    "trainer on the cores": _trainer_on_cores,
    "second threads": _second_threads,
}


def _stage(
    draw: Draw,
    shape: dict[str, Any],
    i: int,
    *,
    count: int,
    rows: int,
    width: float,
    seconds: float,
) -> SimStage:
    """Returns a stage with this shape and limits like those of real pipelines.

    A reader may have many workers, also at the start. A last stage that only passes batches on has one."""
    cost = shape["cost"]
    workers = 8 * 2 ** draw.one_of(2)
    a_core = 2 ** draw.one_of(3)
    for_each_core = 0
    fetches = shape.get("name") == FETCH
    if fetches or (i == 0 and draw.chance(0.5)):
        workers = 64
        a_core = 8
        for_each_core = not fetches
    elif i == count - 1 and draw.chance(0.4):
        workers = 1
        a_core = 0
        cost = cost * draw.between(1e-3, 0.1)
    return SimStage(
        name=shape.get("name", f"stage{i}"),
        cost_s=max(1e-5, rows * seconds * cost),
        rows_per_item=rows,
        bytes_per_row=width,
        item_bytes=rows * width * draw.between(0.8, 3),
        cpu=shape.get("cpu", 1.0),
        lock=shape.get("lock", 0.0),
        workers=workers,
        workers_a_core=a_core,
        for_each_core=for_each_core,
    )


def pipeline(
    split: str,
    number: int,
    *,
    most_stages: int = 12,
    changing: bool = False,
) -> Scenario:
    """Returns the pipeline of this number. The same arguments always give the same pipeline.

    With `changing`, the pipeline runs longer, and its costs, cores or trainer change twice."""
    if split not in SPLITS or number < 0:
        raise ValueError(
            f"{split!r} {number}: a split is one of {', '.join(SPLITS)}, and its pipelines begin at 0"
        )
    place = SPLITS.index(split)
    draw = Draw(np.random.default_rng((5, place, number)), place)
    family = list(FAMILIES[split])[number % len(FAMILIES[split])]
    cores = draw.between(0.25, 128)
    # A quota may give a rank part of a core.
    cores = round(cores) if cores >= 2 else round(cores, 2)
    rows = int(2 ** draw.random.integers(10, 16))
    shape = FAMILIES[split][family](draw, 2 + draw.one_of(most_stages - 1))
    width = draw.between(20, 4000)
    parts = _drawn_parts(draw, shape, cores=cores, rows=rows, width=width)
    chosen = sorted(draw.random.choice(len(MECHANISMS), size=1 + draw.one_of(4), replace=False))
    names = [list(MECHANISMS)[i] for i in chosen]
    if any(stage.lock for stage in parts.stages) and "processes" not in names:
        names.insert(0, "processes")
    for name in names:
        MECHANISMS[name](draw, parts)
    batch = int(2 ** draw.random.integers(11, 15))
    takes_all = draw.chance(0.4) and not parts.consumer
    consumer = Consumer(
        batch_rows=batch,
        step_s=0.0 if takes_all else batch / (parts.bound * draw.between(0.3, 1.3)),
        **parts.consumer,
    )
    memory = _drawn_memory(draw, parts, batch * width)
    scenario = Scenario(
        name=f"{split} {number}",
        about=", ".join([family, *names]),
        seconds=_SECONDS,
        machine=dataclasses.replace(parts.machine, memory_limit=memory),
        stages=tuple(parts.stages),
        consumer=consumer,
    )
    return (
        _changing(scenario, Draw(np.random.default_rng((5, place, number, 1)), place))
        if changing
        else scenario
    )


def _drawn_parts(draw: Draw, shape: _Stages, *, cores: float, rows: int, width: float) -> _Parts:
    seconds = draw.between(3e-6, 1e-4) / sum(stage["cost"] for stage in shape)
    groups = rows * 2 ** draw.one_of(5)
    stages = [
        _stage(
            draw,
            stage,
            i,
            count=len(shape),
            rows=rows if i > (shape[0].get("name") == FETCH) else groups,
            width=width,
            seconds=seconds,
        )
        for i, stage in enumerate(shape)
    ]
    machine = SimMachine(cores=cores, switch_cost=draw.between(0.01, 0.15))
    bound = cores / sum(s.cost_s * s.cpu / s.rows_per_item for s in stages)
    return _Parts(stages, machine, bound)


def _drawn_memory(draw: Draw, parts: _Parts, batch_bytes: float) -> float:
    """Returns a memory limit, from tight to plentiful."""
    stages = parts.stages
    held = sum(s.held_bytes + s.rows_per_item * s.bytes_per_row * s.buffer_items for s in stages)
    process = max(s.process_bytes * (len(s.backends) > 1) for s in stages)
    at_work = max(s.held_bytes for s in stages) + process
    queues = 1.5 * (held + batch_bytes)
    memory = queues + 768 * MIB + parts.machine.cores * at_work * draw.between(0.3, 4)
    return memory * draw.between(2, 100) if draw.chance(0.3) else memory


def _changing(scenario: Scenario, draw: Draw) -> Scenario:
    """Returns the scenario with two changes: of a stage's cost, the cores or the trainer's step."""
    kinds = ["cost", "cores", "demand"] if scenario.consumer.step_s else ["cost", "cores"]
    changes = []
    for at in _CHANGES_AT:
        kind = kinds[draw.one_of(len(kinds))]
        if kind == "cost":
            stage = scenario.stages[draw.one_of(len(scenario.stages))]
            key = f"stages.{stage.name}.cost_s"
            value = stage.cost_s * draw.between(2, 5) ** draw.random.choice([-1, 1])
        elif kind == "cores":
            cores = scenario.machine.cores * float(draw.random.choice([0.25, 0.5, 2]))
            key = "machine.cores"
            value = max(1.0, round(cores))
        else:
            key = "consumer.step_s"
            value = scenario.consumer.step_s * float(draw.random.choice([0.4, 0.6, 2]))
        changes.append(
            ScheduledChange(at=at, key=key, value=value, over=20.0 if draw.chance(1 / 3) else 0.0)
        )
    return dataclasses.replace(
        scenario,
        name=f"{scenario.name} changing",
        seconds=_CHANGING_SECONDS,
        changes=tuple(changes),
    )
