"""A remote worker's Arrow Flight server: `WorkerServer`. It keeps only opened jobs and recently made units. A repeated
request gets the same answer."""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pyarrow import flight

from sluice.common.errors import UsageError
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.ingest.remote.calls import Functions
from sluice.ingest.remote.maker import UnitMaker
from sluice.ingest.remote.unit import KINDS, RemoteError, RemoteJob, Unit, checksum

_JOBS = 8
"""How many jobs stay open. The least recently used one is closed first."""
_GONE_S = 30.0  # a loader that was silent for so long counts as gone
Made = tuple[Any, bytes]
"""A unit's rows, and their checksum."""


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
        share_bytes: int = 2**28,
    ):
        """- `listen` is HOST:PORT.
        - `open_job` opens the table for a job, or refuses the job.
        - `threads` units are made at once.
        - `certificate` is a TLS certificate and its key, both in PEM.
        - `permission` says which functions loaders may call.
        - `share_bytes` of units are kept for other loaders of a job."""
        self._shared, self._functions = SharedUnits(share_bytes), Functions(permission)
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

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Handles `call`, which calls a function, and `ping`, which returns how many units are made at once."""
        if action.type == "ping":
            return iter([str(self._threads).encode()])
        with _send_errors():
            if action.type != "call":
                raise RemoteError(f"there is no action {action.type!r}")
            with self._free:
                return iter([self._functions.answer(action.body)])

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Returns the rows of a unit as one batch with its checksum. One batch for each part would cost the loader
        twice as much."""
        with _send_errors():
            job, rank, loader, unit = Unit.from_request(ticket.ticket)
            maker = self.open(job)

            def make() -> Made:
                with self._free:
                    batch = maker.rows(unit)
                    return batch, checksum(batch, job, unit).to_bytes(4, "little")

            made = self._shared.get(f"{job.digest} {rank}", loader, unit.key, make)
        return flight.GeneratorStream(job.schema, iter([made]))

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


@contextlib.contextmanager
def _send_errors() -> Iterator[None]:
    """Sends errors of this side to the client."""
    try:
        yield
    except Exception as error:
        kind = next((name for name, one in KINDS.items() if isinstance(error, one)), "other")
        known = isinstance(error, (UsageError, *KINDS.values()))
        text = str(error) if known else f"{type(error).__name__}: {error}"
        raise flight.FlightServerError(
            text, extra_info=json.dumps({"kind": kind, "text": text[:4000]}).encode()
        ) from None


@dataclass(eq=False)
class _Kept:
    """One unit, and the loaders that have received it."""

    made: Future[Made] = field(default_factory=Future)
    had: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return (
            int(self.made.result()[0].nbytes)
            if self.made.done() and self.made.exception() is None
            else 0
        )


class SharedUnits:
    """Units that a worker keeps for other loaders, up to a limit in bytes.

    A unit that several loaders of one job want is made only once. It is kept until every recently active loader has
    received it. If the limit is reached, the oldest unit is dropped, and made again if a slow loader asks for it. So a
    dead or slow loader never delays the others."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._limit = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], _Kept] = {}  # the oldest first
        self._heard: dict[str, dict[str, float]] = {}

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())

    def get(self, kin: str, loader: str, unit: str, make: Callable[[], Made]) -> Made:
        """Returns a unit for a loader. Loaders with the same `kin` want the same units. If a unit is being made for one
        of them, the others wait for it."""
        with self._lock:
            self._heard.setdefault(kin, {})[loader] = self._clock()
            alone = self._drop_unneeded(kin) == 1
            kept = self._kept.get((kin, unit))
            mine = kept is None
            if kept is None:
                kept = _Kept()
                if not alone:  # a single loader does not need the unit again
                    self._kept[kin, unit] = kept
        if mine:
            try:
                kept.made.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._kept.pop((kin, unit), None)  # the next request tries again
                kept.made.set_exception(error)
        found = kept.made.result()
        with self._lock:
            kept.had.add(loader)
            self._drop_unneeded(kin)
        return found

    def _drop_unneeded(self, kin: str) -> int:
        """Drops units that no loader still needs, and the oldest ones beyond the limit. Returns the number of recently
        active loaders."""
        heard, since = self._heard[kin], self._clock() - _GONE_S
        for loader in [one for one, at in heard.items() if at < since]:
            del heard[loader]
        for key in [
            key for key, kept in self._kept.items() if key[0] == kin and kept.had >= heard.keys()
        ]:
            del self._kept[key]
        while self._kept and self.bytes > self._limit:
            del self._kept[next(iter(self._kept))]
        return len(heard)
