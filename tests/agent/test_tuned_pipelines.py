"""The tuner on pipelines whose best setting is known by arithmetic, and in simulated ones."""

import itertools
import random
from dataclasses import replace

import pytest

from sluice.agent.lab.simulator.physics import GIB
from sluice.agent.lab.simulator.rollout import run
from tests.agent.fake import FakePipeline, FakeStage, go_on, of, tune
from tests.product import Scenario, ScheduledChange, SimMachine, SimStage, make, shipped

pytestmark = pytest.mark.slow

MIB = 2**20


def _rate(pipeline):
    return pipeline.rows_per_s(pipeline.knobs.workers)


def _store_bound(**more):
    return FakePipeline(
        [
            FakeStage(name="decode", cpu_s=0.002, wait_s=0.05),
            FakeStage(name="transform", cpu_s=0.004),
            FakeStage(name="collate", cpu_s=0.001),
        ],
        **more,
    )


def test_a_slow_store_gets_more_readers_than_there_are_cores():
    pipeline = _store_bound()
    before = _rate(pipeline)
    _, events = tune(pipeline, 10)
    assert _rate(pipeline) > before
    assert pipeline.knobs.workers["decode"] > pipeline.cores
    assert "decode 1 → " in events[0]["reason"]["text"]
    assert events[0]["reason"]["bottleneck"] == "decode"


def test_a_store_that_refuses_requests_gets_no_more_of_them():
    pipeline, refused = _store_bound(), itertools.count()
    snapshot = pipeline.snapshot
    pipeline.snapshot = lambda: replace(snapshot(), throttled=next(refused))
    controller, _ = tune(pipeline, 30)
    assert pipeline.knobs.workers["decode"] == 1
    refused = itertools.repeat(next(refused))
    go_on(controller, pipeline, 100)
    assert pipeline.knobs.workers["decode"] == 1
    go_on(controller, pipeline, 30)
    assert pipeline.knobs.workers["decode"] > pipeline.cores


class RemoteReaders(FakePipeline):
    """Its readers ask remote workers, which take a while to start."""

    def __init__(self, delay_s, **more):
        stages = [
            FakeStage(name="decode", cpu_s=0.0001, wait_s=0.05, most=64),
            FakeStage(name="collate", cpu_s=0.0001),
        ]
        super().__init__(stages, cores=8, **more)
        self.delay_s = delay_s
        self.ready, self.due = self.knobs.workers["decode"], []

    @property
    def limits(self):
        return replace(super().limits, backends={"decode": ("remote",)})

    def apply(self, knobs):
        more = knobs.workers["decode"] - self.ready - sum(count for _, count in self.due)
        self.due += [(self.now + self.delay_s, more)] if more > 0 else []
        self.ready = min(self.ready, knobs.workers["decode"])
        super().apply(knobs)

    def advance(self, seconds):
        self.ready += sum(count for at, count in self.due if at <= self.now)
        self.due = [arrival for arrival in self.due if arrival[0] > self.now]
        self.ready = min(self.ready, self.knobs.workers["decode"])
        self.stages[0] = replace(
            self.stages[0], wait_s=0.05 * self.knobs.workers["decode"] / self.ready
        )
        super().advance(seconds)

    def snapshot(self):
        waiting = sum(count for _, count in self.due)
        fleet = {"workers": self.ready / 2, "starting": waiting / 2}
        fleet |= {"start_s": self.delay_s, "requests_a_core": 2}
        seen = super().snapshot()
        stages = (replace(seen.stages[0], backend="remote"), *seen.stages[1:])
        return replace(seen, stages=stages, elsewhere=fleet)


def test_remote_workers_are_judged_once_they_have_started():
    for delay_s in (6.0, 90.0):
        pipeline = RemoteReaders(delay_s, step_s=0.004)
        controller, _ = tune(pipeline, delay_s + 30)
        assert 13 <= pipeline.ready <= 16, "a batch in 4 ms needs 12.5, and a little more"
        assert controller.decisions == 1


def test_remote_workers_outlast_a_pause_but_not_a_slower_trainer():
    pipeline = RemoteReaders(30.0, step_s=0.004)
    controller, _ = tune(pipeline, 100)
    kept = pipeline.knobs
    for step_s, looks in ((4.0, 15), (0.004, 30)):
        pipeline.step_s = step_s
        go_on(controller, pipeline, looks)
        assert pipeline.knobs == kept
    pipeline.step_s = 0.05
    go_on(controller, pipeline, 100)
    assert pipeline.knobs.workers["decode"] <= 3


def test_a_trainer_bound_run_gives_workers_back_and_does_not_stall():
    pipeline = _store_bound(
        cores=8, step_s=0.02, workers={"decode": 16, "transform": 8, "collate": 8}
    )
    tune(pipeline, 60)
    assert pipeline.knobs.total_workers < 16
    before = pipeline.snapshot()
    pipeline.advance(60)
    assert pipeline.snapshot().consumer_wait_s - before.consumer_wait_s < 1.0


def test_an_evaluation_takes_no_workers_away():
    """For nine looks the trainer takes a tenth of the rows."""
    pipeline = _store_bound(cores=8, step_s=0.004)
    controller, _ = tune(pipeline, 60)
    settled = pipeline.knobs
    pipeline.step_s = 0.04
    go_on(controller, pipeline, 9)
    assert pipeline.knobs == settled


class Governed(FakePipeline):
    """Its governor keeps memory for work that is due."""

    kept = 512 * MIB

    def snapshot(self):
        told = super().snapshot()
        free = self.memory_limit - self.kept - told.memory_used
        return replace(told, memory_free=max(0, free))


def test_readers_grow_into_the_memory_that_the_governor_admits():
    """The memory in use would allow more."""
    read = FakeStage(name="decode", cpu_s=0.001, wait_s=0.05, item_bytes=8 * MIB)
    out = FakeStage(name="out", cpu_s=0.0005, item_bytes=MIB // 16)
    pipeline = Governed([read, out], cores=8, memory_limit=1100 * MIB)
    tune(pipeline, 60)
    assert pipeline.knobs.workers["decode"] > 16
    assert pipeline.snapshot().memory_used <= pipeline.memory_limit - pipeline.kept


def test_short_memory_is_given_back_at_once():
    stages = [
        FakeStage(name="decode", cpu_s=0.002, wait_s=0.05, item_bytes=16 * MIB),
        FakeStage(name="transform", cpu_s=0.001, item_bytes=4 * MIB),
    ]
    pipeline = FakePipeline(stages, workers={"decode": 16, "transform": 2}, memory_limit=480 * MIB)
    _, events = tune(pipeline, 20)
    assert "as memory is short" in of(events, "decision")[0]["reason"]["text"]
    assert pipeline.snapshot().memory_used <= pipeline.memory_limit


def test_a_dearer_transform_and_its_return_are_followed():
    read = FakeStage(name="decode", wait_s=0.01, cpu_s=0.001)
    cheap = FakeStage(name="transform", cpu_s=0.004)
    pipeline = FakePipeline([read, cheap], cores=16, step_s=0.002)
    controller, _ = tune(pipeline, 30)
    workers = [pipeline.knobs.workers["transform"]]
    for cpu_s in (0.016, 0.004):
        pipeline.stages[1] = replace(cheap, cpu_s=cpu_s)
        go_on(controller, pipeline, 25)
        workers.append(pipeline.knobs.workers["transform"])
    few, many, few_again = workers
    assert few < many > few_again


@pytest.mark.parametrize("factor", [1.6, 4.0])
def test_a_store_that_slows_down_is_answered_within_three_seconds(factor):
    pipeline = _store_bound(step_s=0.004)
    controller, _ = tune(pipeline, 60)
    read, decided = pipeline.stages[0], controller.decisions
    pipeline.stages[0] = replace(read, wait_s=factor * read.wait_s)
    slowed_at = pipeline.now
    while controller.decisions == decided and pipeline.now < slowed_at + 20:
        pipeline.advance(controller.wait_s)
        controller.step()
    assert pipeline.now - slowed_at <= 3.0


@pytest.mark.parametrize("scenario", shipped(), ids=lambda scenario: scenario.name)
def test_no_scenario_exceeds_its_memory(scenario):
    outcome = run(scenario, make("auto"))
    assert not outcome.killed
    assert outcome.peak_memory <= 1


@pytest.mark.parametrize("spread", [0.1, 0.2])
def test_noise_is_not_taken_for_change(spread):
    """All costs vary from second to second, as on a shared machine: at most two changes a minute."""

    class Noisy(FakePipeline):
        second = -1

        def advance(self, seconds):
            true = self.stages
            if int(self.now) != self.second:
                self.second = int(self.now)
                self.noise = [draw.lognormvariate(0, spread) for _ in true]
            self.stages = [
                replace(stage, cpu_s=noise * stage.cpu_s, wait_s=noise * stage.wait_s)
                for stage, noise in zip(true, self.noise, strict=True)
            ]
            super().advance(seconds)
            self.stages = true

    draw, pipeline = random.Random(0), Noisy(_store_bound().stages)
    controller, _ = tune(pipeline, 40)
    changes = controller.decisions
    go_on(controller, pipeline, 120)
    assert controller.decisions - changes <= 4


@pytest.mark.parametrize("start", [1, 3, 8, 16, 32])
def test_the_best_number_of_workers_is_found_from_both_sides(start):
    """Three workers are best. With 32, a row is over sixty times as dear as with three."""
    crowd = FakeStage(name="crowd", wait_s=0.06, bend=lambda n: 1 + 0.111 * n * (n - 1))
    stages = [FakeStage(name="decode", cpu_s=0.001), crowd, FakeStage(name="out", cpu_s=0.0005)]
    pipeline = FakePipeline(stages, cores=8, workers={"crowd": start})
    tune(pipeline, 60)
    assert _rate(pipeline) >= 0.9 * pipeline.best_rows_per_s
    assert 2 <= pipeline.knobs.workers["crowd"] <= 4


@pytest.mark.parametrize("cpu", [0.6, 0.05])
def test_a_stage_that_holds_no_lock_of_the_interpreter_stays_in_threads(cpu):
    """The lock is the store's, so processes would wait as long."""
    both = ("thread", "process")
    stage = SimStage(
        name="udf", cost_s=0.02, cpu=cpu, sigma=1.0, backends=both, process_start_s=0.5
    )
    scenario, seen = Scenario(name="no lock", seconds=120, stages=(stage,)), set()
    run(scenario, make("auto"), observe=lambda s, knobs, why: seen.add(knobs.backend["udf"]))
    assert seen == {"thread"}


BOTH = ("thread", "process")


def _stage(name, cost_s, **more):
    return SimStage(name=name, cost_s=cost_s, rows_per_item=4096, bytes_per_row=200, **more)


def neighbour(cores: float, taken: float, until: float) -> Scenario:
    """A neighbour that takes cores, and gives them back."""
    return Scenario(
        name="neighbour",
        seconds=180,
        machine=SimMachine(cores=cores, neighbour_cores=taken),
        stages=(
            _stage("decode", 0.02),
            _stage("udf", 0.1),
            _stage("more", 0.04),
            _stage("out", 0.002),
        ),
        changes=(ScheduledChange(at=until, key="machine.neighbour_cores", value=0),),
    )


def _outcome(scenario):
    outcome = run(scenario, make("auto"))
    assert not outcome.killed
    return outcome


@pytest.mark.parametrize(("cores", "taken", "until"), [(32, 24.0, 100), (8, 6.5, 40)])
def test_cores_that_a_neighbour_gives_back_are_used(cores, taken, until):
    outcome = _outcome(neighbour(cores, taken, until))
    assert outcome.rates[-1] > 2 * outcome.rates[until - 1]


def test_processes_of_380_mib_never_fill_the_memory():
    seen = []
    scenario = Scenario(
        name="heavy",
        seconds=60,
        machine=SimMachine(cores=16, memory_limit=2.6 * GIB),
        stages=(
            _stage("decode", 0.005),
            _stage("udf", 0.08, lock=0.8, backends=BOTH, process_bytes=380 * MIB),
            _stage("out", 0.002),
        ),
    )
    outcome = run(scenario, make("auto"), governor=False, observe=lambda s, k, r: seen.append(k))
    assert not outcome.killed
    assert outcome.peak_memory < 0.9
    assert seen[-1].backend["udf"] == "process"
    assert seen[-1].workers["udf"] <= 6
    assert outcome.rates[-1] > 3 * outcome.rates[1]


def test_a_stage_goes_on_in_its_threads_where_no_process_starts():
    scenario = Scenario(
        name="never",
        seconds=120,
        machine=SimMachine(cores=16, memory_limit=2.6 * GIB),
        stages=(
            _stage("decode", 0.005),
            _stage("udf", 0.08, lock=0.8, backends=BOTH, process_start_s=1000),
        ),
    )
    seen = []
    outcome = run(scenario, make("auto"), observe=lambda s, k, r: seen.append(k.backend["udf"]))
    assert min(outcome.rates[1:]) > 0.5 * max(outcome.rates), "its threads work all the time"
    assert "process" in seen, "it was tried"
