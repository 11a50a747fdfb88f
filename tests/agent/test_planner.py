"""The planner on pipelines whose best setting is known by arithmetic."""

import itertools
import random
from dataclasses import replace

import pytest

from sluice.agent.lab.simulator.physics import SimStage
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.lab.simulator.scenario_json import shipped
from sluice.agent.planner_settings import PlannerSettings
from sluice.agent.policies import make
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.policies.planner.state import WorkerCap, caps_of_throttled
from tests.agent.fake import FakePipeline, FakeStage, decisions, go_on, tune

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


@pytest.mark.parametrize("settle_ticks", [2, 4])
def test_a_slow_store_gets_more_readers_than_there_are_cores_once_it_was_measured(settle_ticks):
    pipeline = _store_bound()
    before = _rate(pipeline)
    planner = Planner(PlannerSettings(settle_ticks=settle_ticks))
    controller, events = tune(pipeline, settle_ticks - 1, planner)
    assert not events
    go_on(controller, pipeline, 10)
    assert _rate(pipeline) > before
    assert pipeline.knobs.workers["decode"] > pipeline.cores
    assert "decode 1 → 16" in events[0]["reason"]["text"]
    assert events[0]["reason"]["bottleneck"] == "decode"


def test_a_store_that_refuses_requests_gets_no_more_of_them():
    pipeline, refused = _store_bound(), itertools.count()
    snapshot = pipeline.snapshot
    pipeline.snapshot = lambda: replace(snapshot(), throttled=next(refused))
    controller, _ = tune(pipeline, 30)
    assert pipeline.knobs.workers["decode"] == 1
    refused = itertools.repeat(next(refused))
    go_on(controller, pipeline, 420)
    assert pipeline.knobs.workers["decode"] > pipeline.cores


def test_the_stage_that_asks_a_store_keeps_its_workers_for_a_while_after_a_refusal():
    pipeline = _store_bound(workers={"decode": 3, "transform": 2})
    state = Planner().initial(pipeline.limits, pipeline.knobs)
    refused = replace(pipeline.snapshot(), throttled=1)
    assert caps_of_throttled(state, refused) == {}, "nothing is known of before"
    state = replace(state, last=replace(refused, throttled=0), tick=7)
    assert caps_of_throttled(state, replace(refused, throttled=0)) == {}
    caps = caps_of_throttled(state, refused)
    until = 7 + state.settings.cap_ticks
    assert caps == {"decode": WorkerCap(1, 3, until)}
    for tick, allowed in ((until - 0.5, (1, 3)), (until, (1, 64))):
        capped = replace(state, caps=caps, tick=tick)
        assert capped.allowed("decode") == allowed
        assert capped.allowed("transform") == (1, 64)


class RemoteReaders(FakePipeline):
    """Its readers ask remote workers, which take a while to start."""

    def __init__(self, delay_s, *, reports_starting=True, **more):
        stages = [
            FakeStage(name="decode", cpu_s=0.0001, wait_s=0.05, most=64),
            FakeStage(name="collate", cpu_s=0.0001),
        ]
        super().__init__(stages, cores=8, **more)
        self.delay_s, self.reports_starting = delay_s, reports_starting
        self.ready, self.due = self.knobs.workers["decode"], []

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
        fleet = {"workers": self.ready, "start_s": self.delay_s, "requests_a_core": 2}
        if self.reports_starting:
            fleet["starting"] = sum(count for _, count in self.due)
        return replace(super().snapshot(), elsewhere=fleet)


def test_remote_workers_are_judged_once_they_have_started():
    for delay_s in (6.0, 90.0):
        pipeline = RemoteReaders(delay_s, step_s=0.004)
        controller, _ = tune(pipeline, delay_s + 30)
        assert (pipeline.ready, controller.decisions) == (14, 1), (
            "what a batch in 4 ms needs, and a twentieth more"
        )
    pipeline = RemoteReaders(30.0, reports_starting=False, step_s=0.004)
    _, events = tune(pipeline, 60)
    assert pipeline.ready < 14, "a planner that cannot see them takes them back before they start"
    assert any("undone" in decision["reason"]["text"] for decision in decisions(events))


def test_remote_workers_outlast_a_pause_but_not_a_slower_trainer():
    pipeline = RemoteReaders(30.0, step_s=0.004)
    controller, _ = tune(pipeline, 100)
    for step_s, looks in ((4.0, 15), (0.004, 30)):
        pipeline.step_s = step_s
        go_on(controller, pipeline, looks)
        assert pipeline.knobs.workers["decode"] == 14
    pipeline.step_s = 0.05
    go_on(controller, pipeline, 100)
    assert pipeline.knobs.workers["decode"] <= 3


def _falling(workers):
    """Best at 3 workers, where 8 are 3.4 times slower."""
    rate = {1: 1.0, 2: 1.7, 3: 2.0, 4: 1.7, 5: 1.3, 6: 1.0, 7: 0.75}.get(workers, 2.0 / 3.4)
    return workers / rate


@pytest.mark.parametrize("start", [1, 8])
def test_a_stage_that_falls_with_more_workers_ends_at_its_peak(start):
    stages = [
        FakeStage(name="decode", cpu_s=0.001),
        FakeStage(name="udf", wait_s=0.02, bend=_falling),
        FakeStage(name="collate", cpu_s=0.001),
    ]
    pipeline = FakePipeline(stages, cores=16, workers={"udf": start})
    tune(pipeline, 100)
    assert abs(pipeline.knobs.workers["udf"] - 3) <= 1


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
    """Its governor keeps memory for work that is due. Readers beyond `admitted` wait for memory, and that slows all."""

    kept = 512 * MIB
    admitted = 24

    def snapshot(self):
        told = super().snapshot()
        free = self.memory_limit - self.kept - told.memory_used
        return replace(told, memory_free=max(0, free))


def test_readers_grow_into_the_memory_that_the_governor_admits():
    """The memory in use would allow more. Such a growth failed, and no number between was tried."""
    read = FakeStage(
        name="decode",
        cpu_s=0.001,
        wait_s=0.05,
        item_bytes=8 * MIB,
        bend=lambda n: 1.0 if n <= Governed.admitted else 2.5,
    )
    out = FakeStage(name="out", cpu_s=0.0005, item_bytes=MIB // 16)
    pipeline = Governed([read, out], cores=8, memory_limit=1100 * MIB)
    tune(pipeline, 60)
    most = max(knobs.workers["decode"] for knobs in pipeline.applied)
    assert 16 < pipeline.knobs.workers["decode"] <= most <= Governed.admitted


def test_short_memory_is_given_back_at_once():
    stages = [
        FakeStage(name="decode", cpu_s=0.002, wait_s=0.05, item_bytes=16 * MIB),
        FakeStage(name="transform", cpu_s=0.001, item_bytes=4 * MIB),
    ]
    pipeline = FakePipeline(stages, workers={"decode": 16, "transform": 2}, memory_limit=480 * MIB)
    _, events = tune(pipeline, 20)
    assert "memory" in [event["reason"]["bottleneck"] for event in decisions(events)]
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


FOUR_CONNECTIONS = [
    FakeStage(name="decode", wait_s=0.05, bend=lambda n: max(1.0, n / 4)),
    FakeStage(name="collate", cpu_s=0.001),
]
"""The store has no more. Useful time does not show it until it is tried."""


def test_a_change_that_brings_nothing_is_undone_and_not_repeated():
    controller, events = tune(FakePipeline(FOUR_CONNECTIONS), 120)
    assert any("undone" in event["reason"]["text"] for event in decisions(events))
    assert controller.decisions <= 8


@pytest.mark.parametrize("times", [1, 2])
def test_what_failed_may_be_tried_again_with_other_cores(times):
    """With the same cores, the planner also rests before its next try."""
    policy, pipeline = Planner(), FakePipeline(FOUR_CONNECTIONS)
    state = policy.initial(pipeline.limits, pipeline.knobs)
    while not state.caps:
        knobs, state, _ = policy.decide(pipeline.snapshot(), state)
        pipeline.apply(knobs)
        pipeline.advance(1.0)
    pipeline.cores *= times
    for _ in range(2):  # the first look after a change only waits for rows
        tried, state, _ = policy.decide(pipeline.snapshot(), state)
        pipeline.advance(1.0)
    assert bool(state.caps) == (tried == knobs) == (times == 1)


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
    outcome = run(scenario, make("planner"))
    assert not outcome.killed
    assert outcome.peak_memory <= 1


def test_noise_is_not_taken_for_change():
    """Costs that vary by 20 % from second to second, as on a shared machine: at most one change in 100 decisions."""

    class Noisy(FakePipeline):
        def advance(self, seconds):
            true = self.stages
            self.stages = [
                replace(
                    stage,
                    cpu_s=stage.cpu_s * draw.lognormvariate(0, 0.2),
                    wait_s=stage.wait_s * draw.lognormvariate(0, 0.2),
                )
                for stage in true
            ]
            super().advance(seconds)
            self.stages = true

    lives, changes = 3, 0
    for seed in range(lives):
        draw, pipeline = random.Random(seed), Noisy(_store_bound().stages)
        controller, _ = tune(pipeline, 40)
        changes -= controller.decisions
        go_on(controller, pipeline, 300)
        changes += controller.decisions
    assert changes <= lives * 300 / 100


def changes_of(bend, looks):
    """The changes to four readers, of which `bend(readers, seconds)` says how many times dearer a row becomes."""
    read = FakeStage(name="decode", wait_s=0.02, bend=lambda n: bend(n, pipeline.now))
    pipeline = FakePipeline([read, FakeStage(name="collate", cpu_s=0.001)], workers={"decode": 4})
    return [
        (made["after"]["workers"]["decode"], "undone" in made["reason"]["text"])
        for made in decisions(tune(pipeline, looks)[1])
    ]


@pytest.mark.parametrize(("until_s", "looks"), [(0.0, 5), (4.0, 6)])
def test_a_change_that_does_harm_is_taken_back_at_the_next_look(until_s, looks):
    """More than four readers bring a quarter more until that time, and then a third of the rows. The change comes at
    the second look, and its workers get two looks to start."""

    def bend(readers, now):
        if readers <= 4:
            return 1.0
        return readers / 5 if now < until_s else 3.0 * readers / 4

    assert changes_of(bend, looks)[-1] == (4, True)


def test_a_stage_that_becomes_dearer_while_its_growth_is_on_trial_does_not_end_the_trial_badly():
    """A row costs 2.3 times as much from the fourth second on. That was counted as the growth's own effect."""
    made = changes_of(lambda n, now: max(1, n / 8) ** 0.9 * (1 if now < 4 else 2.3), 25)
    assert [is_undone for _, is_undone in made[:3]] == [False] * 3


@pytest.mark.parametrize("cpu", [0.6, 0.05])
def test_a_stage_that_holds_no_lock_of_the_interpreter_stays_in_threads(cpu):
    """The lock is the store's, so processes would wait as long."""
    both = ("thread", "process")
    stage = SimStage(
        name="udf", cost_s=0.02, cpu=cpu, sigma=1.0, backends=both, process_start_s=0.5
    )
    scenario, seen = Scenario(name="no lock", seconds=120, stages=(stage,)), set()
    run(scenario, make("planner"), observe=lambda s, knobs, why: seen.add(knobs.backend["udf"]))
    assert seen == {"thread"}
