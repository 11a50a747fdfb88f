"""The server's program on a real socket: what it prints, slow and broken clients, a port in use, and how it leaves."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from sluice.common.program import run
from sluice.common.settings import parse
from sluice.dlrm.serve import main
from sluice.dlrm.serving import served_model  # noqa: F401  torch makes a folder of its own: before a test is watched
from tests.dlrm.forks import Forks, Started
from tests.dlrm.serving.stub import GOOD, POST, body_of
from tests.product import ServerOptions, TableStore, pins
from tests.raises import assert_names
from tests.run_program import last_json

pytestmark = pytest.mark.slow


def test_the_server_of_a_pod_is_started_with_words_that_a_wheel_has(repo):
    """By the command of docs/launch.md."""
    page = (repo / "docs" / "launch.md").read_text()
    (command,) = re.findall(r"^ *command: (\[.*serve, .*\])$", page, re.M)
    words = yaml.safe_load(command)
    assert words[:2] == ["sluice", "serve"]
    assert parse(ServerOptions, argv=words[2:], prog="sluice serve").port == 8000


def test_it_listens_on_this_machine_alone_by_default():
    assert ServerOptions(run=Path("run")).host == "127.0.0.1"


def closing(body: bytes) -> bytes:
    """A request for predictions, after which the server closes the connection."""
    return POST + b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class Server:
    """The server's program, once it has said where it listens."""

    def __init__(self, program: Started) -> None:
        self.program = program
        self.url = program.until("serving").splitlines()[0].split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def raw(self, sent: bytes) -> bytes:
        """All that comes back until the server closes the connection."""
        with self.connection() as client:
            client.sendall(sent)
            return rest_of(client)

    def ended(self, signum: int) -> subprocess.CompletedProcess[str]:
        self.program.send(signum)
        return self.program.ended()


def rest_of(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(65536):
        received += part
    return received


@pytest.fixture
def serve(folder: Path, forks: Forks) -> Iterator[Callable[..., Server]]:
    """Starts a server with options."""
    with ExitStack() as stack:

        def started(*words: object) -> Server:
            words = ("dlrm.serve", folder / "run", "--port", 0, *words)
            return Server(stack.enter_context(forks.start(*words, tmp=folder)))

        yield started


def test_slow_broken_and_good_clients_and_a_clean_end(serve):
    server = serve("--timeout", "0.5")
    assert " as fp32." in server.program.err.read_text()
    late_head = server.raw(b"POST /predict HTTP/1.1\r\nhost: x\r\n")
    late_body = server.raw(POST + b"content-length: 100\r\n\r\n{")
    nothing = server.raw(b"")
    assert [reply.split(b"\r\n")[0] for reply in (late_head, late_body, nothing)] == [
        b"HTTP/1.1 408 Request Timeout"
    ] * 3
    assert b"the body did not come within 0.5 s" in late_body
    with httpx.Client(base_url=server.url, timeout=60) as http:
        # Two requests over one connection, a pause that is no fault between them.
        for _ in range(2):
            good = http.post("/predict", json={"rows": [{"I1": 3, "C1": "x"}, {}]})
            assert (good.status_code, len(good.json()["probabilities"])) == (200, 2)
    ended = server.ended(signal.SIGTERM)
    last = last_json(ended)
    assert ended.returncode == 0
    assert (last["statuses"], last["rows"], last["step"]) == ({"200": 2, "408": 1}, 4, 38)
    assert "Traceback" not in ended.stderr


def test_a_flood_costs_others_nothing(serve):
    """Under many large requests, the server says that it is well, answers what it can in time, and refuses the
    rest."""
    rows = b'{"rows":[%s]}' % b",".join([b"{}"] * 4096)
    server = serve("--timeout", 1.5)
    upgrade = server.raw(GOOD.replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost"))
    assert upgrade.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in upgrade

    requests = [closing(rows)] * 64
    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [pool.submit(server.raw, request) for request in requests]
        while_they_waited = 0
        while not all(answer.done() for answer in asked):
            assert httpx.get(f"{server.url}/health", timeout=60).json()["ok"]
            assert httpx.get(f"{server.url}/metrics", timeout=60).status_code == 200
            while_they_waited += not all(answer.done() for answer in asked)
        heard = [answer.result().partition(b"\r\n\r\n") for answer in asked]
    statuses = Counter(head.split()[1] for head, _, _ in heard)
    assert statuses.keys() <= {b"200", b"503"}
    assert statuses[b"200"] >= 1
    for head, _, body in heard:
        scored = json.loads(body)
        if head.split()[1] == b"503":
            assert b"retry-after: " in head
        else:
            assert len(scored["probabilities"]) == 4096
    assert while_they_waited  # how often says how many cores are free
    ended = server.ended(signal.SIGTERM)
    assert ended.returncode == 0
    assert last_json(ended)["rows"] == 4096 * statuses[b"200"]
    assert "Traceback" not in ended.stderr


def test_what_was_asked_before_sigterm_is_answered(folder, serve):
    """Half of a request's body is there when the signal comes, the rest after it. Until the end, the table's version
    that is served is pinned."""
    store = TableStore(folder / "table")
    server = serve()
    assert [pin.version for pin in pins(store, time.time())] == [0]
    body = body_of({"I1": 3})
    with server.connection() as client:
        client.sendall(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert client.recv(1000).startswith(b"HTTP/1.1 100")  # the server is within the request
        server.program.send(signal.SIGTERM)
        server.program.until("asked to leave")
        client.sendall(body)
        reply = rest_of(client)
    ended = server.program.ended()
    assert reply.startswith(b"HTTP/1.1 200")
    assert b"probabilities" in reply
    assert last_json(ended)["statuses"] == {"200": 1}
    assert not pins(store, time.time())


def test_hundreds_of_requests_leave_no_descriptor_no_thread_and_little_memory(serve):
    def held(process: psutil.Process) -> tuple[int, int, int]:
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    good = body_of(*[{"I1": 3, "C1": "a"}] * 20)
    server = serve()

    def ask(count: int) -> None:
        for number in range(count):
            body = good if number % 4 else b"{broken"
            reply = server.raw(closing(body))
            assert reply.startswith(b"HTTP/1.1 200" if number % 4 else b"HTTP/1.1 400")

    ask(100)
    process = psutil.Process(server.program.pids[0])
    files, threads, size = held(process)
    ask(200)
    end = time.monotonic() + 10
    while (now := held(process))[0] > files and time.monotonic() < end:
        time.sleep(0.05)  # the last connections may be open still
    files_now, threads_now, size_now = now
    assert files_now <= files
    pool = min(32, (os.cpu_count() or 1) + 4)
    assert threads_now <= threads + pool, "asyncio's pool may still grow up to its limit"
    assert size_now - size < 2**23


def test_a_wrong_start_is_one_line_and_2(folder, tmp_path, capsys):
    def started(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            run(main, argv=[str(w) for w in words])
        assert ended.value.code == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_names(started(folder / "run", "--port", port), f"127.0.0.1:{port}", "listened")
    assert "no checkpoint in" in started(tmp_path, "--port", 0)
    assert "--best" in started(tmp_path, "--port", 0, "--best")
    assert_names(started(tmp_path / "rum", "--port", 0), tmp_path / "rum", "does not exist")
    assert "0 to 65535" in started(folder / "run", "--port", 70000)
