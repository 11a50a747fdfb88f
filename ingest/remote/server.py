"""A remote worker's Arrow Flight server: `WorkerServer`. It keeps only opened jobs. A repeated request gets the same
answer."""

from __future__ import annotations

import contextlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import flight

from sluice.common.errors import UsageError
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.ingest.remote.calls import Functions
from sluice.ingest.remote.maker import UnitMaker
from sluice.ingest.remote.messages import Arrays, Head, RemoteError, answer, cut
from sluice.ingest.remote.unit import RemoteJob, Unit, arrays_of

_JOBS = 8
"""How many jobs stay open. The least recently used one is closed first."""


class _Token(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets in only requests with the token."""

    def __init__(self, token: str):
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, Sequence[str | bytes]]) -> None:
        given = (headers.get("authorization") or [""])[0]
        if not hmac.compare_digest(
            given if isinstance(given, bytes) else given.encode(), self._wanted
        ):
            raise flight.FlightUnauthenticatedError("this is not the worker's token")


class WorkerServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers requests for units. It serves requests as soon as it is constructed."""

    def __init__(
        self,
        listen: str,
        token: str,
        open_job: Callable[[RemoteJob], UnitMaker],
        *,
        threads: int = 1,
        certificate: tuple[bytes, bytes] | None = None,
        permission: Permission = NOTHING,
    ):
        """- `listen` is HOST:PORT.
        - `open_job` opens the table for a job, or refuses the job.
        - `threads` units are made at once.
        - `certificate` is a TLS certificate and its key, both in PEM.
        - `permission` says which functions loaders may call."""
        self._functions = Functions(permission)
        self._open_job, self._threads = open_job, threads
        self._jobs: OrderedDict[str, UnitMaker] = OrderedDict()
        self._opening, self._free = threading.Lock(), threading.Semaphore(threads)
        try:
            super().__init__(
                f"{'grpc+tls' if certificate else 'grpc'}://{listen}",
                middleware={"token": _Token(token)},
                tls_certificates=[certificate] if certificate else None,
            )
        except Exception as error:  # Arrow has no specific class for this error
            raise UsageError(f"cannot listen at {listen}: {error}") from None
        self.address = f"{listen.rpartition(':')[0]}:{self.port}"

    def do_action(self, context: Any, action: Any) -> Iterator[pa.Buffer]:
        """Handles `read`, which returns the rows of a unit, `call`, which calls a function, and `ping`, which returns
        how many units are made at once."""
        if action.type == "ping":
            return iter([pa.py_buffer(str(self._threads).encode())])

        def act(head: Head, arrays: Arrays) -> tuple[Head, Arrays]:
            match action.type:
                case "read":
                    return self._read(head)
                case "call":
                    with self._free:
                        return self._functions.call(head, arrays)
            raise RemoteError(f"there is no action {action.type!r}")

        return cut(answer(action.body, act))

    def _read(self, head: Head) -> tuple[Head, Arrays]:
        """Returns the rows of a unit as one batch. One batch for each part would cost the loader twice as much."""
        job, unit = Unit.requested(head)
        maker = self.open(job)
        with self._free:
            arrays = arrays_of(maker.rows(unit), job)
        return {"throttled": maker.count_throttled()}, arrays

    def open(self, job: RemoteJob) -> UnitMaker:
        """Returns what makes the job's units. Opens the job if it is not open."""
        with contextlib.suppress(KeyError):  # an open job need not wait for the lock
            self._jobs.move_to_end(job.digest)
            return self._jobs[job.digest]
        with self._opening:
            if job.digest not in self._jobs:
                self._jobs[job.digest] = self._open_job(job)
            if len(self._jobs) > _JOBS:
                self._jobs.popitem(last=False)[1].close()
            return self._jobs[job.digest]

    def close(self) -> None:
        """Stops serving and closes the jobs' files."""
        self.shutdown()
        with self._opening:
            while self._jobs:
                self._jobs.popitem()[1].close()
