"""A run's tuning from its first batch to its end: who turns the knobs, what is written, and that it always ends."""

import gc
import threading
import weakref

import pytest

from sluice.agent.tuning import TunedRun, policy_of
from tests.agent.fake import FakePipeline, store_bound
from tests.ingest.twin import eventually
from tests.product import KnobError, Policy, Reason, Run, RunFolder, make
from tests.raises import assert_names, raises


class Moving(FakePipeline):
    """A pipeline whose time passes as it is looked at."""

    def __init__(self):
        super().__init__(store_bound().stages)

    def snapshot(self):
        self.advance(1.0)
        return super().snapshot()


class Climbing(Policy):
    """A policy that asks for another worker each time, up to so many."""

    name = "climbing"

    def __init__(self, most=64):
        self.most, self.asked = most, 0

    def initial(self, limits, knobs):
        return knobs

    def decide(self, snapshot, state):
        self.asked += 1
        after = state.with_workers(decode=min(self.most, state.workers["decode"] + 1))
        return after, after, Reason(text="more is more", bottleneck="decode")


def started(pipeline, policy, **more):
    run = TunedRun(pipeline, policy, interval_s=0.001, **more)
    run.start()
    return run


def test_the_status_shows_the_start_and_the_settled_knobs():
    run = TunedRun(Moving(), Climbing(most=3), interval_s=0.001)
    assert_names(str(run.status), "climbing", "first batch", "decode=1")
    run.start()
    eventually(lambda: run.status.settled)
    run.close()
    status = run.status
    assert (status.mode, status.decisions, status.reason, status.bottleneck) == (
        "climbing",
        2,
        "more is more",
        "decode",
    )
    assert status.knobs.workers["decode"] == 3
    assert str(status) == repr(status)
    assert_names(
        str(status), "climbing", "settled", "decode=3 collate=1", "2 changes", "more is more"
    )


def test_knobs_that_were_set_by_hand_are_not_tuned_any_more():
    pipeline, policy = Moving(), Climbing()
    run = started(pipeline, policy)
    eventually(lambda: policy.asked > 2)
    run.turn(pipeline.knobs.with_workers(decode=7))
    asked, looks = policy.asked, run.controller.ticks
    eventually(lambda: run.controller.ticks > looks + 3)  # it still looks
    assert policy.asked == asked
    assert pipeline.knobs.workers["decode"] == 7
    assert_names(str(run.status), "not tuned", "by hand", "decode=7")
    with raises(KnobError, "outside 1 to 64"):
        run.turn(pipeline.knobs.with_workers(decode=99))
    run.close()


def test_a_run_that_never_began_leaves_a_folder_that_can_be_begun_anew(tmp_path):
    for _ in range(2):
        run = TunedRun(Moving(), make("auto"), folder=RunFolder.create(tmp_path, {"kind": "load"}))
        run.close()
    assert not Run.read(tmp_path).of("end")


def test_a_full_folder_is_reported_once_and_stops_nothing(tmp_path, capsys, monkeypatch):
    folder = RunFolder.create(tmp_path, {"kind": "load"})

    def full(_folder, _line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "metric", full)
    pipeline, policy = Moving(), Climbing()
    run = started(pipeline, policy, folder=folder)
    eventually(lambda: policy.asked > 5)
    run.close()
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert run.status.stopped is None


def test_it_ends_by_itself_when_it_is_abandoned_from_its_own_thread(tmp_path):
    """A garbage collector may run at any allocation, also in the middle of a decision."""
    ended, runs = threading.Event(), []

    class Leaving(Climbing):
        def decide(self, snapshot, state):
            if self.asked == 2:
                runs[0].abandon()
            return super().decide(snapshot, state)

    def outcome():
        ended.set()
        return {}

    folder = RunFolder.create(tmp_path, {"kind": "load"})
    runs.append(started(Moving(), Leaving(), folder=folder, outcome=outcome))
    assert ended.wait(60)
    runs[0].close()
    assert len(Run.read(tmp_path).of("end")) == 1
    gone = weakref.ref(runs.pop())
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("tuning", "fact"),
    [
        ("atuo", "'auto'"),
        (Climbing, "is no policy"),
    ],
)
def test_what_is_no_tuning_is_refused(tuning, fact):
    with raises(KnobError, fact):
        policy_of(tuning)
