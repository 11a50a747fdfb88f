"""A loader's connection to one remote worker: `Connection`."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
from pyarrow import flight

from sluice.ingest.knobs import format_bytes
from sluice.ingest.process.protocol import is_count
from sluice.ingest.remote.messages import (
    PIECE_LIMIT,
    SENT_ERRORS,
    RemoteError,
    Request,
    WrongAnswer,
    read_answer,
)

_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


class WorkerLost(Exception):
    """A worker did not answer because it has ended or cannot be reached. The message says why."""


class Connection:
    """Sends requests to one worker. Many threads can use it."""

    def __init__(self, address: str, token: str, *, authority: bytes | None = None):
        """`address` is HOST:PORT. With `authority` (a certificate in PEM), TLS is used."""
        self.address = address
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

    def ask(self, request: Request, timeout_s: float) -> tuple[Any, int]:
        """Returns the result of a request, and how many requests the worker's store refused. Raises `WorkerLost`,
        `WrongAnswer`, or the worker's error."""
        try:
            head, arrays = read_answer(self._take(request, timeout_s), request.body)
            throttled = head.get("throttled", 0)
            if not is_count(throttled):
                raise WrongAnswer("no number of refused requests")
            result = request.result(head, arrays)
        except _ERRORS as error:
            raise self._error(error) from None
        except tuple(SENT_ERRORS.values()) as error:
            raise type(error)(f"worker {self.address}: {error}") from None
        except (ValueError, TypeError, KeyError) as error:
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

    def _take(self, request: Request, timeout_s: float) -> pa.Buffer:
        """Returns an answer, whose pieces are counted before the next one is taken."""
        pieces, size = [], 0
        action = flight.Action(request.action, request.body)
        for piece in self._client.do_action(action, self._options(timeout_s)):
            size += piece.body.size
            if size > request.most_bytes:
                raise WrongAnswer(
                    f"an answer of more than the {format_bytes(request.most_bytes)} that it may have"
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
        why = str(error).partition(". gRPC")[0].strip() or type(error).__name__
        if self._tls and "handshake failed" in why:
            return RemoteError(
                f"worker {self.address}: its certificate is not from the authority that ca=FILE names, "
                f"or belongs to another host, or the worker does not use TLS ({why})"
            )
        hint = "" if self._tls or self._answered else " (if it uses TLS, add &ca=FILE)"
        return WorkerLost(f"worker {self.address}: {why}{hint}")
