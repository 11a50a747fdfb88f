"""The simulator: what must hold of it whatever the pipeline, and known answers where there are any."""

from __future__ import annotations

import dataclasses
import random

import pytest

from sluice import Knobs
from sluice.agent.lab.simulator.flow import steady
from sluice.agent.lab.simulator.random_pipelines import pipeline as drawn
from sluice.ingest import stage_spec
from tests.product import (
    BACKENDS,
    Consumer,
    Scenario,
    ScheduledChange,
    SimMachine,
    SimStage,
    Simulator,
)

pytestmark = pytest.mark.slow

ROWS = 1024


def stages(*costs: float, **others: object) -> tuple[SimStage, ...]:
    return tuple(
        SimStage(name=f"s{i}", cost_s=c, rows_per_item=ROWS, workers=64, **others)
        for i, c in enumerate(costs)
    )  # type: ignore[arg-type]


def simulator(parts, workers, *, backend="thread", consumer=None, governor=True, **machine):
    free = {"cores": 64, "timer_noise": 0, "switch_cost": 0, "convoy": 0}
    scenario = Scenario(
        name="made",
        machine=SimMachine(**free | machine),
        consumer=consumer or Consumer(batch_rows=ROWS),
        stages=tuple(dataclasses.replace(stage, backends=(backend,)) for stage in parts),
        start={stage.name: count for stage, count in zip(parts, workers, strict=True)},
    )
    return Simulator(scenario, governor=governor)


def rate_of(pipeline, seconds: float = 20.0, warm: float = 10.0) -> float:
    pipeline.advance(warm)
    before = pipeline.snapshot().rows
    pipeline.advance(seconds)
    return (pipeline.snapshot().rows - before) / seconds


LOCKED = stages(0.01, lock=1.0, backends=("thread", "process"))


@pytest.mark.parametrize(
    ("machine", "parts", "workers", "backend", "items_per_s"),
    [
        ({}, stages(0.01, 0.04, 0.01), [1, 3, 1], "thread", 75),
        ({"cores": 2}, stages(0.01, 0.03), [8, 8], "thread", 2 / 0.04),
        ({"cores": 1}, stages(0.05, cpu=0.0), [20], "thread", 20 / 0.05),
        ({}, LOCKED, [4], "thread", 100),
        ({}, LOCKED, [4], "process", 400),
        ({}, stages(0.01, 0.01, lock=1.0), [4, 4], "thread", 50),
        (
            {"bandwidth": 100 * ROWS * 200},
            stages(0.01, 0.01, memory_bound=1.0, bytes_per_row=100),
            [8, 8],
            "thread",
            100,
        ),
        ({}, stages(0.01, cap_rows_per_s=200 * ROWS), [16], "thread", 200),
        ({}, stages(0.01, cliff_workers=4, cliff_factor=3), [5], "thread", 5 / 0.03),
        ({"cores": 4, "neighbour_threads": 4}, stages(0.01), [12], "thread", 300),
    ],
    ids=[
        "slowest stage",
        "cores are shared",
        "a store needs no core",
        "lock, threads",
        "lock, processes",
        "two at one lock",
        "bandwidth",
        "cap",
        "cliff",
        "a fair share beside other programs",
    ],
)
def test_known_rates(machine, parts, workers, backend, items_per_s):
    pipeline = simulator(parts, workers, backend=backend, **machine)
    assert rate_of(pipeline) == pytest.approx(items_per_s * ROWS, rel=0.03)
    expected = steady(pipeline.truth, workers, [backend] * len(workers)).rates[-1]
    assert expected == pytest.approx(items_per_s * ROWS, rel=0.03)


def test_new_workers_work_only_once_they_have_started():
    pipeline = simulator(stages(0.1, start_s=5.0), [1])
    pipeline.advance(1.0)
    pipeline.apply(pipeline.knobs.with_workers(s0=4))
    assert rate_of(pipeline, seconds=4.0, warm=0.0) == pytest.approx(10 * ROWS, rel=0.05)
    assert rate_of(pipeline) == pytest.approx(40 * ROWS, rel=0.05)


def test_a_small_memory_kills_without_the_governor_and_holds_back_with_it():
    bare, kept = (
        simulator(
            stages(0.05, 0.05, item_bytes=64 * 2**20),
            [16, 16],
            governor=governor,
            memory_limit=1.2 * 2**30,
            base_bytes=2**29,
        )
        for governor in (False, True)
    )
    bare.advance(20)
    kept.advance(20)
    assert (bare.killed, kept.killed) == (True, False)
    assert kept.snapshot().held_back > 0
    rows = bare.snapshot().rows
    assert kept.snapshot().rows > rows
    bare.advance(5)
    assert bare.snapshot().rows == rows, "a killed run delivers nothing more"


@pytest.mark.parametrize(
    ("split", "number"),
    [("hidden", 17018), ("hidden", 17102), *(("held out", n) for n in range(4))],
)
def test_no_queue_passes_its_limit(split, number):
    """The first two have ten stages. Their queues become full one after the other within a millisecond."""
    scenario = drawn(split, number, changing=False)
    pipeline = Simulator(scenario, seed=number)
    for _ in range(40):
        pipeline.advance(0.25)
        for rows, limit in zip(pipeline.queue, pipeline.queue_limits, strict=True):
            assert rows <= limit * 1.001
    assert not pipeline.killed


def test_what_snapshots_say_adds_up():
    """Workers are busy, starved or blocked all the time, and the consumer waits or computes."""
    trainer = Consumer(batch_rows=ROWS, step_s=0.02)
    pipeline = simulator(stages(0.01, 0.03, 0.02), [2, 2, 2], consumer=trainer)
    for _ in range(10):
        pipeline.advance(1.0)
        now = pipeline.snapshot()
        assert now.consumer_wait_s + now.consumer_compute_s == pytest.approx(now.at, rel=1e-3)
        for stage in now.stages:
            spent = stage.busy_s + stage.wait_input_s + stage.wait_output_s
            assert spent == pytest.approx(2 * now.at, rel=0.01)
            assert stage.cpu_s <= stage.busy_s * 1.001
            assert stage.queue_bytes <= stage.queue_limit_bytes * 1.01
    rows = [*(stage.rows for stage in now.stages), now.rows]
    assert rows == sorted(rows, reverse=True)


class Forgetful(Simulator):
    """The slow twin: works everything out again for every stretch of time."""

    def _start(self) -> float:
        self._changed()
        self._flow = None
        return super()._start()


@pytest.mark.parametrize("number", [0, 3, 4, 5, 6, 7])
def test_what_is_kept_from_one_moment_to_the_next_is_what_it_would_be(number):
    """To the bit, while knobs, back ends and the truth change, with short memory. These six have all mechanisms."""
    scenario = drawn("held out", number, changing=True)
    sizes = [
        ScheduledChange(at=at, key=f"stages.{s.name}.{key}", value=value)
        for s in scenario.stages
        for at, key, value in (
            (40, "bytes_per_row", 3 * s.bytes_per_row),
            (70, "item_bytes", s.held_bytes / 3),
        )
    ]
    machine = dataclasses.replace(
        scenario.machine, memory_limit=1.1 * scenario.machine.memory_limit
    )
    scenario = dataclasses.replace(scenario, machine=machine, changes=(*scenario.changes, *sizes))
    draw = random.Random(number)
    kept, forgetful = (kind(scenario, seed=number) for kind in (Simulator, Forgetful))
    for _ in range(30):
        workers = {
            n: draw.randint(1, min(12, high)) for n, (_, high) in scenario.limits.workers.items()
        }
        backend = {n: draw.choice(kinds) for n, kinds in scenario.limits.backends.items()}
        prefetch_bytes = 2**21 * (1 + workers["stage0"] % 9)
        for pipeline in (kept, forgetful):
            pipeline.apply(Knobs(workers=workers, backend=backend, prefetch_bytes=prefetch_bytes))
            pipeline.advance(4)
        assert kept.snapshot() == forgetful.snapshot()


def test_a_simulated_stage_has_the_limits_and_the_start_of_the_real_one():
    specs = stage_spec.pipeline(
        [stage_spec.transform(name, movable=True) for name in ("first", "second")]
    )
    scenario = Scenario(
        name="real",
        machine=SimMachine(cores=3),
        stages=tuple(SimStage(**dataclasses.asdict(spec), cost_s=0.01) for spec in specs),
    )
    assert scenario.limits.workers == stage_spec.limits_of(specs, 3, BACKENDS).workers
    assert scenario.first_knobs.workers == {spec.name: spec.first_workers(3) for spec in specs}
