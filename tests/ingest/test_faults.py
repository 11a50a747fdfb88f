"""`--inject`: what the text means, when it is due, and that it happens."""

import os
import signal
import subprocess
import sys
import threading
from queue import Queue
from types import SimpleNamespace

import pytest

from sluice.ingest.faults.faults import Fault, FaultError, due, parse
from sluice.ingest.faults.injection import Injection, kill_workers
from tests.product import Machine
from tests.raises import MISTAKES, raises

CORES = os.sched_getaffinity(0)


def test_the_text_becomes_faults():
    text = "kill-worker@30s, stall-store=2.5s@10s,corrupt@part-3,kill-worker=all@1s"
    faults = parse(text)
    assert faults == (
        Fault("kill-worker", 30, 1),
        Fault("stall-store", 10, 2.5),
        Fault("corrupt", part="part-3"),
        Fault("kill-worker", 1, float("inf")),
    )
    assert [str(f) for f in faults] == [
        "kill-worker=1@30s",
        "stall-store=2.5s@10s",
        "corrupt@part-3",
        "kill-worker=all@1s",
    ]
    assert parse(",".join(map(str, faults))) == faults
    assert parse("") == ()
    more = "slow-transform=4@1s,cores=2@2s,kill-worker=1@37.5%,slow-store=0.6s@3s"
    assert ",".join(map(str, parse(more))) == more


@pytest.mark.parametrize(
    ("text", "facts"),
    MISTAKES["inject"],
)
def test_wrong_text_is_refused_by_name(text, facts):
    with raises(FaultError, text, *facts):
        parse(text)


def test_what_is_due():
    faults = parse("kill-worker@30s,stall-store@10s,corrupt@x")
    assert due(faults, 0, 0, ()) == [2]
    assert due(faults, 9.9, 100, {2}) == []
    assert due(faults, 60, 0, {2}) == [1, 0], "earliest first"
    assert due(faults, 60, 0, {0, 1, 2}) == []
    shares = parse("cores=1@150%,kill-worker@40%")
    assert due(shares, 1e9, 39, ()) == []
    assert due(shares, 0, 40, ()) == [1]
    assert due(shares, 0, 151, ()) == [1, 0]


def injection(text, record, now=(0.0,), **loader):
    """Faults of a loader of which only what is named here is there, and whose store can be stalled."""
    return Injection(
        parse(text),
        SimpleNamespace(epochs_loaded=0.0, pipeline=SimpleNamespace(**loader)),
        SimpleNamespace(faults=SimpleNamespace(stall=lambda _: None)),
        record,
        lambda: now[-1],
    )


def test_each_fault_happens_once_and_is_recorded():
    now, did, events = [100.0], [], []
    run = injection("slow-transform=2@5s,stall-store@2s", events.append, now, burden=did.append)
    for at in (100, 101, 102, 103, 110, 120):
        now.append(at)
        run.step()
    assert did == [2]
    assert events[0] == {
        "kind": "fault",
        "fault": "stall-store=5s@2s",
        "did": "reads wait for 5 s",
    }
    assert len(events) == 2
    happened = ["slow-transform=2@5s", "stall-store=5s@2s"]
    assert run.outcome == {"happened": happened, "missed": []}


def idle_processes(count):
    return [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        for _ in range(count)
    ]


def test_a_fault_without_a_victim_waits_for_one_and_is_missed_at_last():
    victims, events = [], []
    run = injection("kill-worker@0s", events.append, worker_pids=victims)
    run.step()
    assert run.outcome["missed"] == ["kill-worker=1@0s"]
    [worker] = idle_processes(1)
    victims.append(worker.pid)
    run.step()
    worker.communicate()
    assert worker.returncode == -signal.SIGKILL
    assert not run.outcome["missed"]


@pytest.mark.parametrize(("strength", "hit"), [(1, 1), (2, 2), (float("inf"), 3)])
def test_workers_are_killed(strength, hit):
    workers = idle_processes(3)
    try:
        gone = subprocess.Popen(["true"])
        gone.wait()
        everyone = [gone.pid, *(w.pid for w in workers)]
        assert "SIGKILL" in kill_workers(everyone, strength)
        assert [w.wait(60) for w in workers[:hit]] == [-signal.SIGKILL] * hit
        assert all(w.poll() is None for w in workers[hit:])
        assert kill_workers([], 1) is None
    finally:
        for worker in workers:
            worker.communicate(b"\n")


@pytest.mark.skipif(len(CORES) < 2, reason="takes two cores")
def test_all_threads_and_children_are_pinned_and_let_go_again():
    said, over, now, [child] = Queue(), threading.Event(), [0.0], idle_processes(1)
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        before = Machine().cores()
        with injection("cores=1@1s,cores=2@2s", said.put, now):
            for at, cores in ((1.0, 1), (2.0, 2)):
                now.append(at)
                assert said.get(timeout=60)["did"].startswith(f"{cores} core")
                everywhere = (os.getpid(), thread.native_id, child.pid)
                assert [len(os.sched_getaffinity(n)) for n in everywhere] == [cores] * 3
                assert Machine().cores() == cores
    finally:
        over.set()
        thread.join()
        child.communicate(b"\n")
    assert Machine().cores() == before
    assert os.sched_getaffinity(0) == CORES
