"""Workers in this process, on a port of 127.0.0.1, for tests that need no process of its own."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import threading
from types import SimpleNamespace

import pytest

from sluice.etl.table.table import FeatureTable
from sluice.ingest.remote import asking, fleet
from sluice.ingest.remote.maker import UnitMaker, job_of
from sluice.ingest.remote.server import WorkerServer
from sluice.ingest.remote.unit import Unit
from sluice.ingest.stages.shuffle import ReadTask
from tests.open_loader import open_loader

TOKEN = "the token of these tests"
_pids = itertools.count(2**23)  # no process of the machine has such a number


class Served(contextlib.AbstractContextManager):
    """Stands in for a worker's process: says that a server listens, and ends when it is killed."""

    def __init__(self, address):
        self.pid = next(_pids)
        self.stdout = io.BytesIO(json.dumps({"listening": address}).encode() + b"\n")
        self._over = threading.Event()

    def wait(self):
        self._over.wait()
        return -9

    def kill(self):
        self._over.set()

    def __exit__(self, *_):
        self.stdout.close()


def starting(patch, *addresses):
    """Returns what starts workers of fleets: servers at these addresses, in order, and then the last one again."""
    patch(fleet, "secrets", SimpleNamespace(token_hex=lambda _: TOKEN))
    left = itertools.chain(addresses, itertools.repeat(addresses[-1]))
    return lambda given: Served(next(left))


def name_servers(patch, *addresses):
    """Lets loaders find servers at these addresses in the place of processes. Returns their `workers`."""
    patch(asking, "started", starting(patch, *addresses))
    return f"local:{len(addresses)}"


def job_and_units(source, batch_size=160):
    """A loader's job for workers, and the units of its first epoch."""
    with open_loader(source, batch_size=batch_size, reader="arrow") as loader:
        schedule, job = loader.plan.schedule(0), job_of(loader._input)
    return job, [Unit.of(ReadTask(schedule, read)) for read in schedule.reads]


@pytest.fixture
def serve():
    """A function that makes a worker; all of them end with the test."""
    with contextlib.ExitStack() as stack:

        def make(open_job, kind=WorkerServer, **how):
            server = kind("127.0.0.1:0", TOKEN, open_job, **how)
            stack.callback(server.close)
            return server

        yield make
    # Flight calls a server on threads of its own, of which Python keeps a stand-in for ever once one asks for it.
    for ident, thread in list(threading._active.items()):
        if isinstance(thread, threading._DummyThread):
            del threading._active[ident]


@pytest.fixture
def serving(serve, table):
    """A function that makes a worker of a kind, which has the small table."""

    def make(kind=WorkerServer, **how):
        def open_job(job):
            return UnitMaker(job, FeatureTable.open(table.uri, int(job.version)))

        return serve(open_job, kind, **how)

    return make


@pytest.fixture
def worker(serving):
    return serving()


@pytest.fixture
def named(monkeypatch):
    """A function that names servers as a loader's `workers`."""
    return lambda *servers: name_servers(
        monkeypatch.setattr, *(server.address for server in servers)
    )
