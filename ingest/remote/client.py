"""One worker as its asker sees it: `Connection`."""

from __future__ import annotations

import json
import threading
from typing import Any

import pyarrow as pa
from pyarrow import flight

from sluice.ingest.columns import ColumnError
from sluice.ingest.read.reader import SourceError
from sluice.ingest.remote.unit import RemoteError, RemoteJob, Unit, checksum

_OPEN_S = 60.0
_KINDS = {"source": SourceError, "column": ColumnError, "refused": RemoteError, "failed": RemoteError}


class WorkerLost(Exception):
    """A worker did not answer: it has ended, or cannot be reached. The message says why."""


class WrongAnswer(Exception):
    """What came is not what was asked for: the message says in what."""


class Connection:
    """Asks one worker for units of a job, from any number of threads."""

    def __init__(self, address: str, token: str, job: RemoteJob, *, authority: bytes | None = None):
        """`address` is HOST:PORT; with an `authority` (its certificate in PEM) TLS is used."""
        self.address, self._job, self._schema = address, job, job.schema
        self._token = (b"authorization", f"Bearer {token}".encode())
        scheme = "grpc" if authority is None else "grpc+tls"
        self._client = flight.FlightClient(f"{scheme}://{address}", tls_root_certs=authority, generic_options=[
            ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.use_local_subchannel_pool", 1)])
        self._lock, self._open = threading.Lock(), False
        self.threads = 1
        """How many units the worker makes at once, once it has said so."""

    def ask(self, unit: Unit, timeout_s: float) -> list[pa.RecordBatch]:
        """The batches of a unit. `WorkerLost`, `WrongAnswer`, or the error of the worker."""
        self.open()
        try:
            return self._ask(unit, timeout_s)
        except _Unknown:
            self._open = False
            self.open()
            return self._ask(unit, timeout_s)

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

    def _ask(self, unit: Unit, timeout_s: float) -> list[pa.RecordBatch]:
        batches = []
        try:
            reader = self._client.do_get(flight.Ticket(unit.request(self._job.digest)), self._options(timeout_s))
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
        return WorkerLost(f"worker {self.address}: {str(error).partition('. gRPC')[0].strip() or type(error).__name__}")


class _Unknown(Exception):
    """The worker does not know the job, or no more."""
