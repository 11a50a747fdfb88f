"""`--inject`: what the text means, when it is due, and that it happens."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sluice.ingest.faults.faults import (
    KINDS,
    Fault,
    FaultError,
    Injector,
    due,
    parse,
    signal_workers,
)
from tests.raises import raises
from tests.run_program import run_program


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
    done = run_program("-c", SPIKE, check=True)
    said, taken, left = done.stdout.splitlines()
    assert said == "took 64 MiB"
    assert int(taken) > 60 * 2**20
    assert int(left) < 30 * 2**20
