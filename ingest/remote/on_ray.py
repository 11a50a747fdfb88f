"""Remote workers that a Ray cluster places: `RayCluster`.

Ray finds a host with a free core for each worker. Everything else is as for other workers: rows come by Arrow Flight,
and the fleet replaces lost workers.

Only a child process imports Ray, because Ray's client ends its own process a minute after the cluster's head is lost. A
worker is an actor with one core, which starts the same process as `local:N` on its host. Ray does not restart actors.
The loader has one connection to the child for each worker. The worker ends when either side closes it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import threading
from typing import Any

from sluice.common import interpreter
from sluice.common.extras import install_command
from sluice.ingest.errors import warn
from sluice.ingest.remote.fleet import started
from sluice.ingest.remote.messages import RemoteError

_CONNECT_S, _LEAVE_S = 5.0, 5.0
_JOINED = b"joined"


class PlacedWorker(contextlib.AbstractContextManager[Any]):
    """A Ray actor with the interface of a started process (`RunningWorker`)."""

    returncode: int | None = None

    def __init__(self, connection: socket.socket):
        """The child writes two lines to the `connection`: what the worker prints once it listens, and its exit code."""
        self._connection = connection
        self.stdout = connection.makefile("rb")

    def wait(self) -> int:
        self.returncode = int(self.stdout.readline() or -signal.SIGKILL)
        return self.returncode

    def kill(self) -> None:
        """Ends the actor and its process."""
        self.returncode = self.returncode or -signal.SIGKILL
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.stdout.close()
        self._connection.close()


class RayCluster:
    """The cluster at `address`, the HOST:PORT for `ray start --address`. This host must be one of its nodes."""

    def __init__(self, address: str):
        self._address = address
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def join(self) -> None:
        """Starts the child and waits until it has joined the cluster. RemoteError if it cannot join."""
        named = f"workers='ray://{self._address}'"
        if importlib.util.find_spec("ray") is None:
            raise RemoteError(f"{named}: Ray is not installed here: {install_command('ray')}")
        host, _, port = self._address.rpartition(":")
        try:
            # Ray itself would retry for minutes.
            with socket.create_connection((host, int(port)), _CONNECT_S):
                pass
            self._control, theirs = socket.socketpair()
            with theirs:
                self._child = subprocess.Popen(
                    interpreter.command(
                        "sluice.ingest.remote.on_ray:place", os.getpid(), self._address
                    ),
                    stdin=theirs.fileno(),
                    stdout=2,
                    process_group=0,
                )
            answer = self._control.recv(2**16)
            if answer != _JOINED:
                self._end()
                raise RuntimeError(answer.decode() or "Ray has ended its process")
        except (OSError, RuntimeError, ValueError) as error:
            raise RemoteError(
                f"{named}: this host is not a node of a Ray cluster at this address (ray start "
                f"--address={self._address} makes it one): {error}"
            ) from None

    def start(self, given: dict[str, Any]) -> PlacedWorker:
        """Places a worker. RemoteError if the child has ended and the cluster cannot be joined again."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._closed:
                raise RemoteError("the loader was closed")
            if self._child is None or self._child.poll() is not None:
                if self._child is not None:
                    warn(
                        "the process that talks to Ray has ended (exit code "
                        f"{self._child.returncode}), and with it its workers; check the head of the "
                        f"cluster at {self._address}"
                    )
                    self._end()
                self.join()
            socket.send_fds(self._control, [b" "], [theirs.fileno()])
        ours.sendall(json.dumps(given).encode() + b"\n")
        return PlacedWorker(ours)

    def close(self) -> None:
        """Ends the child, and with it all workers that it has placed."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        assert child is not None
        self._control.close()
        try:
            child.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# ---- the child


class WorkerHost:
    """The actor's side: runs one worker process on its host."""

    def __init__(self, given: dict[str, Any]):
        import ray

        listen = f"{ray.util.get_node_ip_address()}:0"
        self._process = started({**given, "listen": listen})

    def announced(self) -> bytes:
        """Returns the line that the worker prints once it listens."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def wait(self) -> int:
        """Waits for the worker to end and returns its exit code."""
        return self._process.wait()


def place(_owner: str, address: str) -> None:
    """The child's program. It places a worker for each connection that it gets through standard input, until that
    ends."""
    control = socket.socket(fileno=0)
    try:
        import ray

        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        control.sendall((str(error).strip() or type(error).__name__).encode())
        return
    control.sendall(_JOINED)
    host = ray.remote(WorkerHost).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")

    def report(actor: Any, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the loader has closed the connection
            try:
                connection.sendall(ray.get(actor.announced.remote()) or b"\n")
                connection.sendall(b"%d\n" % ray.get(actor.wait.remote()))
            except ray.exceptions.RayError as error:
                if connection.fileno() >= 0:
                    warn(f"Ray lost a worker: {str(error).strip().splitlines()[-1:]}")
            finally:  # the loader waits for the end of the connection
                connection.shutdown(socket.SHUT_RDWR)

    def follow(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as given:
            actor = host.remote(json.loads(given.readline()))
            threading.Thread(target=report, args=(actor, connection), daemon=True).start()
            given.read()  # until the connection ends
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)

    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        connection = socket.socket(fileno=descriptors[0])
        threading.Thread(target=follow, args=(connection,), daemon=True).start()
    leaving = threading.Thread(target=ray.shutdown, daemon=True)  # it may wait for a lost head
    leaving.start()
    leaving.join(_LEAVE_S / 2)
    os._exit(0)
