"""A worker's Arrow Flight server: `WorkerServer`. It holds nothing but opened jobs; who asks again gets the same."""

from __future__ import annotations

import hmac
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import flight

from sluice.etl.common.errors import UsageError
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.ingest.columns import ColumnError
from sluice.ingest.read.reader import SourceError
from sluice.ingest.remote.calls import Functions, WrongAnswer
from sluice.ingest.remote.maker import UnitMaker
from sluice.ingest.remote.shared import SharedUnits
from sluice.ingest.remote.unit import RemoteJob, Unit, checksum

_JOBS = 8
"""How many jobs stay opened; the one that was asked for longest ago is opened anew."""
UNKNOWN, SOURCE, COLUMN, REFUSED, FAILED, DAMAGED = "unknown", "source", "column", "refused", "failed", "damaged"
"""The kinds of errors that are sent: who asks opens the job, asks again or another worker, or stops."""


class _Token(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets in only who has the token."""

    def __init__(self, token: str):
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, Sequence[str | bytes]]) -> None:
        given = (headers.get("authorization") or [""])[0]
        if not hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._wanted):
            raise flight.FlightUnauthenticatedError("this is not the worker's token")


class WorkerServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers requests for units. It serves as soon as it is made."""

    def __init__(self, location: str, token: str, open_job: Callable[[RemoteJob], UnitMaker], *, threads: int = 1,
                 certificate: tuple[bytes, bytes] | None = None, permission: Permission = NOTHING,
                 share_bytes: int = 2**28):
        """`open_job` opens the table for a job, or refuses it. So many units are made at once. `certificate` is TLS's,
        with its key, both in PEM. The functions that loaders may call need the `permission`. So many bytes of units are
        kept for other loaders of a job."""
        self._shared, self._functions = SharedUnits(share_bytes), Functions(permission)
        self._open_job, self._threads = open_job, threads
        self._jobs: OrderedDict[str, UnitMaker] = OrderedDict()
        self._opening, self._lock, self._free = threading.Lock(), threading.Lock(), threading.Semaphore(threads)
        super().__init__(location, middleware={"token": _Token(token)},
                         tls_certificates=[certificate] if certificate else None)

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """`open` opens a job; its answer says how many units this worker makes at once. `call` calls a function,
        `ping` does nothing."""
        if action.type == "ping":
            return iter([])
        if action.type not in ("open", "call"):
            raise _error(REFUSED, f"there is no action {action.type!r}")
        try:
            if action.type == "call":
                with self._free:
                    return iter([self._functions.answer(action.body)])
            job = RemoteJob.from_json(action.body.to_pybytes())
            with self._opening:
                if self._known(job.digest) is None:
                    self._keep(self._open_job(job))
        except Exception as error:
            raise _told(error) from None
        return iter([json.dumps({"threads": self._threads}).encode()])

    def do_get(self, context: Any, ticket: Any) -> Any:
        """The batches of a unit, each with its checksum."""
        try:
            job, rank, loader, unit = Unit.from_request(ticket.ticket)
        except Exception as error:
            raise _told(error) from None
        maker = self._known(job)
        if maker is None:
            raise _error(UNKNOWN, "this worker has not opened the job, or no more")
        made = self._shared.parts(f"{job} {rank}", loader, unit.key, lambda: self._made(maker, unit))
        return flight.GeneratorStream(maker.job.schema, itertools.takewhile(lambda _: not context.is_cancelled(), made))

    def _made(self, maker: UnitMaker, unit: Unit) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        batches = maker.batches(unit)
        while True:
            with self._free:  # not while the last batch is on its way
                try:
                    batch = next(batches, None)
                    summed = None if batch is None else checksum(batch)
                except Exception as error:
                    raise _told(error) from None
            if batch is None or summed is None:
                return
            yield batch, summed.to_bytes(4, "little")

    def close(self) -> None:
        """Ends serving, and closes the jobs' files."""
        self.shutdown()
        with self._lock:
            makers = list(self._jobs.values())
            self._jobs.clear()
        for maker in makers:
            maker.close()

    def _known(self, job: str) -> UnitMaker | None:
        with self._lock:
            if job in self._jobs:
                self._jobs.move_to_end(job)
            return self._jobs.get(job)

    def _keep(self, maker: UnitMaker) -> None:
        with self._lock:
            self._jobs[maker.job.digest] = maker
            oldest = self._jobs.popitem(last=False)[1] if len(self._jobs) > _JOBS else None
        if oldest is not None:
            oldest.close()


def _told(error: Exception) -> flight.FlightServerError:
    """The error as it is sent."""
    kind = SOURCE if isinstance(error, SourceError) else COLUMN if isinstance(error, ColumnError) else \
        REFUSED if isinstance(error, UsageError) else DAMAGED if isinstance(error, WrongAnswer) else FAILED
    return _error(kind, str(error) if kind != FAILED else f"{type(error).__name__}: {error}")


def _error(kind: str, text: str) -> flight.FlightServerError:
    return flight.FlightServerError(text, extra_info=json.dumps({"kind": kind, "text": text[:4000]}).encode())
