"""A loader's connection to one remote worker: `Connection`."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import flight

from sluice.ingest.remote.calls import Call
from sluice.ingest.remote.unit import KINDS, RemoteError, RemoteJob, Unit, WrongAnswer, checksum

_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


def count_throttled(batch: Any) -> int:
    """Returns how many requests the worker's store refused, as the answer to a unit says. A call has none."""
    said = (batch.schema.metadata or {}) if isinstance(batch, pa.RecordBatch) else {}
    text = said.get(b"throttled", b"0")
    if not re.fullmatch(rb"\d{1,15}", text):
        raise WrongAnswer(f"{text[:40]!r} in place of the number of refused requests")
    return int(text)


class WorkerLost(Exception):
    """A worker did not answer because it has ended or cannot be reached. The message says why."""


class Connection:
    """Requests units of a job from one worker. Many threads can use it."""

    def __init__(
        self,
        address: str,
        token: str,
        job: RemoteJob,
        *,
        authority: bytes | None = None,
    ):
        """`address` is HOST:PORT. With `authority` (a certificate in PEM), TLS is used."""
        self.address = address
        self._job = job
        self._schema = job.schema
        self._tls, self._answered = authority is not None, False
        self._token = (b"authorization", f"Bearer {token}".encode())
        self._client = flight.FlightClient(
            f"{'grpc+tls' if self._tls else 'grpc'}://{address}",
            tls_root_certs=authority,
            generic_options=[
                ("grpc.max_reconnect_backoff_ms", 1000),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )

    def ask(self, what: Unit | Call, timeout_s: float) -> Any:
        """Returns the rows of a unit, or the result of a function. Raises `WorkerLost`, `WrongAnswer`, or the worker's
        error."""
        options = self._options(timeout_s)
        request = what.request() if isinstance(what, Call) else what.request(self._job)
        try:
            if isinstance(what, Call):
                [answer] = self._client.do_action(flight.Action("call", request), options)
                result: Any = what.answer(answer.body, request)
            else:
                result = self._rows(what, request, options)
        except _ERRORS as error:
            raise self._error(error) from None
        except (WrongAnswer, ValueError, TypeError, KeyError) as error:
            raise WrongAnswer(f"worker {self.address}: {error}") from None
        self._answered = True
        return result

    def ping(self, within_s: float) -> int:
        """Returns how many units the worker makes at once. 0: it does not answer."""
        try:
            [answer] = self._client.do_action(flight.Action("ping", b""), self._options(within_s))
            text = answer.body[:8].to_pybytes()
        except (flight.FlightUnavailableError, flight.FlightTimedOutError):
            return 0
        except (*_ERRORS, ValueError):  # any answer shows that the worker is running
            return 1
        return max(1, int(text)) if re.fullmatch(rb"\d{1,4}", text) else 1

    def close(self) -> None:
        self._client.close()

    def _rows(
        self, unit: Unit, request: bytes, options: flight.FlightCallOptions
    ) -> pa.RecordBatch:
        reader = self._client.do_get(flight.Ticket(request), options)
        chunks = list(islice(reader, 2))
        batch, sent = (chunks[0].data, chunks[0].app_metadata) if chunks else (None, None)
        if batch is None or len(chunks) > 1:
            wrong = f"{len(chunks)} batches where one was asked for"
        elif batch.num_rows != unit.rows or not batch.schema.equals(self._schema):
            wrong = f"{batch.num_rows} rows where {unit.rows} were asked for, or columns of other names or types"
        elif sent is None or int.from_bytes(sent.to_pybytes(), "little") != checksum(
            batch, self._job, unit
        ):
            wrong = "values that differ from their checksum (CRC-32), or belong to another table, version or request"
        elif any(
            column.null_count
            for column in (*batch.columns, *(batch[name].values for name in self._job.bags))
        ):
            wrong = "missing values, which no worker of this version sends"
        else:
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                wrong = f"no valid Arrow: {error}"
            else:
                count_throttled(batch)
                return batch
        reader.cancel()
        raise WrongAnswer(wrong)

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=[self._token])

    def _error(self, error: Exception) -> Exception:
        if isinstance(error, flight.FlightUnauthenticatedError):
            return RemoteError(
                f"worker {self.address}: refuses this token; give the loader the token that the worker "
                "was started with (--token-file)"
            )
        try:
            details = json.loads(getattr(error, "extra_info", b""))
            return KINDS.get(details["kind"], RemoteError)(
                f"worker {self.address}: {details['text']}"
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            pass  # It is no error of a worker's own.
        why = str(error).partition(". gRPC")[0].strip() or type(error).__name__
        if self._tls and "handshake failed" in why:
            return RemoteError(
                f"worker {self.address}: its certificate is not from the authority that ca=FILE names, "
                f"or belongs to another host, or the worker does not use TLS ({why})"
            )
        hint = "" if self._tls or self._answered else " (if it uses TLS, add &ca=FILE)"
        return WorkerLost(f"worker {self.address}: {why}{hint}")
