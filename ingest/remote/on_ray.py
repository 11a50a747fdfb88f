"""Workers that a Ray cluster places: `PlacedWorker`. Ray starts them where a core is free and says when one is lost;
what they read comes by Arrow Flight, as from all others, and never through Ray's object store.

A worker is an actor of one core that starts a process such as `local:N` has on its host. It is no part of a job that
outlives its loader, and Ray restarts none: the fleet does, as it does with its own processes."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from typing import Any

from sluice.ingest.remote.fleet import started
from sluice.ingest.remote.unit import RemoteError

_CONNECT_S = 5.0


class WorkerHost:
    """What an actor does, on whatever host it is."""

    def __init__(self, given: dict[str, Any]):
        import ray

        listen = f"{ray.util.get_node_ip_address()}:0"
        self._process = started({**given, "listen": listen})

    def announced(self) -> tuple[bytes, int]:
        """What the worker says once it listens, and the number of its process."""
        assert self._process.stdout is not None
        return self._process.stdout.readline(), self._process.pid

    def wait(self) -> int:
        """The exit code of the worker, once it has ended."""
        return self._process.wait()


class PlacedWorker(contextlib.AbstractContextManager[Any]):
    """An actor as the fleet sees a process that it has started, and as what that says once it listens."""

    pid = 0
    """Of the process on its host."""
    returncode: int | None = None

    def __init__(self, given: dict[str, Any]):
        import ray

        host = ray.remote(WorkerHost).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        self._ray, self._actor, self.stdout = ray, host.remote(given), self

    def readline(self) -> bytes:
        """Waits until Ray has found a place and the worker listens; nothing comes if it has ended."""
        try:
            line, self.pid = self._ray.get(self._actor.announced.remote())
        except self._ray.exceptions.RayError as error:
            if self.returncode is None:
                why = str(error).strip().splitlines()[-1:]
                print(f"sluice: Ray could not start a worker: {''.join(why)}", file=sys.stderr, flush=True)
            return b""
        return bytes(line)

    def wait(self) -> int:
        try:
            self.returncode = int(self._ray.get(self._actor.wait.remote()))
        except self._ray.exceptions.RayError:  # the actor has ended, or its host
            self.returncode = -signal.SIGKILL
        self.kill()
        return self.returncode

    def kill(self) -> None:
        """Ends the actor, and so its process."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


def join(address: str) -> None:
    """Makes this process one of the cluster at `address`, the HOST:PORT that `ray start --address` takes. This host is
    one of its nodes."""
    import ray

    if ray.is_initialized():
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S):  # Ray itself would try for minutes
            pass
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise RemoteError(f"workers='ray://{address}': no Ray cluster of which this host is a node (ray start "
                          f"--address={address} makes it one): {error}") from None
