"""When a rank counts as standing still, by a clock of our own; and what the ranks then do, through torch's store."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from sluice.dlrm import liveness
from sluice.dlrm.liveness import Activity, Beat, Heartbeat, verdict
from sluice.dlrm.rank_exit import LostRanks, RankExit
from sluice.dlrm.ranks import await_ranks
from tests.raises import assert_names

BEAT = Beat(
    phase="was at batch 2",
    waits=False,
    age_s=0.0,
    limit_s=10.0,
    silence_s=10.0,
    process=1,
    parent=0,
    host="host1",
)
WAITS = replace(BEAT, phase="waited for the other ranks before batch 2", waits=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def activities(clock: Clock, ranks: int, *, steps: int = 5, step_s: float = 0.1) -> list[Activity]:
    """That have been through a few batches together."""
    activities = [Activity(most_s=120.0, clock=clock) for _ in range(ranks)]
    for number in range(steps):
        for activity in activities:
            activity.fetches(number, lambda: None)
            activity.meets(number)
            activity.steps(number)
        clock.now += step_s
    return activities


def judge(*beats):
    """The verdict on reports of ranks 0, 1 and so on: just sent, or each with its age."""
    aged = (beat if isinstance(beat, tuple) else (beat, 0.0) for beat in beats)
    return verdict(dict(enumerate(aged)))


def of(clock: Clock, **how: float) -> Activity:
    return activities(clock, 1, **how)[0]


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.1, 10.0), (1.0, 20.0), (30.0, 120.0)])
def test_the_limit_follows_the_slowest_step_of_late(step_s, limit_s):
    assert of(Clock(), step_s=step_s).step_limit_s == pytest.approx(limit_s)


def test_what_was_done_between_steps_makes_none_of_them_slower():
    clock = Clock()
    activity = of(clock)
    with activity.apart("saved a checkpoint"):
        clock.now += 300.0
        assert activity.beat().limit_s is None
        assert judge(activity.beat()) is None
    assert (activity.beat().phase, activity.beat().age_s) == ("was at batch 4", 0.0)
    activity.fetches(5, lambda: None)
    assert activity.step_limit_s == pytest.approx(10.0)


def test_before_steps_were_measured_and_between_passes_nothing_is_judged_by_them():
    clock = Clock()
    assert of(clock, steps=2).step_limit_s == 120.0
    first = Activity(most_s=4.0, clock=clock)
    first.fetches(1, lambda: None)
    clock.now += 119.0
    assert judge(first.beat()) is None, "a pipeline fills, kernels are compiled"
    clock.now += 2.0
    assert judge(first.beat()).ranks == (0,)
    activity = of(clock)
    activity.rests()
    clock.now += 1000.0
    assert judge(activity.beat()) is None


def test_a_wait_for_a_batch_is_no_standstill_while_the_loader_works():
    clock, work = Clock(), [0]
    activity = of(clock)
    activity.fetches(5, lambda: list(work))
    for _ in range(30):
        clock.now += 60.0
        work[0] += 1
        assert judge(activity.beat()) is None
    clock.now += 121.0
    verdict = judge(activity.beat())
    assert_names(verdict.text, "rank 0", "made no progress for 121 s", "batch 5", "120 s")


def test_a_silent_rank_is_named_with_its_last_phase_once_the_others_wait_for_it():
    stopped, other = (replace(BEAT, phase="waited for batch 7"), 10.5), replace(WAITS, age_s=10.5)
    verdict = judge(other, stopped)
    assert (verdict.ranks, verdict.silent) == ((1,), True)
    assert_names(verdict.text, "rank 1 on host1", "sent no heartbeat", "10 s", "batch 7")
    assert judge(replace(other, age_s=3.0), stopped) is None, "another rank gets somewhere"
    assert judge(replace(other, limit_s=None), stopped).ranks == (1,), "it writes the report, say"
    assert judge(BEAT, (replace(stopped[0], over=True), 99.0)) is None, "it has ended"
    assert judge(other, (replace(BEAT, limit_s=None, silence_s=120.0), 60.0)) is None


def test_a_rank_that_answers_and_gets_nowhere_is_the_one_that_the_others_wait_for():
    late = replace(BEAT, age_s=11.0, phase="was at batch 1")
    waiting = replace(WAITS, age_s=10.5)
    assert judge(waiting, late, waiting).ranks == (1,)
    assert judge(late, late, waiting).ranks == (0, 1), "who only waits is not to blame"
    assert judge(waiting, waiting).ranks == (0, 1), "unless all do"
    assert judge(waiting, replace(late, limit_s=None)) is None, "it may take its time"
    assert judge(waiting, replace(late, age_s=2.0)) is None


class Left(Exception):
    """Instead of the end of the process."""


def pulses_of(clock: Clock, count: int, killed: list[Beat] | None = None) -> list[Heartbeat]:
    def leave(code: int) -> None:
        assert code == 1
        raise Left

    store = dist.HashStore()
    kill = (killed if killed is not None else []).extend
    return [
        Heartbeat(
            store,
            rank,
            count,
            activity,
            RankExit(first=rank == 0, leave=leave),
            clock=clock,
            kill=kill,
            workers=lambda: "stacks of workers",
        )
        for rank, activity in enumerate(activities(clock, count))
    ]


def beat(pulses: list[Heartbeat]) -> list[int]:
    """Which of the ranks end, each with 1."""
    ended = []
    for number, pulse in enumerate(pulses):
        try:
            pulse.step()
        except Left:
            ended.append(number)
    return ended


def test_all_ranks_end_and_the_one_that_stands_still_shows_its_stacks(capfd):
    clock = Clock()
    pulses = pulses_of(clock, 3)
    for pulse in pulses[:2]:
        pulse.activity.fetches(9, lambda: None)
        pulse.activity.meets(9)
    for _ in range(10):
        assert beat(pulses) == []
        clock.now += 1.0
    clock.now += 1.0
    assert set(beat(pulses)) | set(beat(pulses)) == {0, 1, 2}
    out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert_names(error, "rank 2", "11 s", "batch 4", "10 s")
    assert err.count(error) == 3
    assert "stacks of workers" in err
    assert "in test_all_ranks_end" in err


def test_if_the_first_rank_is_silent_the_second_judges_and_reports(capfd):
    clock = Clock()
    killed: list[Beat] = []
    pulses = pulses_of(clock, 3, killed)
    assert beat(pulses) == []
    for _ in range(10):
        clock.now += 1.0
        assert beat(pulses[1:]) == []
    clock.now += 1.0
    assert set(beat(pulses[1:])) | set(beat(pulses[1:])) == {0, 1}
    error = json.loads(capfd.readouterr().out)["error"]
    assert_names(error, "rank 0", "sent no heartbeat")
    assert {signal_sent.process for signal_sent in killed} == {os.getpid()}


def test_a_silent_rank_of_another_host_is_not_looked_for_among_the_processes_of_this_one(
    monkeypatch,
):
    """In containers, torchrun and its ranks may have the same numbers on all hosts."""
    clock = Clock()
    killed: list[Beat] = []
    pulses = pulses_of(clock, 2, killed)
    monkeypatch.setattr(liveness, "_HOST", "host0")
    assert beat(pulses[:1]) == []
    monkeypatch.setattr(liveness, "_HOST", "host1")
    for _ in range(11):
        assert beat(pulses[1:]) == []
        clock.now += 1.0
    assert beat(pulses[1:]) == [0]
    assert killed == []


def test_a_rank_whose_store_does_not_answer_ends_once_it_gets_nowhere(capfd):
    clock = Clock()
    pulse = pulses_of(clock, 2)[1]
    for _ in range(20):  # training goes on: the store's host has much to do
        clock.now += 1.0
        pulse.activity.steps(9)
        pulse.look()
    for _ in range(10):
        clock.now += 1.0
        pulse.look()
    clock.now += 1.0
    with pytest.raises(Left):
        pulse.look()
    assert_names(capfd.readouterr().err, "rank 1 on ", "the first rank's host", "10 s", "batch 9")


def test_an_answer_of_the_store_or_a_sleep_of_the_machine_ends_no_rank():
    clock = Clock()
    pulse = pulses_of(clock, 3)[2]  # this one does not judge
    pulse.activity.steps(9)
    for _ in range(3):
        for _ in range(9):
            clock.now += 1.0
            pulse.look()
        pulse.step()
    clock.now += 5000.0
    pulse.look()


def test_ranks_that_do_not_start_are_named():
    """As of a host that is lost while its ranks start."""
    store = dist.HashStore()
    for rank in (2, 0):
        with pytest.raises(LostRanks) as missing:
            await_ranks(store, rank, 4, timedelta(milliseconds=10))
    assert_names(str(missing.value), "1, 3 of 4")
    for rank in (1, 3):
        store.set(f"sluice/started/{rank}", "host1")
    await_ranks(store, 0, 4)


@pytest.mark.parametrize("resting", [False, True])
def test_ranks_that_were_all_stopped_together_go_on_together(resting):
    clock = Clock()
    pulses = pulses_of(clock, 2)
    assert beat(pulses) + beat(pulses[:1]) == []
    clock.now += 5000.0  # a machine that slept
    for pulse in pulses:
        activity = pulse.activity
        activity.rests() if resting else activity.fetches(1, lambda: None)
        assert beat([pulse]) == []


def test_a_process_that_has_taken_the_number_of_a_silent_rank_lives(monkeypatch):
    monkeypatch.setattr(liveness.time, "sleep", lambda _: None)
    with subprocess.Popen(["sleep", "60"]) as other:
        liveness._end_silent([replace(BEAT, process=other.pid)])
        other.terminate()
    assert other.returncode == -signal.SIGTERM
