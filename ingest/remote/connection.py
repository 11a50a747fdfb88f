"""A loader's connection to one remote worker: `Connection`."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
from pyarrow import flight

from sluice.ingest.knobs import format_bytes
from sluice.ingest.process.protocol import is_count
from sluice.ingest.remote.calls import Call
from sluice.ingest.remote.messages import KINDS, PIECE_LIMIT, RemoteError, WrongAnswer, read_answer
from sluice.ingest.remote.unit import RemoteJob, Unit

_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


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
        self._tls, self._answered = authority is not None, False
        self._token = (b"authorization", f"Bearer {token}".encode())
        self._client = flight.FlightClient(
            f"{'grpc+tls' if self._tls else 'grpc'}://{address}",
            tls_root_certs=authority,
            generic_options=[
                ("grpc.max_reconnect_backoff_ms", 1000),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", PIECE_LIMIT),
            ],
        )

    def ask(self, what: Unit | Call, timeout_s: float, expected: int = 0) -> tuple[Any, int]:
        """Returns the rows of a unit, or the result of a function, and how many requests the worker's store refused.
        Raises `WorkerLost`, `WrongAnswer`, or the worker's error. `expected` is the memory reserved for a unit."""
        request = what.request(self._job)
        most = what.most_bytes(self._job, expected)
        try:
            body = self._take(what.action, request, most, self._options(timeout_s))
            head, arrays = read_answer(body, request)
            throttled = head.get("throttled", 0)
            if not is_count(throttled):
                raise WrongAnswer("no number of refused requests")
            result = what.result(head, arrays, self._job)
        except _ERRORS as error:
            raise self._error(error) from None
        except (WrongAnswer, RemoteError, ValueError, TypeError, KeyError) as error:
            raise WrongAnswer(f"worker {self.address}: {error}") from None
        self._answered = True
        return result, throttled

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

    def _take(
        self, action: str, request: Any, most: int, options: flight.FlightCallOptions
    ) -> pa.Buffer:
        """Returns an answer, whose pieces are counted before the next one is taken."""
        pieces, size = [], 0
        for piece in self._client.do_action(flight.Action(action, request), options):
            size += piece.body.size
            if size > most:
                raise WrongAnswer(
                    f"an answer of more than the {format_bytes(most)} that it may have"
                )
            pieces.append(piece.body)
        return pieces[0] if len(pieces) == 1 else pa.py_buffer(b"".join(pieces))

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
