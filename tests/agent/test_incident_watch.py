"""What no decision caused is noticed once, whatever tunes the pipeline."""

import dataclasses

import pytest

from sluice.agent.controller import Controller
from sluice.agent.policies import make
from tests.agent.fake import FakePipeline, FakeStage
from tests.raises import assert_names


def _pipeline(workers=None):
    return FakePipeline(
        [FakeStage(name="decode", cpu_s=0.002, wait_s=0.02), FakeStage(name="udf", cpu_s=0.02)],
        cores=4,
        workers=workers,
    )


def _run(pipeline, ticks, events, policy="fixed", changes=()):
    """One controller's life; `changes` are (tick, what to do to the pipeline)."""
    controller = Controller(
        pipeline, make(policy), record=events.append, clock=lambda: pipeline.now
    )
    for tick in range(ticks):
        for at, change in changes:
            if at == tick:
                change(pipeline)
        controller.step()
        pipeline.advance(1.0)
    assert controller.frozen is None
    return controller


def _incidents(events):
    return [(e["what"], e["text"]) for e in events if e["kind"] == "incident"]


def _assert_incidents(events, *expected):
    """Asserts the kind of each incident, and the facts that its text names."""
    told = _incidents(events)
    assert [what for what, _ in told] == [what for what, *_ in expected]
    for (_, text), (_, *facts) in zip(told, expected, strict=True):
        assert_names(text, *facts)


def _dearer(pipeline, times=4.0):
    pipeline.stages[1] = dataclasses.replace(
        pipeline.stages[1], cpu_s=times * pipeline.stages[1].cpu_s
    )


@pytest.mark.parametrize("policy", ["fixed", "shadow", "auto"])
@pytest.mark.parametrize(
    ("name", "value", "what", "fact"),
    [
        ("cores", 1.0, "cores", "4 to 1"),
        ("memory_limit", 2**33, "memory", "16 GiB to 8 GiB"),
    ],
)
def test_other_limits_are_noticed_at_the_next_look(policy, name, value, what, fact):
    events = []
    change = (12, lambda pipeline: setattr(pipeline, name, value))
    _run(_pipeline(), 13, events, policy, [change])
    _assert_incidents(events, (what, fact))


def test_a_dearer_transform_is_noticed_within_four_looks_and_once():
    for ticks, noticed in ((40, 1), (24, 1), (20, 0)):
        events = []
        controller = _run(
            _pipeline({"decode": 4, "udf": 2}), ticks, events, changes=[(20, _dearer)]
        )
        assert controller.decisions == 0
        _assert_incidents(events, *noticed * [("workload", "4 times", "udf")])


@pytest.mark.parametrize("turned", ["decode", "udf"])
@pytest.mark.parametrize("times", [1.7, 4.0])
def test_a_change_of_workers_does_not_hide_a_dearer_stage(turned, times):
    """The transform becomes dearer two looks after somebody has turned a stage."""

    def turn(pipeline):
        pipeline.apply(pipeline.knobs.with_workers(**{turned: 3}))

    events = []
    dearer = (20, lambda pipeline: _dearer(pipeline, times))
    _run(_pipeline({"decode": 4, "udf": 2}), 30, events, changes=[(18, turn), dearer])
    (event,) = (e for e in events if e["kind"] == "incident")
    assert (event["what"], event["stage"]) == ("workload", "udf")


class Restarting(FakePipeline):
    restarts = 0

    def snapshot(self):
        return dataclasses.replace(super().snapshot(), restarts=self.restarts)


@pytest.mark.parametrize(
    ("died", "fact"),
    [([1], "a worker process died"), ([1, 2], "3 worker processes died")],
)
def test_worker_processes_that_died_are_told_once_ranks_have_counted_theirs(died, fact):
    def die(number):
        return lambda pipeline: setattr(pipeline, "restarts", pipeline.restarts + number)

    events, pipeline = [], Restarting([FakeStage(name="decode", cpu_s=0.002)], cores=4)
    _run(pipeline, 30, events, changes=[(12 + n, die(number)) for n, number in enumerate(died)])
    _assert_incidents(events, ("worker", fact))
