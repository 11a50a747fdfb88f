"""Asking workers: one that is slow, wrong, lost, late or unknown costs a request, never a row."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque

import pyarrow as pa
import pytest
from pyarrow import flight

from sluice.etl.table.table import FeatureTable
from sluice.ingest.loader import BatchLoader
from sluice.ingest.remote import asking as asking_file
from sluice.ingest.remote.asking import Asking, slow_after
from sluice.ingest.remote.client import Connection
from sluice.ingest.remote.fleet import Fleet
from sluice.ingest.remote.maker import UnitMaker, job_of
from sluice.ingest.remote.server import WorkerServer
from sluice.ingest.remote.unit import RemoteError, Unit, checksum
from sluice.ingest.stages.pool import Closed
from sluice.ingest.stages.shuffle import ReadTask
from tests.ingest.remote.conftest import TOKEN


@pytest.fixture(scope="module")
def job(table):
    with BatchLoader(table, batch_size=160, reader="arrow") as loader:
        return job_of(table, plan=loader.plan, split="train", columns=loader._columns, reader="arrow", sample=None)


@pytest.fixture(scope="module")
def unit(table):
    with BatchLoader(table, batch_size=160, reader="arrow") as loader:
        schedule = loader.plan.schedule(0)
    return Unit.of(ReadTask(schedule, schedule.reads[3]))


@pytest.fixture
def open_job(table):
    return lambda job: UnitMaker(job, FeatureTable.open(table.uri))


def asking(job, *servers, token=TOKEN, **how):
    fleet = Fleet([Connection(f"127.0.0.1:{server.port}", token, job) for server in servers])
    return Asking(fleet, **how), fleet


def right(batches, open_job, job, unit):
    maker = open_job(job)
    assert [checksum(b) for b in batches] == [checksum(b) for b in maker.batches(unit)]
    maker.close()


class Held(WorkerServer):
    """A worker that answers when it may."""

    def __init__(self, *given, **how):
        self.asked, self.may_answer, self.answered = threading.Event(), threading.Event(), threading.Event()
        super().__init__(*given, **how)

    def do_get(self, context, ticket):
        self.asked.set()
        self.may_answer.wait(30)
        return super().do_get(context, ticket)


def test_when_the_first_is_slow_a_second_is_asked_and_the_late_answer_is_dropped(serve, worker, job, unit, open_job):
    held = serve(open_job, Held)
    asker, fleet = asking(job, held, worker, patience=lambda rates, rows: 0.0)
    right(asker.get(unit), open_job, job, unit)
    assert held.asked.is_set()
    assert (asker.counts["hedges"], asker.counts["units"], asker.counts["retries"]) == (1, 1, 0)
    held.may_answer.set()
    with fleet.changed:
        assert fleet.changed.wait_for(lambda: asker.counts["late"] == 1, 30)
    assert asker.counts["units"] == 1
    assert all(not w.asked for w in fleet.workers) or fleet.changed.wait_for(lambda: True)


def test_what_is_slow_is_judged_by_what_was_measured():
    assert slow_after([], 1000) == slow_after([1e-6] * 7, 1000) == 10.0
    assert slow_after([1e-3] * 8, 1000) == pytest.approx(4.0)
    assert slow_after([1e-9] * 64, 1000) == 0.5, "never for a hiccup"
    assert slow_after([*[1e-3] * 60, *[1.0] * 3], 1000) == pytest.approx(4.0), "a few slow ones are no measure"


class Wrong(WorkerServer):
    """A worker whose first answers are damaged on the way."""

    damages = ("value", "rows", "none", "many")

    def __init__(self, *given, **how):
        self.left = deque(self.damages)
        super().__init__(*given, **how)

    def do_get(self, context, ticket):
        if not self.left:
            return super().do_get(context, ticket)
        _, unit = Unit.from_request(ticket.ticket)
        [maker] = self._jobs.values()
        made = [(batch, checksum(batch).to_bytes(4, "little")) for batch in maker.batches(unit)]
        batch, summed = made[0]
        how = self.left.popleft()
        if how == "value":
            values = batch.column(0).to_numpy().copy()
            values[5] += 1
            made[0] = batch.set_column(0, batch.schema.field(0), pa.array(values)), summed
        elif how == "rows":
            made[0] = batch.slice(1), summed
        elif how == "none":
            made = []
        else:
            made += made
        return flight.GeneratorStream(maker.job.schema, iter(made))


def test_a_wrong_answer_is_asked_for_again_and_one_that_stays_wrong_is_an_error(serve, worker, job, unit, open_job):
    damaged = serve(open_job, Wrong)
    asker, _ = asking(job, damaged)
    with pytest.raises(RemoteError, match=r"asked for 3 times in vain; the last time: 0 batches where"):
        asker.get(unit)
    right(asker.get(unit), open_job, job, unit)  # of the fourth damage, and then no more
    assert asker.counts["retries"] == 3
    damaged.left.extend(["value"] * 9)
    asker, _ = asking(job, damaged, worker)
    for _ in range(4):
        right(asker.get(unit), open_job, job, unit)


def test_a_worker_that_ended_or_never_was_there_costs_a_retry(serve, worker, job, unit, open_job):
    gone = serve(open_job)
    asker, fleet = asking(job, gone, worker)
    right(fleet.workers[0].connection.ask(unit, 30), open_job, job, unit)
    gone.shutdown()
    right(asker.get(unit), open_job, job, unit)
    assert asker.counts["retries"] == 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = type("Nobody", (), {"port": free.getsockname()[1]})
    alone, _ = asking(job, nobody)
    asking_file_tries = dict(asking_file._TRIES)
    alone._fleet._clock = iter(range(0, 10**6, 2)).__next__  # its rest is over each time that one looks
    with pytest.raises(RemoteError, match=f"asked for {asking_file_tries[asking_file.WorkerLost]} times in vain"):
        alone.get(unit)


def test_whoever_waits_is_let_go_when_it_is_closed(serve, job, unit, open_job):
    held = serve(open_job, Held)
    asker, _ = asking(job, held)
    found = []

    def get():
        try:
            asker.get(unit)
        except Closed as error:
            found.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    assert held.asked.wait(30)
    asker.close()
    thread.join(30)
    assert len(found) == 1
    held.may_answer.set()


def test_only_who_has_the_token_is_let_in(worker, job, unit):
    for token in ("", "another", TOKEN + "x"):
        asker, _ = asking(job, worker, token=token)
        with pytest.raises(RemoteError, match=r"worker 127.0.0.1:\d+: refuses this token"):
            asker.get(unit)
    client = flight.FlightClient(f"grpc://127.0.0.1:{worker.port}")
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(client.do_action(flight.Action("open", job.to_json())))
    with pytest.raises(flight.FlightUnauthenticatedError):
        client.do_get(flight.Ticket(unit.request(job.digest)))


def test_a_port_scanners_bytes_and_requests_that_are_none_harm_nobody(worker, job, unit, open_job):
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(range(256)) * 64, b""):
        with socket.create_connection(("127.0.0.1", worker.port)) as scanner:
            scanner.sendall(data)
    client = flight.FlightClient(f"grpc://127.0.0.1:{worker.port}")
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    for ticket in (b"", b"[]", b"\xff\xfe", b'["no such job", 0, 0, 0, 0, []]', b"[" * 3000):
        with pytest.raises(flight.FlightServerError) as refused:
            client.do_get(flight.Ticket(ticket), options).read_all()
        assert json.loads(refused.value.extra_info)["kind"] in ("refused", "unknown")
    for action in (flight.Action("open", b"\x80\x04junk"), flight.Action("shutdown", b"")):
        with pytest.raises(flight.FlightServerError):
            list(client.do_action(action, options))
    asker, _ = asking(job, worker)
    right(asker.get(unit), open_job, job, unit)


def test_a_worker_that_has_forgotten_a_job_is_told_of_it_again(serve, job, unit, open_job):
    server = serve(open_job)
    asker, _ = asking(job, server)
    right(asker.get(unit), open_job, job, unit)
    server._jobs.clear()
    right(asker.get(unit), open_job, job, unit)
    assert asker.counts["retries"] == 0
