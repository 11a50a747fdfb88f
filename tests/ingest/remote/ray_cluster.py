"""Workers that a real Ray cluster of two nodes places, restarts and scales: `make test-ray`.

    python -m tests.ingest.remote.ray_cluster

It has an environment of its own, which holds Ray, and a network namespace that has nothing but 127.0.0.1: Ray 2.60 puts
this host's address in that one's place (`resolve_ip_for_localhost` in `ray/_private/services.py`, which `ray start`
calls with its --node-ip-address), and listens where others can reach it."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.etl.common.program import run, say
from sluice.etl.synth.small_table import small_table
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.remote.unit import RemoteError
from tests.ingest.remote.test_processes import ended, hashes

_STARTS_S = 300


class Node:
    """One node with two cores, and all that it starts."""

    def __init__(self, *how: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *how, "--node-ip-address=127.0.0.1", "--num-cpus=2",
             "--object-store-memory=80000000", "--disable-usage-stats", "--block"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
def cluster(folder: Path) -> Any:
    """The address of a cluster, and its two nodes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as nodes:
        head = Node("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        nodes.callback(head.end)
        second = Node(f"--address=127.0.0.1:{port}")
        nodes.callback(second.end)
        import ray

        try:
            yield f"127.0.0.1:{port}", head, second
        finally:
            ray.shutdown()


def listening(*nodes: Node) -> set[str]:
    """The addresses at which processes of the nodes, and this one, listen."""
    found = set()
    for process in [psutil.Process(), *(one for node in nodes for one in node.family())]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    return found


def places_restarts_and_scales(table: Any, address: str, head: Node, second: Node) -> None:
    with BatchLoader(table, batch_size=160, epochs=5, reader="arrow") as loader:
        expected = hashes(loader, 5)
    with BatchLoader(table, batch_size=160, epochs=5, reader="arrow", workers=f"ray://{address}") as loader:
        fleet, pids = loader._remote._fleet, set()

        def use(workers: int) -> None:
            loader.apply(Knobs(workers={**loader.knobs.workers, "read": 2 * workers}, backend=loader.knobs.backend,
                               fused=loader.knobs.fused))

        def there(workers: int) -> list[int]:
            with fleet.changed:
                came = fleet.changed.wait_for(lambda: not fleet.starting and sum(
                    not w.leaving and w.process.returncode is None for w in fleet.workers) == workers, _STARTS_S)
                assert came, f"{len(fleet.workers)} of {workers} are there, {fleet.starting} are starting"
                now = [w.process.pid for w in fleet.workers]
                pids.update(now)
                return now

        def at(epoch: int, step: int) -> None:
            if (epoch, step) == (0, 1):
                there(1)
                use(4)
                now = there(4)
                at_nodes = [sum(p.pid in now for p in node.family()) for node in (head, second)]
                assert at_nodes == [2, 2], f"each node has two cores, and a worker takes one: {at_nodes}"
                beyond = [ip for ip in listening(head, second)
                          if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback]
                assert not beyond, beyond
                say("Ray has placed four workers on two nodes, and nothing listens beyond 127.0.0.1")
            if (epoch, step) == (1, 2):
                killed = there(4)[0]
                os.kill(killed, signal.SIGKILL)
                with fleet.changed:
                    assert fleet.changed.wait_for(
                        lambda: killed not in [w.process.pid for w in fleet.workers], _STARTS_S)
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
    say(f"five epochs with the local order; a worker took {stats['start_s']:.1f} s to start, "
        f"{stats['retries']} requests were made again")


def names_a_cluster_that_is_not_there(table: Any) -> None:
    with pytest.raises(RemoteError, match=r"ray://127\.0\.0\.1:1'.*ray start"):
        BatchLoader(table, batch_size=160, reader="arrow", workers="ray://127.0.0.1:1")


def main(_: list[str]) -> dict[str, Any]:
    assert [name for _, name in socket.if_nameindex()] == ["lo"], "this network has more than lo: use make test-ray"
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets below it have 107 letters at most
    try:
        table = small_table(folder / "clicks", rows=5000, files=3, row_group_rows=256)
        names_a_cluster_that_is_not_there(table)
        say("a cluster that is not there is named")
        with cluster(folder / "ray") as (address, head, second):
            places_restarts_and_scales(table, address, head, second)
    finally:
        shutil.rmtree(folder)
    return {"passed": True}


if __name__ == "__main__":
    run(main)
