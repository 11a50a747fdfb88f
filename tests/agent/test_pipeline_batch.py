"""Many pipelines at once do what each does alone in the fluid simulator, as far as the module says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sluice.agent.costs.rates import rates
from sluice.agent.learn.pipeline_batch import PipelineBatch
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.simulator.random_pipelines import SPLITS, pipeline
from sluice.agent.simulator.scenario import Scenario, ScheduledChange
from sluice.ingest.knobs import Knobs
from tests.raises import raises

pytestmark = pytest.mark.slow

ROWS = 1024
TOLERANCE = 0.02
BUSY_TOLERANCE = 0.12  # of a stage that shares a lock, where rows still agree within TOLERANCE
"""The share by which rows and times may differ where neither chance nor the governor has a part in them."""


def calm(scenario: Scenario) -> Scenario:
    """The scenario without anything that is drawn while it runs."""
    stages = tuple(
        dataclasses.replace(s, drift=0.0, tail=0.0, burst_every_s=0.0) for s in scenario.stages
    )
    return dataclasses.replace(
        scenario, stages=stages, machine=dataclasses.replace(scenario.machine, timer_noise=0.0)
    )


def drawn(scenario: Scenario, random: np.random.Generator) -> Knobs:
    limits, cores = scenario.limits, int(scenario.machine.cores)
    workers = {
        name: min(high, 1 + int(random.integers(max(2, cores // 2))))
        for name, (_, high) in limits.workers.items()
    }
    return limits.clamp(
        dataclasses.replace(
            scenario.first_knobs,
            workers=workers,
            backend={name: str(random.choice(limits.backends_of(name))) for name in workers},
        )
    )


def test_it_agrees_with_the_simulator_of_one_pipeline():
    random = np.random.default_rng(7)
    scenarios = [calm(pipeline(split, number)) for split in SPLITS for number in range(12)]
    knobs = [drawn(scenario, random) for scenario in scenarios]
    batch = PipelineBatch(scenarios)
    batch.advance(1.0)
    batch.apply(batch.knobs_of(knobs))
    batch.advance(9.0)
    compared, killed = 0, 0
    for b, scenario in enumerate(scenarios):
        alone = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs)
        alone.advance(1.0)
        alone.apply(knobs[b])
        alone.advance(8.0)
        rows, busy_s = alone.consumed, list(alone.busy_s)
        alone.advance(1.0)
        quarter = 0.25 * (alone.consumed - rows)
        """What passes in the quarter of a second by which a start may be off; each stage's busy time likewise."""
        assert alone.killed == batch.killed[b], scenario.name
        killed += alone.killed
        if alone.killed or alone.governor_acted or batch.governor_acted[b]:
            continue
        compared += 1
        one, other = alone.snapshot(), batch.snapshot(b)
        off = scenario.consumer.batch_rows + quarter
        assert other.rows == pytest.approx(one.rows, rel=TOLERANCE, abs=off), scenario
        assert other.memory_used == pytest.approx(one.memory_used, rel=TOLERANCE)
        assert other.consumer_wait_s == pytest.approx(
            one.consumer_wait_s, rel=TOLERANCE, abs=10 * TOLERANCE
        )
        busiest = max(stage.busy_s for stage in one.stages)
        for stage, twin, before in zip(one.stages, other.stages, busy_s, strict=True):
            begun = scenario.first_knobs.workers[
                stage.name
            ]  # all of them fill an empty buffer at the start
            off = TOLERANCE * busiest + 0.25 * max(stage.busy_s - before, begun)
            assert (stage.name, stage.workers, stage.backend) == (
                twin.name,
                twin.workers,
                twin.backend,
            )
            assert twin.busy_s == pytest.approx(stage.busy_s, rel=BUSY_TOLERANCE, abs=off), scenario
            assert twin.cpu_s == pytest.approx(stage.cpu_s, rel=TOLERANCE, abs=off), scenario
    assert compared >= len(scenarios) // 2


def one(
    *costs: float,
    machine: SimMachine | None = None,
    changes: tuple[ScheduledChange, ...] = (),
    **others: object,
) -> Scenario:
    parts = tuple(
        SimStage(name=f"s{i}", cost_s=c, rows_per_item=ROWS, **others)  # type: ignore[arg-type]
        for i, c in enumerate(costs)
    )
    return Scenario(
        name="one",
        stages=parts,
        consumer=Consumer(batch_rows=ROWS),
        changes=changes,
        machine=machine or SimMachine(cores=64, timer_noise=0, switch_cost=0),
    )


def rows_of(batch: PipelineBatch, seconds: float) -> list[float]:
    before = batch.consumed.copy()
    batch.advance(seconds)
    return list(batch.consumed - before)


def test_a_batch_holds_pipelines_of_any_length_and_their_slowest_stage_sets_the_pace():
    batch = PipelineBatch([one(0.01), one(0.01, 0.04, 0.02), one(0.02, 0.01)])
    batch.advance(5.0)
    assert rows_of(batch, 10.0) == pytest.approx([1000 * ROWS, 250 * ROWS, 500 * ROWS], rel=0.01)
    assert batch.real.sum(axis=0).tolist() == [1, 3, 2]


def test_a_process_works_once_it_has_started():
    scenario = one(0.01, lock=1.0, backends=("thread", "process"), process_start_s=3.0)
    batch = PipelineBatch([scenario])
    knobs = batch.knobs_of([Knobs(workers={"s0": 4}, backend={"s0": "process"})])
    batch.apply(knobs)
    assert rows_of(batch, 2.75) == pytest.approx([0.0], abs=1)
    assert rows_of(batch, 10.0) == pytest.approx([3900 * ROWS], rel=0.05)
    batch.apply(dataclasses.replace(knobs, workers=np.full_like(knobs.workers, 9)))
    batch.apply(dataclasses.replace(knobs, workers=np.full_like(knobs.workers, 2)))
    assert rows_of(batch, 10.0) == pytest.approx([2000 * ROWS], rel=0.05), (
        "who has not started goes first"
    )


def test_a_store_gives_credit_until_it_throttles():
    batch = PipelineBatch([one(0.01, cpu=0.0, cap_rows_per_s=20 * ROWS, credit_rows=400 * ROWS)])
    assert rows_of(batch, 4.0) == pytest.approx([400 * ROWS], rel=0.03)
    assert rows_of(batch, 6.0) == pytest.approx([200 * ROWS], rel=0.03)


def test_a_change_of_truth_is_taken_over():
    change = ScheduledChange(at=5.0, key="stages.s0.cost_s", value=0.04)
    batch = PipelineBatch([one(0.01), one(0.01, changes=(change,))])
    assert rows_of(batch, 5.0) == pytest.approx([500 * ROWS] * 2, rel=0.02)
    assert rows_of(batch, 5.0) == pytest.approx([500 * ROWS, 125 * ROWS], rel=0.02)


@pytest.mark.parametrize("governor", [True, False])
def test_the_governor_keeps_a_pipeline_alive_that_would_be_killed(governor):
    machine = SimMachine(cores=64, timer_noise=0, memory_limit=1.2 * 2**30)
    batch = PipelineBatch(
        [one(0.05, 0.05, machine=machine, item_bytes=64 * 2**20)], governor=governor
    )
    batch.apply(batch.knobs_of([Knobs(workers={"s0": 32, "s1": 32})]))
    batch.advance(5.0)
    assert batch.killed.tolist() == [not governor]
    assert batch.governor_acted.tolist() == [governor]
    assert bool(rows_of(batch, 5.0)[0]) is governor


def test_one_seed_gives_one_course_and_another_seed_another():
    scenarios = [pipeline("training", number) for number in range(20)]
    courses = []
    for seed in (0, 0, 1):
        batch = PipelineBatch(scenarios, seed=seed)
        batch.advance(4.0)
        courses.append((batch.consumed.tolist(), batch.busy_s.tolist()))
    assert courses[0] == courses[1] != courses[2]


def test_knobs_stay_within_the_limits_and_a_look_gives_rates():
    batch = PipelineBatch([one(0.01, 0.02)])
    asked = batch.knobs_of([Knobs(workers={"s0": 4000, "s1": 1}, backend={"s0": "process"})])
    batch.apply(dataclasses.replace(asked, prefetch_bytes=np.array([1.0])))
    assert batch.knobs.workers[:, 0].tolist() == [64, 1]
    assert not batch.knobs.process.any(), "this stage cannot be moved"
    assert batch.knobs.prefetch_bytes.tolist() == [2**20]
    first = batch.snapshot(0)
    batch.advance(5.0)
    seen = rates(first, batch.snapshot(0))
    assert seen is not None
    assert seen.rows_per_s == pytest.approx(50 * ROWS, rel=0.03)
    assert seen.stages["s1"].busy == pytest.approx(1.0, rel=0.03)


def test_a_batch_that_cannot_be_simulated_is_refused():
    fused = SimStage(name="second", cost_s=0.01, fusable=True, begins_fused=True)
    scenario = one(0.01)
    with raises(ValueError, "one", "fused stages"):
        PipelineBatch([dataclasses.replace(scenario, stages=(*scenario.stages, fused))])
    with raises(ValueError, "0.3", "0.25"):
        PipelineBatch([one(0.01)]).advance(0.3)
