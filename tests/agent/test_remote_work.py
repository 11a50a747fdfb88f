"""Remote workers in the simulator: their time at work, and how many of them the planner wants."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sluice.agent.controller import Controller
from sluice.agent.costs.remote_work import at_work
from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.scenario import Scenario, ScheduledChange
from sluice.agent.planner_settings import PlannerSettings
from sluice.agent.policies.planner.planner import Planner
from sluice.ingest.knobs import REQUESTS_A_CORE
from sluice.ingest.stats import Snapshot, StageStats
from tests.agent.simulated_fleet import FleetPipeline, FleetTruth

GROUP, BATCH = 65536, 8192


def _seen(at, busy_s, workers, **more):
    read = StageStats(
        name="read",
        items=int(at),
        rows=int(1000 * at),
        bytes=0,
        busy_s=busy_s,
        cpu_s=0.0,
        workers=8,
        wait_input_s=0.0,
        wait_output_s=0.0,
        backend="remote",
    )
    collate = dataclasses.replace(read, name="collate", backend="thread")
    return Snapshot(
        at=at,
        sequence=int(at),
        stages=(read, collate),
        batches=0,
        rows=int(1000 * at),
        consumer_wait_s=0.0,
        consumer_compute_s=at,
        memory_used=0,
        memory_limit=2**30,
        cpu_quota=1.0,
        cpu_used_s=0.0,
        elsewhere={"workers": workers, **more},
    )


@pytest.mark.parametrize(
    ("asking", "workers", "work"),
    [
        (8.0, 4, 8.0),  # all four have two requests each: what is measured is right
        (2.0, 4, 4.0),  # there is room for all: a request takes half as long as it would then
        (8.0, 1, 2.0),  # three of the four are not there yet, and six requests wait for them
        (0.0, 4, 0.0),
    ],
)
def test_time_at_work_of_remote_workers_does_not_depend_on_who_waits(asking, workers, work):
    before = _seen(1.0, 3.0, workers, requests_a_core=REQUESTS_A_CORE)
    weighed = dataclasses.replace(
        before, stages=(dataclasses.replace(before.stages[0], busy_s=7.0), before.stages[1])
    )
    after = at_work(
        _seen(2.0, 3.0 + asking, workers, requests_a_core=REQUESTS_A_CORE), before, weighed
    )
    assert after.stages[0].busy_s == pytest.approx(7.0 + work)
    ranks = {"requests_a_core": REQUESTS_A_CORE, "ranks": 3}
    alike = at_work(
        _seen(2.0, 3.0 + asking, 3 * workers, **ranks),
        _seen(1.0, 3.0, 3 * workers, **ranks),
        weighed,
    )
    assert alike.stages[0].busy_s == after.stages[0].busy_s, (
        "three ranks, each with as many workers"
    )
    assert after.stages[1].busy_s == 3.0 + asking, "what this host does is left as it is"
    assert at_work(_seen(2.0, 4.0, workers), before, before).stages[0].busy_s == 4.0, (
        "a fleet that does not scale"
    )


def _pipeline(
    *, needed=6.0, seed=0, changes=(), truth=None, sigma=0.0, transform_s=1e-3, seconds=600
):
    per_s = 500_000.0
    stages = (
        SimStage(
            name="read",
            cost_s=needed * GROUP / per_s,
            rows_per_item=GROUP,
            cpu=0.02,
            workers=64,
            workers_a_core=0,
            backends=("remote", "thread"),
            sigma=sigma,
        ),
        SimStage(
            name="transform", cost_s=transform_s, rows_per_item=BATCH, workers=2, workers_a_core=0
        ),
    )
    step_s = BATCH / per_s
    return FleetPipeline(
        Scenario(
            name="fleet",
            seconds=seconds,
            machine=SimMachine(cores=8),
            stages=stages,
            start={"read": 2, "transform": 2},
            consumer=Consumer(batch_rows=BATCH, step_s=step_s),
            changes=tuple(
                ScheduledChange(at=at, key="consumer.step_s", value=step_s / pace)
                for at, pace in changes
            ),
        ),
        truth or FleetTruth(start_s=30.0),
        seed=seed,
    )


def _tune(pipeline, seconds, **settings):
    """The decisions, with the numbers of workers after each."""
    decided = []
    controller = Controller(
        pipeline,
        Planner(PlannerSettings(**settings)),
        clock=lambda: pipeline.now,
        record=lambda event: decided.append(event) if event["kind"] == "decision" else None,
    )
    for _ in range(seconds):
        controller.step()
        pipeline.advance(1.0)
    assert controller.frozen is None
    return decided


def test_a_fleet_grows_to_what_the_trainer_takes_and_no_further():
    pipeline = _pipeline()
    decided = _tune(pipeline, 200)
    assert 6 <= pipeline.fleet.ready <= 8
    assert len(decided) <= 2
    assert pipeline.snapshot().elsewhere["start_s"] == pytest.approx(30.0, rel=0.35)


def test_the_last_worker_has_to_bring_its_price():
    wanted = []
    for price in (1e-6, 0.03):
        pipeline = _pipeline(needed=20.0, sigma=0.05)  # each further worker brings less
        _tune(pipeline, 130, remote_core_price=price)
        wanted.append(pipeline.fleet.wanted)
    assert wanted[0] >= 24, "all that there are do not feed this trainer"
    assert wanted[1] <= 12, "the thirteenth brings less than 3 % of what it takes"


def test_remote_workers_are_given_back_where_this_host_is_the_bottleneck():
    pipeline = _pipeline(
        transform_s=2 * BATCH / 150_000
    )  # two workers of it do 150,000 rows/s, what two readers bring
    pipeline.apply(pipeline.knobs.with_workers(read=24))
    _tune(pipeline, 200)
    assert pipeline.fleet.wanted <= 4


def test_remote_workers_outlast_a_pause_but_not_a_slower_trainer():
    for pace, until, left in ((1e-3, 115.0, 6), (0.3, math.inf, 1)):
        back = () if until == math.inf else ((until, 1.0),)
        pipeline = _pipeline(changes=((100.0, pace), *back))
        _tune(pipeline, 250)
        assert pipeline.fleet.wanted >= left
    assert pipeline.fleet.wanted <= 3
