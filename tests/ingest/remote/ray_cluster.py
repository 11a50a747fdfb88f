"""Workers that a real Ray cluster of two nodes places, restarts and scales: `make test-ray`.

    python -m tests.ingest.remote.ray_cluster

It has an environment of its own, which holds Ray, and a network namespace that has nothing but 127.0.0.1: Ray 2.60 puts
this host's address in that one's place (`resolve_ip_for_localhost` in `ray/_private/services.py`, which `ray start`
calls with its --node-ip-address), and listens where others can reach it."""

import contextlib
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.small_table import small_table
from sluice import Knobs
from sluice.common.program import run
from sluice.ingest.remote.messages import RemoteError
from tests.ingest.remote.test_processes import ended, hashes
from tests.open_loader import open_loader
from tests.product import BatchLoader, say
from tests.raises import assert_names, raises

_STARTS_S = 300


class Node:
    """One node with two cores, and all that it starts."""

    def __init__(self, *how: str):
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                *how,
                "--node-ip-address=127.0.0.1",
                "--num-cpus=2",
                "--object-store-memory=80000000",
                "--disable-usage-stats",
                "--block",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        told = []
        for line in self.process.stdout:
            told.append(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError(f"the node ended with {self.process.wait()}: {''.join(told)}")

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def end(self) -> None:
        """Ends the node as a host ends: at once, with all that ran there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 2) -> Any:
    """The address of a cluster, its head, and the node that it has besides."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as started:
        head = Node("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        started.callback(head.end)
        second = Node(f"--address=127.0.0.1:{port}") if nodes > 1 else None
        if second is not None:
            started.callback(second.end)
        yield f"127.0.0.1:{port}", head, second


class Taken(contextlib.AbstractContextManager[Any]):
    """Another program that holds all cores of a cluster, until it is ended."""

    _PROGRAM = (
        "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)\n"
        "pg = ray.util.placement_group([{'CPU': 1}] * int(sys.argv[2]))\n"
        "assert pg.wait(60); print('taken', flush=True); sys.stdin.read()"
    )

    def __init__(self, address: str, cores: int):
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM, address, str(cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()).strip() != "taken":
            assert line, "the cores could not be taken"

    def free(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.free()


@contextlib.contextmanager
def lines_of_stderr() -> Any:
    """Keeps what this process and its children write to standard error meanwhile; yields what reads it."""
    with tempfile.TemporaryFile("w+") as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def read() -> str:
            return os.pread(kept.fileno(), 2**20, 0).decode(errors="replace")

        try:
            yield read
        finally:
            os.dup2(before, 2)
            os.close(before)
            sys.stderr.write(read())


def iter_hashes(loader: Any) -> Iterator[str]:
    """The order hash of one epoch after the other."""
    while True:
        for _ in loader:
            pass
        yield loader.order_hash


def opened(table: Any, epochs: int, address: str = "") -> BatchLoader:
    """A loader, with workers if it has the address of a cluster."""
    workers = f"ray://{address}" if address else None
    return open_loader(table, batch_size=160, epochs=epochs, workers=workers, reader="arrow")


def listening(*nodes: Node) -> set[str]:
    """The addresses at which processes of the nodes, and this one, listen."""
    addresses = set()
    for process in [psutil.Process(), *(child for node in nodes for child in node.family())]:
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses |= {
                connection.laddr.ip
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    return addresses


def places_restarts_and_scales(table: Any, address: str, head: Node, second: Node) -> None:
    with opened(table, 5) as loader:
        expected = hashes(loader, 5)
    with opened(table, 5, address) as loader:
        fleet, pids = loader._remote.fleet, set()

        def use(workers: int) -> None:
            loader.apply(
                Knobs(
                    workers={**loader.knobs.workers, "decode": 2 * workers},
                    backend=loader.knobs.backend,
                )
            )

        def there(workers: int) -> list[int]:
            with fleet.changed:
                came = fleet.changed.wait_for(
                    lambda: (
                        not fleet.starting
                        and sum(
                            not w.leaving and w.process.returncode is None for w in fleet.workers
                        )
                        == workers
                    ),
                    _STARTS_S,
                )
                assert came, (
                    f"{len(fleet.workers)} of {workers} are there, {fleet.starting} are starting"
                )
                now = [w.pid for w in fleet.workers]
                pids.update(now)
                return now

        def at(epoch: int, step: int) -> None:
            if (epoch, step) == (0, 1):
                there(1)
                use(4)
                now = there(4)
                at_nodes = [sum(p.pid in now for p in node.family()) for node in (head, second)]
                assert at_nodes == [2, 2], (
                    f"each node has two cores, and a worker takes one: {at_nodes}"
                )
                beyond = [
                    ip
                    for ip in listening(head, second)
                    if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback
                ]
                assert not beyond, beyond
                say(
                    "Ray has placed four workers on two nodes, and nothing listens beyond 127.0.0.1"
                )
            if (epoch, step) == (1, 2):
                killed = there(4)[0]
                os.kill(killed, signal.SIGKILL)
                with fleet.changed:
                    assert fleet.changed.wait_for(
                        lambda: killed not in [w.pid for w in fleet.workers], _STARTS_S
                    )
            if (epoch, step) == (2, 0):
                there(4)
                say("another has taken the place of one that was killed")
                use(1)
                there(1)
            if (epoch, step) == (2, 5):
                use(2)
                there(2)
                second.end()
                say("a node is lost, with its workers")

        assert hashes(loader, 5, at) == expected, "the order of some epoch differs"
        stats = loader.remote
        assert stats["start_s"] > 0, stats
        assert stats["core_s"] > 0, stats
    assert len(pids) >= 6, "four, the one in a killed one's place, and one that came again"
    assert all(ended(pid) for pid in pids), "no worker outlives its loader"
    say(
        f"five epochs with the local order; a worker took {stats['start_s']:.1f} s to start, "
        f"{stats['retries']} requests were made again"
    )


def reads_itself_where_no_core_is_free(table: Any, address: str, taken: Taken) -> None:
    """All cores are another job's: the loader says so and reads the rows. Once a core is free, a worker comes."""
    with opened(table, 400) as loader:
        expected = hashes(loader, 2)
    with (
        taken,
        lines_of_stderr() as said,
        opened(table, 400, address) as loader,
    ):
        assert hashes(loader, 2) == expected, "the order of some epoch differs"
        assert loader.remote["units"] == 0, loader.remote
        assert_names(said(), "free core", "Ray")
        say("without a free core the loader says so, and reads the rows itself")
        taken.free()
        fleet = loader._remote.fleet
        with fleet.changed:
            assert fleet.changed.wait_for(lambda: bool(fleet.workers), _STARTS_S), "no worker came"
        for _ in range(300):
            if loader.remote["units"]:
                break
            for _ in loader:
                pass
        assert loader.remote["units"] > 0, loader.remote
    say("once a core is free, a worker comes and is asked")


def outlives_the_head(table: Any, head: Node, address: str) -> None:
    """The head is killed while rows are read. After a minute Ray's client ends its process, the other node ends, and
    with it the workers; the loader goes on alone, in the same order."""
    with opened(table, 10_000) as loader:
        twin = iter_hashes(loader)
        with (
            lines_of_stderr() as said,
            opened(table, 10_000, address) as other,
        ):
            fleet, hashes = other._remote.fleet, iter_hashes(other)
            assert next(hashes) == next(twin)
            with fleet.changed:
                assert fleet.changed.wait_for(lambda: bool(fleet.workers), _STARTS_S), (
                    "no worker came"
                )
                pids = [w.pid for w in fleet.workers]
            client = fleet.start.__self__._child
            head.end()
            began = time.monotonic()
            lines = "reads the rows itself", "has ended", f"ray start --address={address}"
            while client.poll() is None or fleet.workers or any(s not in said() for s in lines):
                assert next(hashes) == next(twin), "the order of some epoch differs"
                assert time.monotonic() - began < _STARTS_S, said()
            for _ in range(3):
                assert next(hashes) == next(twin), "the order of some epoch differs"
    assert all(ended(pid) for pid in pids), "no worker outlives its loader"
    say(
        f"the head was killed: Ray's client ended after {time.monotonic() - began:.0f} s, and the loader went on"
    )


def comes_back(table: Any, folder: Path) -> None:
    """Ray's client has ended, and the cluster is there still."""
    with (
        cluster(folder, nodes=1) as (address, _, _),
        lines_of_stderr() as said,
        opened(table, 10_000, address) as loader,
    ):
        fleet, hashes = loader._remote.fleet, iter_hashes(loader)
        client = fleet.start.__self__._child
        next(hashes)
        client.kill()  # as Ray's own code ends it
        with fleet.changed:
            assert fleet.changed.wait_for(
                lambda: fleet.start.__self__._child not in (client, None) and bool(fleet.workers),
                _STARTS_S,
            ), said()
        before = loader.remote["units"]
        while loader.remote["units"] == before:
            next(hashes)
    say("another client of Ray's takes the place of one that was killed, and has workers placed")


def names_a_cluster_that_is_not_there(table: Any) -> None:
    with raises(RemoteError, "ray://127.0.0.1:1", "ray start"):
        opened(table, 1, "127.0.0.1:1")


def main(_: list[str]) -> dict[str, Any]:
    assert [name for _, name in socket.if_nameindex()] == ["lo"], (
        "this network has more than lo: use make test-ray"
    )
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    folder = Path(
        tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    )  # paths of sockets below it have 107 letters at most
    try:
        table = small_table(folder / "clicks", rows=5000, files=3, row_group_rows=256)
        names_a_cluster_that_is_not_there(table)
        say("a cluster that is not there is named")
        with cluster(folder / "ray") as (address, head, second):
            places_restarts_and_scales(table, address, head, second)
        with cluster(folder / "cores", nodes=1) as (address, _, _):
            reads_itself_where_no_core_is_free(table, address, Taken(address, 2))
        comes_back(table, folder / "client")
        with cluster(folder / "head") as (address, head, _):
            outlives_the_head(table, head, address)
    finally:
        shutil.rmtree(folder)
    return {"passed": True}


if __name__ == "__main__":
    run(main)
