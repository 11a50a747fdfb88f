"""Guards uvicorn's protocol: `GuardedProtocol` limits connections and slow heads, and refuses ambiguous requests."""

from __future__ import annotations

import json
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_HEAD_BYTES = 64 * 2**10
"""The most bytes of a request outside its body: its head, or headers after the last chunk."""
_PIPELINED = 16
"""The most unanswered requests that may wait behind another one on the same connection."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within the `limits` of its application: it closes slow and surplus connections. It also
    refuses requests that a proxy in front of it may read differently, for example as two requests."""

    app: Any
    _head_due: float | None = None
    """When the head that is awaited must be complete, by the event loop's clock."""
    _outside_body = 0
    """Bytes received since the last request, or since the last part of its body."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        limit = self.app.limits.max_connections
        if len(self.connections) > limit:
            self._answer_and_close(
                503, f"{limit} connections are open already", b"retry-after: 1\r\n"
            )
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._outside_body += len(data)
        try:
            self.parser.feed_data(data)
            if self._outside_body > _HEAD_BYTES:
                raise httptools.HttpParserError(f"its head is longer than {_HEAD_BYTES} bytes")
        except httptools.HttpParserUpgrade:
            pass  # No upgrade is supported: the request is answered, and the connection is closed.
        except httptools.HttpParserError as error:
            why = error.__context__ or error
            self._answer_and_close(400, f"this is not a valid HTTP request: {why}"[:300])
        if self._is_idle():
            self._await_head()

    def on_headers_complete(self) -> None:
        # The parser itself refuses two lengths, folded headers, and lines that do not end in a carriage return and a
        # line feed.
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if b"transfer-encoding" in names and version != "1.1":
            raise ValueError(f"HTTP/{version} has no Transfer-Encoding")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            raise ValueError("it does not name one host")
        if len(self.pipeline) >= _PIPELINED:
            raise ValueError(f"more than {_PIPELINED} requests wait behind one on this connection")
        super().on_headers_complete()
        self._head_due = None
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._outside_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._outside_body = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        """Limits the time until a head is complete. uvicorn stops the timer when more bytes come."""
        seconds = self.app.limits.timeout
        self._head_due = self._head_due or self.loop.time() + seconds
        self.timeout_keep_alive_task = self.loop.call_at(
            self._head_due,
            self._answer_and_close,
            408,
            f"the request's head did not come within {seconds:g} s",
        )

    def _answer_and_close(self, status: int, text: str, headers: bytes = b"") -> None:
        """Closes the connection. Sends a last answer first, unless another answer is half sent."""
        if not self.transport.is_closing() and (self._is_idle() or not self.cycle.response_started):
            body = json.dumps({"error": text}).encode()
            self.transport.write(
                b"%scontent-type: application/json\r\n%scontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (STATUS_LINE[status], headers, len(body), body)
            )
        self.transport.close()

    def _is_idle(self) -> bool:
        """Whether every request that has begun is answered."""
        return self.cycle is None or self.cycle.response_complete
