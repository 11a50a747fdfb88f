"""The fleet of this host: who is started, and when."""

from __future__ import annotations

import json
import os
import queue
import threading

import pytest

from sluice.ingest.remote import fleet as fleet_file
from sluice.ingest.remote.fleet import LocalFleet


class Process:
    """Stands in for a worker's process, which says when it listens."""

    def __init__(self):
        announced, self._says = os.pipe()
        self.stdout, self.pid, self.returncode, self._over = os.fdopen(announced, "rb"), 0, None, threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stdout.close()

    def listens(self, port):
        os.write(self._says, (json.dumps({"listening": f"127.0.0.1:{port}"}) + "\n").encode())

    def wait(self):
        self._over.wait()
        return -9

    def kill(self):
        if self.returncode is None:
            self.returncode = -9
            os.close(self._says)
            self._over.set()


@pytest.fixture
def started(monkeypatch):
    """The processes that were started, as they come."""
    found = queue.Queue()

    def start(given):
        process = Process()
        found.put(process)
        return process

    monkeypatch.setattr(fleet_file, "started", start)
    monkeypatch.setattr(fleet_file, "Connection", lambda address, *_: type(
        "Connection", (), {"address": address, "close": lambda self: None})())
    return found


def test_no_more_workers_start_at_once_than_there_are_cores_and_the_first_need_not_wait_for_the_last(started):
    fleet = LocalFleet(7, None, "a table")
    fleet._at_once = 2
    fleet.use(14)

    processes = [started.get(timeout=60) for _ in range(2)]
    for number in range(7):
        processes[number].listens(number + 1)
        with fleet.changed:
            assert fleet.changed.wait_for(lambda there=number + 1: len(fleet.workers) == there, 60)
            assert fleet.starting == min(2, 6 - number)
        if len(processes) < 7:
            processes.append(started.get(timeout=60))
    fleet.close()
    assert all(process.returncode == -9 for process in processes)
    assert (started.empty(), fleet.workers) == (True, [])
