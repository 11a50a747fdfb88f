"""`--inject`: what the text means, when it is due, and that it happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sluice.ingest.faults.faults import (
    KINDS,
    Fault,
    FaultError,
    Injector,
    corrupt_read,
    due,
    parse,
    share_cores,
    signal_workers,
    slow_store,
    slow_transforms,
    stall_store,
)
from tests.raises import assert_names, raises


def test_the_text_becomes_faults():
    text = "kill-worker@30s, stall-store=2.5s@10s,corrupt@part-3,memory-spike=64MiB@0.5s,stop-worker=all@1s"
    faults = parse(text)
    assert faults == (
        Fault("kill-worker", 30, 1),
        Fault("stall-store", 10, 2.5),
        Fault("corrupt", part="part-3"),
        Fault("memory-spike", 0.5, 64 * 2**20),
        Fault("stop-worker", 1, float("inf")),
    )
    assert [str(f) for f in faults] == [
        "kill-worker=1@30s",
        "stall-store=2.5s@10s",
        "corrupt@part-3",
        "memory-spike=64MiB@0.5s",
        "stop-worker=all@1s",
    ]
    assert parse(",".join(map(str, faults))) == faults
    assert parse("") == ()
    more = "slow-transform=4@1s,cores=0.5@2s,kill-worker=1@37.5%,slow-store=0.6s@3s"
    assert ",".join(map(str, parse(more))) == more


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("kill-worker", ("kill-worker@30s",)),
        ("kill-worker@30", ("'30'", "time")),
        ("kil-worker@3s", ("'kil-worker'", "'kill-worker'")),
        ("corrupt", ("corrupt@part-0",)),
        ("corrupt=2@x", ("strength",)),
        ("memory-spike=lots@1s", ("'lots'", "bytes")),
        ("stall-store=5@1s", ("'5'", "time")),
        ("stall-store=5%@1s", ("'5%'", "time")),
        ("kill-worker@%", ("'%'", "time")),
        ("kill-worker=0@1s", ("workers",)),
        ("@3s", ("''",)),
        ("slow-transform=all@1s", ("'all'", "times")),
        ("cores=0@1s", ("'0'", "cores")),
    ],
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


def test_each_fault_happens_once_and_is_recorded():
    now, did, events = [100.0], [], []

    def act(fault):
        did.append(fault.kind)
        return "done"

    injector = Injector(
        parse("kill-worker@5s,stall-store@2s"),
        dict.fromkeys(KINDS, act),
        clock=lambda: now[0],
        epochs=lambda: 0.0,
        record=events.append,
    )
    for now[0] in (100, 101, 102, 103, 110, 120):
        injector.step()
    assert did == ["stall-store", "kill-worker"]
    assert events[0] == {"kind": "fault", "fault": "stall-store=5s@2s", "did": "done"}
    assert injector.happened == ["kill-worker=1@5s", "stall-store=5s@2s"]
    assert injector.missed == []


def test_a_fault_without_a_victim_waits_for_one_and_is_missed_at_last():
    victims = []
    injector = Injector(
        parse("kill-worker@0s"),
        {"kill-worker": lambda _: victims.pop() if victims else None},
        clock=lambda: 0.0,
        epochs=lambda: 0.0,
        record=lambda _: None,
    )
    injector.step()
    assert injector.missed == ["kill-worker=1@0s"]
    victims.append("a worker")
    injector.step()
    assert injector.missed == []


def test_a_fault_that_a_run_cannot_have_is_refused_at_the_start():
    with raises(FaultError, "stall-store=5s@3s", "corrupt"):
        Injector(
            parse("stall-store@3s"),
            {"corrupt": lambda _: ""},
            clock=lambda: 0.0,
            epochs=lambda: 0.0,
            record=lambda _: None,
        )


@pytest.mark.parametrize(("strength", "hit"), [(1, 1), (2, 2), (float("inf"), 3)])
def test_workers_are_killed(strength, hit):
    workers = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)
    ]
    try:
        gone = subprocess.Popen(["true"])
        gone.wait()
        act = signal_workers(lambda: [gone.pid, *(w.pid for w in workers)], signal.SIGKILL)
        assert "SIGKILL" in act(Fault("kill-worker", strength=strength))
        assert [w.wait(60) for w in workers[:hit]] == [-signal.SIGKILL] * hit
        assert all(w.poll() is None for w in workers[hit:])
        assert signal_workers(list, signal.SIGKILL)(Fault("kill-worker", strength=1)) is None
    finally:
        for worker in workers:
            worker.communicate(b"\n")


def test_workers_are_stopped():
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    signal_workers(lambda: [worker.pid], signal.SIGSTOP)(Fault("stop-worker", strength=1))
    _, status = os.waitpid(worker.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    worker.kill()
    worker.communicate()


def test_stores_are_stalled_corrupted_and_slowed():
    did = []
    stall_store(did.append)(Fault("stall-store", strength=5))
    corrupt_read(did.append)(Fault("corrupt", part="part-1"))
    assert_names(slow_store(did.append)(Fault("slow-store", strength=0.6)), "read", "0.6 s")
    assert slow_store(did.append)(Fault("slow-store", strength=0)) == "as it was"
    assert did == [5, "part-1", 0.6, 0]


def test_transforms_are_slowed_and_cores_taken():
    did = []
    assert_names(slow_transforms(did.append)(Fault("slow-transform", strength=4)), "4 times")
    assert slow_transforms(did.append)(Fault("slow-transform", strength=1)) == "as it was"
    assert share_cores(lambda cores: f"{cores} left")(Fault("cores", strength=0.5)) == "0.5 left"
    assert did == [4, 1]


SPIKE = """
import os
from sluice.ingest.faults.faults import Fault, spike_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

ends, before = [], resident()
print(spike_memory(ends.append)(Fault("memory-spike", strength=64 * 2**20)))
print(resident() - before)
ends[0]()
print(resident() - before)
"""


def test_a_memory_spike_is_really_taken_and_given_back():
    """In a process of its own, whose memory no other test's thread changes."""
    done = subprocess.run([sys.executable, "-c", SPIKE], capture_output=True, text=True, check=True)
    said, taken, left = done.stdout.splitlines()
    assert said == "took 64 MiB"
    assert int(taken) > 60 * 2**20
    assert int(left) < 30 * 2**20
