"""Workers in this process, on a port of 127.0.0.1, for tests that need no process of its own."""

import contextlib
import threading

import pytest

from sluice import FeatureTable, Knobs, Transform
from sluice.ingest.remote.maker import job_of
from tests.open_loader import open_loader
from tests.product import ReadTask, Unit, UnitMaker, WorkerServer

TOKEN = "the token of these tests"


def job_and_units(source, batch_size=160):
    """A loader's job for workers, and the units of its first epoch."""
    with open_loader(source, batch_size=batch_size, reader="arrow") as loader:
        schedule, job = loader.plan.schedule(0), job_of(loader._input)
    return job, [Unit.of(ReadTask(schedule, read)) for read in schedule.reads]


def halving_loader(table, epochs, **how):
    """A loader with a transform that remote workers can do."""
    halved = Transform("tests.ingest.remote.functions:halved", "mine")
    return open_loader(table, batch_size=160, epochs=epochs, fill=0.0, transforms=[halved], **how)


def remote_knobs(each):
    """So many requests of each kind at once, all to remote workers."""
    return Knobs(
        workers={"decode": each, "mine": each}, backend={"decode": "remote", "mine": "remote"}
    )


def wait_for(fleet, holds):
    """Waits until something holds of a fleet."""
    with fleet.changed:
        assert fleet.changed.wait_for(holds, 60)


def answering(action, change):
    """A kind of worker whose answer to an action is what `change` makes of its own."""

    class Kind(WorkerServer):
        def do_action(self, context, asked):
            own = super().do_action(context, asked)
            return change(own) if asked.type == action else own

    return Kind


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

        return serve(open_job, kind, threads=2, **how)

    return make


@pytest.fixture
def worker(serving):
    return serving()


@pytest.fixture
def named(tmp_path):
    """A function that names servers as a loader's `workers`."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return lambda *servers: ",".join(server.address for server in servers) + f"?token={path}"
