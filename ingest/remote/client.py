"""One worker as its asker sees it: `Connection`."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy.typing as npt
import pyarrow as pa
from pyarrow import flight

from sluice.ingest.columns import ColumnError
from sluice.ingest.read.reader import SourceError
from sluice.ingest.remote.calls import Call, WrongAnswer
from sluice.ingest.remote.unit import RemoteError, RemoteJob, Unit, checksum

_OPEN_S = 60.0
_KINDS = {"source": SourceError, "column": ColumnError, "refused": RemoteError, "failed": RemoteError,
          "damaged": WrongAnswer}


class WorkerLost(Exception):
    """A worker did not answer: it has ended, or cannot be reached. The message says why."""


class Connection:
    """Asks one worker for units of a job, from any number of threads."""

    def __init__(self, address: str, token: str, job: RemoteJob, *, authority: bytes | None = None,
                 asker: tuple[str, str] = ("", "")):
        """`address` is HOST:PORT; with an `authority` (its certificate in PEM) TLS is used. The `asker` is the loader's
        rank, and a name that it alone has: loaders of one job and rank want the same units."""
        self.address, self._job, self._schema, self._asker = address, job, job.schema, asker
        self._digest, self._tls = job.digest, authority is not None
        self._token = (b"authorization", f"Bearer {token}".encode())
        scheme = "grpc" if authority is None else "grpc+tls"
        self._client = flight.FlightClient(f"{scheme}://{address}", tls_root_certs=authority, generic_options=[
            ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.use_local_subchannel_pool", 1)])
        self._lock, self._open = threading.Lock(), False
        self.threads = 1
        """How many units the worker makes at once, once it has said so."""

    def ask(self, what: Unit | Call, timeout_s: float) -> Any:
        """The batches of a unit, or what a function gave back. `WorkerLost`, `WrongAnswer`, or the worker's error."""
        if isinstance(what, Call):
            return self._call(what, timeout_s)
        self.open()
        try:
            return self._ask(what, timeout_s)
        except _Unknown:
            self._open = False
            self.open()
            return self._ask(what, timeout_s)

    def answers(self, within_s: float) -> bool:
        """Whether the worker is there, whatever it says."""
        try:
            list(self._client.do_action(flight.Action("ping", b""), self._options(within_s)))
        except (flight.FlightUnavailableError, flight.FlightTimedOutError):
            return False
        except (flight.FlightError, pa.ArrowException, OSError):
            pass
        return True

    def open(self) -> None:
        """Opens the job there, if it is not open yet."""
        with self._lock:
            if self._open:
                return
            try:
                action = flight.Action("open", self._job.to_json())
                [answer] = self._client.do_action(action, self._options(_OPEN_S))
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                raise self._error(error) from None
            self.threads = max(1, int(json.loads(answer.body.to_pybytes())["threads"]))
            self._open = True

    def close(self) -> None:
        self._client.close()

    def _call(self, call: Call, timeout_s: float) -> dict[str, npt.NDArray[Any]]:
        try:
            [answer] = self._client.do_action(flight.Action("call", call.request()), self._options(timeout_s))
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise self._error(error) from None
        return call.answer(answer.body)

    def _ask(self, unit: Unit, timeout_s: float) -> list[pa.RecordBatch]:
        batches = []
        try:
            ticket = flight.Ticket(unit.request(self._digest, *self._asker))
            reader = self._client.do_get(ticket, self._options(timeout_s))
            for chunk in reader:
                batches.append(chunk.data)
                wrong = self._wrong(unit, batches, chunk.app_metadata)
                if wrong:
                    reader.cancel()
                    raise WrongAnswer(wrong)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise self._error(error) from None
        if len(batches) != len(unit.parts):
            raise WrongAnswer(f"{len(batches)} batches where {len(unit.parts)} were asked for")
        return batches

    def _wrong(self, unit: Unit, batches: list[pa.RecordBatch], sent: Any) -> str:
        """What is wrong with the last batch."""
        batch, number = batches[-1], len(batches) - 1
        if number >= len(unit.parts):
            return "more batches than were asked for"
        rows = unit.parts[number].stop - unit.parts[number].start
        if batch.num_rows != rows or not batch.schema.equals(self._schema):
            return f"{batch.num_rows} rows of other columns than those of the {rows} that were asked for"
        if sent is None or int.from_bytes(sent.to_pybytes(), "little") != checksum(batch):
            return "values that differ from their checksum (CRC-32)"
        return ""

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=[self._token])

    def _error(self, error: Exception) -> Exception:
        if isinstance(error, flight.FlightUnauthenticatedError):
            return RemoteError(f"worker {self.address}: refuses this token: give the loader the one that the worker "
                               "was started with (--token-file)")
        try:
            told = json.loads(getattr(error, "extra_info", b"") or b"{}")
        except ValueError:
            told = {}
        if told.get("kind") == "unknown":
            return _Unknown()
        if told.get("kind") in _KINDS:
            return _KINDS[told["kind"]](f"worker {self.address}: {told['text']}")
        why = str(error).partition(". gRPC")[0].strip() or type(error).__name__
        if self._tls and "handshake failed" in why:
            return RemoteError(f"worker {self.address}: its certificate is not from the authority that ca=FILE names, "
                               f"or is another host's, or it does not speak TLS ({why})")
        hint = "" if self._tls or self._open else " (if it speaks TLS, add &ca=FILE)"
        return WorkerLost(f"worker {self.address}: {why}{hint}")


class _Unknown(Exception):
    """The worker does not know the job, or no more."""
