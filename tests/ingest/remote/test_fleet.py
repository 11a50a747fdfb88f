"""The fleet of this host: who is started, and when."""

import contextlib
import json
import queue
import threading
from types import SimpleNamespace

import pytest

from sluice.ingest.remote import fleet as fleet_file
from sluice.ingest.remote.fleet import Fleet, StartedFleet
from tests.ingest.remote.conftest import wait_for


def test_the_least_busy_worker_is_asked_and_of_equal_ones_the_one_that_answered_longest_ago():
    now = [0.0]
    fleet = Fleet([SimpleNamespace(address=f"host:{n}") for n in range(3)], clock=lambda: now[0])
    for worker in fleet.workers:
        worker.threads = 2
    asked = []
    for _ in range(6):
        now[0] += 1
        asked.append(fleet.lease(()))
    assert set(asked[:3]) == set(asked[3:]) == set(fleet.workers)
    for worker in asked[1:3]:
        now[0] += 1
        fleet.give_back(worker)
    assert fleet.lease(()) is asked[1]
    assert fleet.lease([asked[2]]) in (asked[0], asked[1])
    for _ in range(2):
        fleet.give_back(asked[0], lost="it is gone")
    assert fleet.lease(()) is not asked[0], "it is lost, although it is the least busy one"
    asked[0].lost = ""
    assert fleet.lease(()) is asked[0]


def test_a_worker_is_charged_once_for_the_most_that_it_used(monkeypatch):
    fleet, charged = Fleet([SimpleNamespace(address="host:1")]), []
    fleet.charge, least = charged.append, fleet_file.WORKER_PROCESS_BYTES
    monkeypatch.setattr(Fleet, "here", {1: fleet.workers[0]})
    for used in (0, 5, 5, 3, 7):
        monkeypatch.setattr(
            fleet_file, "anonymous_bytes", lambda _, used=used: used and least + used
        )
        fleet.measure_memory()
    assert charged == [least, 5, 2]


class Process(contextlib.AbstractContextManager):
    """Stands in for a worker's process, which says when it listens."""

    returncode = None

    def __init__(self):
        self.stdout, self._lines, self._over = self, queue.Queue(), threading.Event()

    def __exit__(self, *_):
        pass

    def readline(self):
        return self._lines.get()

    def listens(self, port):
        self._lines.put(json.dumps({"listening": f"127.0.0.1:{port}", "pid": port}).encode())

    def wait(self):
        self._over.wait()
        return -9

    def kill(self):
        self.returncode = -9
        self._lines.put(b"")
        self._over.set()


@pytest.fixture
def started(monkeypatch):
    """The processes that were started, to which no connection is made."""
    monkeypatch.setattr(
        fleet_file,
        "Connection",
        lambda address, *_: type(
            "Connection", (), {"address": address, "close": lambda self: None}
        )(),
    )
    return queue.Queue()


def fleet_of(started) -> StartedFleet:
    def start(_given):
        process = Process()
        started.put(process)
        return process

    return StartedFleet(start, None, "a table", (), most=7, first=7, at_once=2, local=False)


@pytest.mark.parametrize(("target", "stay"), [(5, 3), (2, 0), (7, 4)])
def test_workers_that_stay_and_those_that_start_are_as_many_as_needed(started, target, stay):
    fleet = fleet_of(started)
    fleet.use(14)
    for number in range(4):
        started.get(timeout=60).listens(number + 1)
        wait_for(fleet, lambda there=number + 1: len(fleet.workers) == there)
    wait_for(fleet, lambda: fleet.starting == 2)
    fleet.use(2 * target)
    with fleet.changed:
        assert sum(not worker.leaving for worker in fleet.workers) == stay
    fleet.close()


def test_no_more_workers_start_at_once_than_may_nor_wait_for_the_last_and_they_answer_before_they_leave(
    started,
):
    fleet = fleet_of(started)
    fleet.use(14)

    processes = [started.get(timeout=60) for _ in range(2)]
    for number in range(7):
        processes[number].listens(number + 1)
        with fleet.changed:
            wait_for(fleet, lambda there=number + 1: len(fleet.workers) == there)
            assert fleet.starting == min(2, 6 - number)
        if len(processes) < 7:
            processes.append(started.get(timeout=60))
    with fleet.changed:
        busy = fleet.lease(())
    fleet.use(0)
    assert [p.returncode is None for p in processes] == [p is busy.process for p in processes], (
        "it answers first"
    )
    with fleet.changed:
        assert fleet.lease(()) is None, "and is asked for nothing more"
    fleet.give_back(busy)
    assert all(process.returncode == -9 for process in processes)
    fleet.close()
    assert (started.empty(), fleet.workers) == (True, [])


@pytest.mark.parametrize(
    "line", [b"junk", b"{}", b"[]", b'"a"', b'{"listening": 5, "pid": 1}', b"[" * 5000, b"\xff"]
)
def test_a_process_that_announces_nothing_of_use_counts_as_one_that_could_not_start(line):
    processes = []

    def start(_given):
        processes.append(Process())
        processes[-1]._lines.put(line + b"\n")
        return processes[-1]

    fleet = StartedFleet(start, None, "", [], most=1, first=1, at_once=1, local=True)
    fleet.use(2)
    wait_for(fleet, lambda: fleet.error is not None)
    assert "3 worker processes in a row could not start" in str(fleet.error)
    assert (fleet.starting, fleet.workers, len(processes)) == (0, [], 3)
    fleet.close()
