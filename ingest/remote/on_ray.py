"""Remote workers that a Ray cluster places: `RayCluster`.

Ray finds a host with a free core for each worker and reports when one is lost. Rows still come by Arrow Flight, as from
all other workers, and never through Ray's object store.

Only a child process imports Ray, because Ray's client ends its own process a minute after the cluster's head is lost. A
worker is an actor with one core, which starts the same process as `local:N` on its host. Ray does not restart actors.
The fleet replaces lost workers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from itertools import count
from typing import Any

from sluice.common import interpreter
from sluice.common.extras import install_command
from sluice.ingest.errors import warn
from sluice.ingest.remote.fleet import started
from sluice.ingest.remote.unit import RemoteError

_CONNECT_S, _LEAVE_S = 5.0, 5.0


class PlacedWorker(contextlib.AbstractContextManager[Any]):
    """A Ray actor with the interface of a started process (`RunningWorker`). It is its own `stdout`."""

    pid = 0
    """The id of the process on its host."""
    returncode: int | None = None

    def __init__(self, cluster: RayCluster, number: int):
        self._cluster = cluster
        self._number = number
        self.stdout = self
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """The child's messages about this worker: first that it listens, then that it has ended."""

    def readline(self) -> bytes:
        """Waits until Ray has placed the worker and it listens. Returns b"" if it has ended."""
        message = self.messages.get()
        if "line" not in message:
            self.messages.put(message)
            return b""
        self.pid = message["pid"]
        return bytes(message["line"].encode())

    def wait(self) -> int:
        self.returncode = int(self.messages.get()["ended"])
        return self.returncode

    def kill(self) -> None:
        """Ends the actor and its process."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
        self._cluster.tell({"number": self._number})

    def __exit__(self, *_: object) -> None:
        """Does nothing, because nothing is open."""


class RayCluster:
    """The cluster at `address`, the HOST:PORT for `ray start --address`. This host must be one of its nodes."""

    def __init__(self, address: str):
        self._address = address
        self._lock = threading.Lock()
        self._numbers = count()
        self._child: subprocess.Popen[bytes] | None = None
        self._placed: dict[int, PlacedWorker] = {}
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
            child = subprocess.Popen(
                interpreter.command(
                    "sluice.ingest.remote.on_ray:place", os.getpid(), self._address
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
            )
            assert child.stdout is not None
            message = json.loads(
                child.stdout.readline() or b'{"error": "Ray has ended its process"}'
            )
            if "error" in message:
                self._end(child)
                raise RuntimeError(message["error"])
        except (OSError, RuntimeError, ValueError) as error:
            raise RemoteError(
                f"{named}: this host is not a node of a Ray cluster at this address (ray start "
                f"--address={self._address} makes it one): {error}"
            ) from None
        self._child = child
        threading.Thread(target=self._listen, args=(child,), daemon=True, name="sluice-ray").start()

    def start(self, given: dict[str, Any]) -> PlacedWorker:
        """Places a worker. RemoteError if the child has ended and the cluster cannot be joined again."""
        with self._lock:
            if self._closed:
                raise RemoteError("the loader was closed")
            if self._child is None:
                self.join()
            number = next(self._numbers)
            worker = self._placed[number] = PlacedWorker(self, number)
        self.tell({"number": number, "given": given})
        return worker

    def tell(self, what: dict[str, Any]) -> None:
        """Sends a line to the child. Does nothing if the child has ended: `_listen` then answers for it."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._child is not None and self._child.stdin is not None:
                self._child.stdin.write(json.dumps(what).encode() + b"\n")
                self._child.stdin.flush()

    def close(self) -> None:
        """Ends the child, and with it all workers that it has placed."""
        with self._lock:
            self._closed, child = True, self._child
        if child is not None:
            self._end(child)

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        """Passes the child's messages to the workers. When the child has ended, so have its workers."""
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            with self._lock:
                worker = (
                    self._placed.pop(message["number"])
                    if "ended" in message
                    else self._placed[message["number"]]
                )
            worker.messages.put(message)
        self._end(child)
        with self._lock:
            lost = self._placed
            self._child = None
            self._placed = {}
            closed = self._closed
        if not closed:
            warn(
                f"the process that talks to Ray has ended (exit code {child.returncode}), and with it its "
                f"{len(lost)} workers; check the head of the cluster at {self._address}",
            )
        for worker in lost.values():
            worker.messages.put({"ended": -signal.SIGKILL})

    @staticmethod
    def _end(child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
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

    def announced(self) -> tuple[bytes, int]:
        """Returns the line that the worker prints once it listens, and its process id."""
        assert self._process.stdout is not None
        return self._process.stdout.readline(), self._process.pid

    def wait(self) -> int:
        """Waits for the worker to end and returns its exit code."""
        return self._process.wait()


def place(_owner: str, address: str) -> None:
    """The child's program: places and ends workers as lines of standard input ask, until the input ends.

    A line with `number` and `given` places a worker, and a line with `number` alone ends it. The child prints a line
    when a worker listens and when it has ended."""
    messages = os.dup(1)
    os.dup2(2, 1)  # other code's prints go to standard error
    lock = threading.Lock()

    def tell(**what: Any) -> None:
        with lock, contextlib.suppress(OSError):
            os.write(messages, json.dumps(what).encode() + b"\n")

    try:
        import ray

        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        tell(error=str(error).strip() or type(error).__name__)
        return
    tell(joined=True)
    host = ray.remote(WorkerHost).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
    actors: dict[int, Any] = {}

    def follow(number: int, actor: Any) -> None:
        code = -signal.SIGKILL  # assumed if its actor or host ended before it reported an exit code
        try:
            line, pid = ray.get(actor.announced.remote())
            if line:
                tell(number=number, line=line.decode(), pid=pid)
            code = int(ray.get(actor.wait.remote()))
        except ray.exceptions.RayError as error:
            if number in actors:
                warn(
                    f"Ray lost a worker: {str(error).strip().splitlines()[-1:]}",
                )
        end(number)
        tell(number=number, ended=code)

    def end(number: int) -> None:
        actor = actors.pop(number, None)
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    for line in sys.stdin.buffer:
        request = json.loads(line)
        number = request["number"]
        if "given" in request:
            actors[number] = host.remote(request["given"])
            threading.Thread(target=follow, args=(number, actors[number]), daemon=True).start()
        else:
            end(number)
    leaving = threading.Thread(target=ray.shutdown, daemon=True)  # it may wait for a lost head
    leaving.start()
    leaving.join(_LEAVE_S / 2)
    os._exit(0)
