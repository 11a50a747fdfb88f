"""The client of remote workers: one that is slow, wrong, lost, late or unknown costs a request, never a row."""

import contextlib
import random
import shutil
import socket
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import flight

from sluice.ingest.errors import NoWorkerAnswers
from sluice.ingest.remote import client as client_file
from sluice.ingest.remote.client import RemoteClient, slow_after
from sluice.ingest.remote.connection import WorkerLost
from sluice.ingest.remote.messages import (
    RemoteError,
    WrongAnswer,
    answer,
    cut,
    decode,
    encode,
    read_answer,
)
from sluice.ingest.remote.unit import arrays_of
from sluice.ingest.remote.worker import main as worker_main
from tests.ingest.remote.conftest import (
    TOKEN,
    answering,
    halving_loader,
    job_and_units,
    remote_knobs,
    wait_for,
)
from tests.open_loader import open_loader
from tests.product import (
    Connection,
    Fleet,
    ParquetFiles,
    Permission,
    Unit,
    UnitMaker,
    UsageError,
    WorkerServer,
)
from tests.raises import assert_names, raises


@pytest.fixture(scope="module")
def job(table):
    return job_and_units(table)[0]


@pytest.fixture(scope="module")
def unit(table):
    return job_and_units(table)[1][3]


@pytest.fixture(scope="module")
def wanted(job, unit):
    """The request for the unit."""
    return unit.request(job)


@pytest.fixture
def right(table, job, unit, wanted):
    """A function that asks for the unit and checks its rows."""
    maker = UnitMaker(job, table)
    expected = maker.rows(unit)
    maker.close()

    def ask(client):
        assert client.get(wanted).equals(expected)

    return ask


@pytest.fixture
def made():
    """What makes a `RemoteClient` of a fleet. It is closed with the test."""
    with contextlib.ExitStack() as stack:

        def make(fleet, **how):
            client = RemoteClient(fleet, None, None, **how)
            stack.callback(client.close)
            return client, fleet

        yield make


@pytest.fixture
def client_of(made):
    def make(*servers, token=TOKEN, authority=None, **how):
        return made(
            Fleet(
                [
                    Connection(f"127.0.0.1:{server.port}", token, authority=authority)
                    for server in servers
                ]
            ),
            **how,
        )

    return make


def first(fleet):
    """Makes the first worker the one that is asked first: all others are busy."""
    for other in fleet.workers[1:]:
        other.asked += 1


class Held(WorkerServer):
    """A worker that answers when it may."""

    def __init__(self, *given, **how):
        self.asked, self.may_answer = threading.Event(), threading.Event()
        super().__init__(*given, **how)

    def do_action(self, context, action):
        if action.type == "read":
            self.asked.set()
            self.may_answer.wait(60)
        return super().do_action(context, action)


def test_when_the_first_is_slow_a_second_is_asked_and_the_late_answer_is_dropped(
    serving, worker, client_of, right, monkeypatch
):
    monkeypatch.setattr(client_file, "slow_after", lambda *_: 0.0)
    held = serving(Held)
    client, fleet = client_of(held, worker)
    first(fleet)
    right(client)
    assert held.asked.is_set()
    assert (client.counts["hedges"], client.counts["units"], client.counts["retries"]) == (1, 1, 0)
    held.may_answer.set()
    wait_for(fleet, lambda: client.counts["late"] == 1 and not fleet.workers[0].asked)
    assert client.counts["units"] == 1


def test_what_is_slow_is_judged_by_what_was_measured():
    assert slow_after([], 1000) == slow_after([1e-6] * 7, 1000) == 10.0
    assert slow_after([1e-3] * 8, 1000) == pytest.approx(4.0)
    assert slow_after([1e-9] * 64, 1000) == 0.5, "never for a hiccup"
    assert slow_after([*[1e-3] * 60, *[1.0] * 3], 1000) == pytest.approx(4.0), (
        "a few slow ones are no measure"
    )


def anew(body, **more):
    """An answer with other arrays, and the checksum that these have."""
    head, arrays = decode(body)
    return encode(head, {**arrays, **{name: change(arrays[name]) for name, change in more.items()}})


def flipped(body):
    damaged = bytearray(body.to_pybytes())
    damaged[70] ^= 1
    return pa.py_buffer(damaged)


def of_version_9(body):
    return pa.py_buffer(body.to_pybytes().replace(b'"package": "0', b'"package": "9'))


def without(body, name):
    head, arrays = decode(body)
    del arrays[name]
    return encode(head, arrays)


# What is sent in the place of an answer: damaged on its way, or with a checksum of its own.
DAMAGED = {
    "twice": lambda body, other: [body, body],
    "value": lambda body, other: [flipped(body)],
    "cut": lambda body, other: [body[:-9]],
    "none": lambda body, other: [],
}
LIES = {
    "another unit's rows": lambda body, other: [other],
    "another version's rows": lambda body, other: [of_version_9(body)],
    "fewer columns": lambda body, other: [without(body, "I1")],
    "fewer rows": lambda body, other: [anew(body, I1=lambda column: column[1:])],
    "more rows": lambda body, other: [anew(body, C1=lambda column: np.append(column, 1))],
    "another type": lambda body, other: [anew(body, I1=lambda column: column.astype(np.float64))],
    "another shape": lambda body, other: [anew(body, I1=lambda column: column.reshape(1, -1))],
}


class Wrong(WorkerServer):
    """A worker whose first answers are damaged on the way, or lies with checksums of their own."""

    def __init__(self, *given, **how):
        self.left = deque()
        super().__init__(*given, **how)

    def do_action(self, context, action):
        if not self.left or action.type != "read":
            return super().do_action(context, action)
        job, unit = Unit.requested(decode(action.body)[0])
        other = replace(unit, epoch=unit.epoch + 1, group=1 - unit.group % 2)

        def read(asked):
            arrays = arrays_of(self.open(job).rows(asked), job)
            return answer(asked.request(job).body, lambda *_: ({"throttled": 0}, arrays))

        return iter((DAMAGED | LIES)[self.left.popleft()](read(unit), read(other)))


def test_a_wrong_answer_is_asked_for_again_and_one_that_stays_wrong_is_an_error(
    serving, worker, client_of, right, wanted
):
    damaged = serving(Wrong)
    damaged.left.extend(DAMAGED)
    client, _ = client_of(damaged)
    with raises(RemoteError, "3 requests", "damaged"):
        client.get(wanted)
    right(client)
    assert client.counts["retries"] == 3
    damaged.left.extend(["value"] * 9)
    client, _ = client_of(damaged, worker)
    for _ in range(4):
        right(client)


def test_requests_that_a_workers_store_refused_are_counted_once(worker, table, named, monkeypatch):
    counts = {"throttled": 5}
    monkeypatch.setattr("sluice.ingest.read.reader.RowGroupReader.stats", lambda _: counts)
    with open_loader(table, batch_size=160, workers=named(worker)) as loader:
        deque(loader, maxlen=0)
        assert loader.snapshot().throttled == 10, "the loader's own, and the worker's"


@pytest.fixture
def got_elsewhere(serving, worker, client_of, right):
    """A function that asks a worker of a kind first, and gets the right rows from another one."""

    def get(kind, lies=()):
        bad = serving(kind)
        bad.left = deque(lies)
        client, fleet = client_of(bad, worker)
        first(fleet)
        right(client)
        return client, fleet, bad

    return get


@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_lies_is_named_and_its_rows_are_got_elsewhere(got_elsewhere, capsys, lie):
    client, _, liar = got_elsewhere(Wrong, [lie])
    assert client.counts["retries"] == 1
    assert_names(capsys.readouterr().err, f"worker 127.0.0.1:{liar.port}", "other workers")


@pytest.mark.parametrize("said", [None, -1, "7", 1.5, True, [], {}, 10**400])
def test_a_number_of_refusals_that_is_none_costs_a_request_and_ends_no_thread(got_elsewhere, said):
    def miscount(bodies):
        head, arrays = decode(*bodies)
        return iter([encode({**head, "throttled": said}, arrays)])

    client, fleet, miscounting = got_elsewhere(answering("read", miscount))
    assert_names(fleet.last_lost, f"worker 127.0.0.1:{miscounting.port}", "refused requests")
    assert (client.counts["throttled"], client.counts["retries"]) == (0, 1)


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_that_is_too_long_is_refused_before_it_is_taken(got_elsewhere, whole):
    """It is a thousand times as long as it may be, in pieces or in one."""
    sent = []

    def count(piece):
        sent.append(piece.size)
        return piece

    def send(_bodies):
        pieces = cut(pa.py_buffer(bytes(2**30)))
        return iter([pa.py_buffer(bytes(2**28))]) if whole else map(count, pieces)

    client, fleet, endless = got_elsewhere(answering("read", send))
    facts = () if whole else ("MiB that it may have",)
    assert_names(fleet.last_lost, f"worker 127.0.0.1:{endless.port}", *facts)
    assert client.counts["retries"] == 1
    assert sum(sent) < 2**26


@pytest.mark.parametrize(
    ("answers", "threads"),
    [
        ([b"3"], 3),
        ([b"1" + b"0" * 400], 1),
        ([b"-5"], 1),
        ([b"0"], 1),
        ([b"\xff"], 1),
        ([b""], 1),
        ([], 1),
        ([b"2"] * 3, 1),
    ],
)
def test_a_ping_that_answers_no_number_of_threads_shows_only_that_the_worker_runs(
    serving, client_of, answers, threads
):
    class Odd(WorkerServer):
        def do_action(self, context, action):
            return iter(answers)

    client, fleet = client_of(serving(Odd))
    [worker] = fleet.workers
    with fleet.changed:
        wait_for(fleet, lambda: worker.threads)
        assert worker.threads == threads
        assert fleet.core_s() >= 0
    assert worker.is_there
    assert client.stats()["workers"] == 1


def test_whatever_fails_in_a_thread_that_asks_ends_the_wait_for_it(made, wanted, monkeypatch):
    """Errors that no version knows: of client_of, of a ping, and of looking at the workers."""
    monkeypatch.setattr(client_file, "_QUIET_S", 0.001)

    class Broken(Mortal):
        pinged = 0

        def ask(self, request, timeout_s):
            raise RecursionError("in a library")

        def ping(self, within_s):
            Broken.pinged += 1
            raise RecursionError("in a library")

    client, fleet = made(Fleet([Broken(None)]))
    with fleet.changed:
        wait_for(fleet, lambda: Broken.pinged > 2)  # it is pinged again
        fleet.workers[0].silent = 0
    with raises(RecursionError, "in a library"):
        client.get(wanted)

    class Unmeasured(Fleet):
        def measure_memory(self):
            raise PermissionError("/proc")

    client, fleet = made(Unmeasured([]))
    with raises(PermissionError, "/proc"):
        client.get(wanted)


@pytest.mark.parametrize(
    "said",
    ["raised", None, "", "?", [], ["source"], [[], ""], ["nothing known", ""], {"source": ""}],
)
def test_whatever_a_worker_says_of_its_error_it_is_named(got_elsewhere, said):
    def mumble(bodies):
        if said == "raised":
            raise flight.FlightServerError("mumble", extra_info=b"?")
        head, _ = decode(*bodies)
        return iter([encode({**head, "failed": said}, {})])

    _, fleet, mumbling = got_elsewhere(answering("read", mumble))
    assert fleet.last_lost.startswith(f"worker 127.0.0.1:{mumbling.port}: ")


def test_lists_that_point_outside_of_their_values_are_refused(serve, tmp_path):
    """Otherwise the loader would read memory that is not the answer's."""
    path = str(tmp_path / "bags.parquet")
    bags = pa.array([[1, 2], [3], [], [4]] * 50, pa.list_(pa.int64()))
    pq.write_table(pa.table({"label": np.zeros(200, np.int8), "bag": bags}), path)
    source = ParquetFiles.open(path, {"label": "label", "id_list": "bag"})
    job, units = job_and_units(source, 40)

    def shifted(ends):
        return np.where(np.arange(ends.size) % (ends.size - 1), ends + 2**40, ends)

    def point(bodies):
        return iter([anew(*bodies, **{"bag\0ends": shifted})])

    server = serve(lambda job: UnitMaker(job, source), answering("read", point))
    with raises(WrongAnswer, f"worker 127.0.0.1:{server.port}", "Arrow"):
        Connection(server.address, TOKEN).ask(units[0].request(job, 2**20), 60)


def test_a_worker_keeps_the_files_of_its_last_eight_jobs_open(serve, job):
    closed = []
    server = serve(lambda job: SimpleNamespace(close=lambda: closed.append(job.split)))
    for number in range(10):
        server.open(replace(job, split=str(number)))
    assert closed == ["0", "1"]


def test_a_worker_that_ended_costs_a_retry(serving, worker, client_of, right, wanted):
    gone = serving()
    client, fleet = client_of(gone, worker)
    first(fleet)
    fleet.workers[0].connection.ask(wanted, 60)
    gone.shutdown()
    right(client)
    assert client.counts["retries"] == 1


def test_only_who_has_the_token_is_let_in(worker, client_of, wanted):
    for token in ("", "another", TOKEN + "x"):
        client, _ = client_of(worker, token=token)
        with raises(RemoteError, "worker 127.0.0.1", "token"):
            client.get(wanted)
    flights = flight.FlightClient(f"grpc://127.0.0.1:{worker.port}")
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(flights.do_action(flight.Action("ping", b"")))
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(flights.do_action(flight.Action("read", wanted.body)))


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"\xff\xfe", "tökén".encode(), b"a\nb", b"x" * 5000]
)
def test_a_token_that_no_header_can_hold_is_refused_by_both_sides(table, tmp_path, content):
    """Otherwise all requests would fail, as if the workers were lost."""
    path = tmp_path / "token"
    path.write_bytes(content)
    with raises(UsageError, str(path), "ASCII", "openssl"):
        worker_main(["--table", table.uri, "--listen", "127.0.0.1:0", "--token-file", str(path)])
    with raises(RemoteError, "workers=", str(path), "ASCII", "openssl"):
        open_loader(table, batch_size=160, workers=f"127.0.0.1:1?token={path}")


def test_hundreds_of_connections_that_say_nothing_hold_nobody_up(worker, client_of, right):
    with contextlib.ExitStack() as slow:
        for number in range(300):
            silent = socket.create_connection(("127.0.0.1", worker.port))
            slow.enter_context(silent)
            silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: 12 * (number % 3)])
        client, _ = client_of(worker)
        right(client)
        assert client.counts["retries"] == 0


def test_a_port_scanners_bytes_and_requests_that_are_none_harm_nobody(worker, client_of, right):
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), b""):
        with socket.create_connection(("127.0.0.1", worker.port)) as scanner:
            scanner.sendall(data)
    flights = flight.FlightClient(f"grpc://127.0.0.1:{worker.port}")
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    for action, body, error, fact in (
        *(
            ("read", junk, WrongAnswer, "version")
            for junk in (b"", b"\xff\xfe", b'{}\n["", ""]\n[0, 0, 0, 0, []]', b"[" * 3000)
        ),
        ("call", b"\x80\x04junk", WrongAnswer, "version"),
        ("shutdown", encode({}, {}).to_pybytes(), RemoteError, "no action 'shutdown'"),
    ):
        [said] = flights.do_action(flight.Action(action, body), options)
        with raises(error, fact):
            read_answer(said.body, body)
    client, _ = client_of(worker)
    right(client)


def test_a_host_that_takes_connections_and_says_nothing_is_noticed_within_two_seconds(
    worker, client_of, right, monkeypatch
):
    monkeypatch.setattr(client_file, "_FIRST_S", 120.0)
    with socket.create_server(("127.0.0.1", 0)) as dead:
        client, fleet = client_of(type("Dead", (), {"port": dead.getsockname()[1]}), worker)
        first(fleet)
        began = time.monotonic()
        right(client)
        assert fleet.workers[0].silent
        assert time.monotonic() - began < client_file._FIRST_S / 2, "not by its answer being late"
        assert (client.counts["hedges"], client.counts["retries"]) == (1, 0)
        for _ in range(3):  # and it is left alone
            right(client)
        assert client.counts["hedges"] == 1
    assert client_file._QUIET_S * 2 + client_file._PING_S <= 2


class Reachable(Held):
    """A worker that answers nothing, not even a ping, before it may."""

    def do_action(self, context, action):
        self.may_answer.wait(60)
        return super().do_action(context, action)


def test_while_no_worker_answers_a_loader_reads_the_rows_itself_and_logs_it(
    serving, named, table, monkeypatch, capsys
):
    """Also the function that workers were to call is called here. Then workers are asked again."""

    def values(loader):
        return [
            [part.tolist() for part in (batch.label, batch.values, batch.dense)] for batch in loader
        ]

    monkeypatch.setattr(client_file, "_NOBODY_S", 0.5)
    held = serving(
        Reachable,
        permission=Permission(functions=frozenset(["tests.ingest.remote.functions:halved"])),
    )
    with (
        halving_loader(table, 60) as here,
        halving_loader(table, 60, workers=named(held), knobs=remote_knobs(2)) as loader,
    ):
        expected = values(here)
        order = here.order_hash
        assert values(loader) == expected
        assert loader.order_hash == order
        assert (loader.remote["units"], loader.remote["calls"]) == (0, 0)
        [line] = [
            line_told
            for line_told in capsys.readouterr().err.splitlines()
            if "no worker" in line_told
        ]
        assert_names(line, "0.5 s")
        held.may_answer.set()
        fleet = loader._remote.fleet
        wait_for(fleet, lambda: fleet.workers[0].is_there)
        until = time.monotonic() + 60
        while not (loader.remote["units"] and loader.remote["calls"]):  # much was read ahead
            assert values(loader) == values(here)
            assert time.monotonic() < until, "no unit and no call was asked of the worker"
        assert_names(capsys.readouterr().err, "worker", "again")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two authorities, each with a certificate for 127.0.0.1 that it signed itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made = {}
    for name in ("ours", "another"):
        subprocess.run(
            (
                "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -addext"
                f" subjectAltName=IP:127.0.0.1 -subj /CN={name}"
                f" -keyout {folder}/{name}.key -out {folder}/{name}.pem"
            ).split(),
            check=True,
            capture_output=True,
        )
        made[name] = (folder / f"{name}.pem").read_bytes(), (folder / f"{name}.key").read_bytes()
    return made


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_from_end_to_end_and_a_wrong_certificate_by_name(
    serving, client_of, right, wanted, certificates
):
    ours, another = certificates["ours"], certificates["another"]
    server = serving(certificate=ours)
    client, _ = client_of(server, authority=ours[0])
    right(client)
    for other in (server, serving()):  # a certificate that nobody we know signed; none at all
        client, _ = client_of(other, authority=another[0])
        with raises(RemoteError, "worker 127.0.0.1", "certificate"):
            client.get(wanted)
    plain, fleet = client_of(server, clock=iter(range(0, 10**6, 10)).__next__)
    with pytest.raises(NoWorkerAnswers):
        plain.get(wanted)
    assert "&ca=FILE" in fleet.why_none_answers


class Mortal:
    """Stands in for a worker: `lost` says of each request whether it is killed by then."""

    address = "nowhere:1"

    def __init__(self, lost):
        self.lost = lost

    def ask(self, request, timeout_s):
        if self.lost(request):
            raise WorkerLost("killed")
        return pa.record_batch({"x": [1]}), 0

    def ping(self, within_s):
        return 1

    def close(self):
        pass


@pytest.fixture
def mortal(monkeypatch, made):
    """Asks four workers that can be killed, and come back."""
    monkeypatch.setattr(
        client_file, "_QUIET_S", 0.001
    )  # a lost worker is pinged before it is asked again
    return lambda lost: made(Fleet([Mortal(lost) for _ in range(4)]))


def test_kills_for_however_long_end_no_run_while_workers_answer(mortal, wanted):
    draw = random.Random(22)
    client, fleet = mortal(lambda _: draw.random() < 0.5)
    for _ in range(1000):
        assert client.get(wanted).num_rows == 1
    assert client.counts["units"] == 1000
    assert client.counts["retries"] > 800
    assert not any(worker.asked for worker in fleet.workers)


def test_a_unit_with_which_each_worker_is_lost_that_answered_before_ends_the_run(
    mortal, wanted, job, unit
):
    deadly = replace(unit, epoch=7).request(job)
    client, _ = mortal(lambda asked: asked is deadly)
    tries = client_file._TRIES[WorkerLost]
    with ThreadPoolExecutor(1) as threads:
        client.get(wanted)
        got = threads.submit(client.get, deadly)
        while not got.done():  # others go on, so workers come back
            client.get(wanted)
    with raises(RemoteError, f"{tries} requests", "killed"):
        got.result()
