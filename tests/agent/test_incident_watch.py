"""What no decision caused is noticed once, whatever tunes the pipeline."""

import dataclasses

import pytest

from tests.agent.fake import FakePipeline, FakeStage, controlled, look, of, store_bound
from tests.raises import assert_names


def _pipeline(workers=None):
    return FakePipeline(
        [FakeStage(name="decode", cpu_s=0.002, wait_s=0.02), FakeStage(name="udf", cpu_s=0.02)],
        cores=4,
        workers=workers,
    )


def _events(pipeline, looks, *changes, policy="fixed"):
    """What a controller records; `changes` are (look, what to do to the pipeline), in order."""
    controller, events = controlled(pipeline, policy)
    for at, change in changes:
        look(controller, pipeline, at - controller.ticks)
        change(pipeline)
    look(controller, pipeline, looks - controller.ticks)
    assert controller.frozen is None
    return events


def _assert_incidents(events, *expected):
    """Asserts the kind of each incident, and the facts that its text names."""
    told = of(events, "incident")
    assert [incident["what"] for incident in told] == [what for what, *_ in expected]
    for incident, (_, *facts) in zip(told, expected, strict=True):
        assert_names(incident["text"], *facts)


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
    change = (12, lambda pipeline: setattr(pipeline, name, value))
    _assert_incidents(_events(_pipeline(), 13, change, policy=policy), (what, fact))


def test_a_dearer_transform_is_noticed_within_four_looks_and_once():
    for looks, noticed in ((40, 1), (24, 1), (20, 0)):
        events = _events(_pipeline({"decode": 4, "udf": 2}), looks, (20, _dearer))
        assert not of(events, "decision")
        _assert_incidents(events, *noticed * [("workload", "4 times", "udf")])


@pytest.mark.parametrize("turned", ["decode", "udf"])
@pytest.mark.parametrize("times", [1.7, 4.0])
def test_a_change_of_workers_does_not_hide_a_dearer_stage(turned, times):
    """The transform becomes dearer two looks after somebody has turned a stage."""

    def turn(pipeline):
        pipeline.apply(pipeline.knobs.with_workers(**{turned: 3}))

    dearer = (20, lambda pipeline: _dearer(pipeline, times))
    events = _events(_pipeline({"decode": 4, "udf": 2}), 30, (18, turn), dearer)
    (event,) = of(events, "incident")
    assert (event["what"], event["stage"]) == ("workload", "udf")


@pytest.mark.parametrize(
    ("died", "fact"),
    [([1], "a worker process died"), ([1, 2], "3 worker processes died")],
)
def test_worker_processes_that_died_are_told_once_ranks_have_counted_theirs(died, fact):
    pipeline = store_bound()
    pipeline.told = {"restarts": 0}

    def die(number):
        return lambda _: pipeline.told.update(restarts=pipeline.told["restarts"] + number)

    changes = [(12 + n, die(number)) for n, number in enumerate(died)]
    _assert_incidents(_events(pipeline, 30, *changes), ("worker", fact))
