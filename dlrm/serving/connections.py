"""A server's connections: how many may be open, which one is closed for a new one, and what a request must look like.

`Connections` decides, and knows nothing of sockets; `protocol` makes uvicorn's protocol obey it.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

C = TypeVar("C")
_HEAD_BYTES = 64 * 2**10
"""How many bytes of a request may come that are no part of its body: a head, or headers after the last chunk."""
_PIPELINED = 16
"""How many requests may follow, unanswered, behind one on the same connection."""


class Connections(Generic[C]):
    """The open connections. A request is under way from the end of its head to the end of its answer. A connection
    without one is idle, and the longest idle one is closed when too many are open."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[C, None] = OrderedDict()
        self._busy: set[C] = set()

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def opened(self, new: C) -> C | None:
        """Which connection is to be closed for the new one, if any: the new one itself if all others have a request
        under way."""
        to_close = None
        if len(self) >= self._limit:
            to_close = next(iter(self._idle), new)
            self._idle.pop(to_close, None)
        if to_close is not new:
            self._idle[new] = None
        return to_close

    def begins(self, connection: C) -> None:
        """Notes that a connection's request is under way."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def ends(self, connection: C) -> None:
        """Notes that the answer to a connection's request is complete."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None

    def closed(self, connection: C) -> None:
        """Forgets a connection that is no longer open."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)


class Doubtful(Exception):
    """A proxy before this server may read such a request differently, and see two where this one sees one."""


def check_head(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Raises Doubtful for a head that the parser lets pass. (It refuses two lengths, folded headers and lines that do
    not end in a carriage return and a line feed by itself.)"""
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and version != "1.1":
        raise Doubtful(f"HTTP/{version} has no Transfer-Encoding")
    if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
        raise Doubtful("it does not name one host")


def protocol(seconds: float, limit: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which waits at most `seconds` for a request's head, keeps at most `limit` connections open,
    and refuses doubtful requests."""
    open_connections: Connections[HttpToolsProtocol] = Connections(limit)

    class GuardedProtocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _message_begun = False
        _outside_body = 0
        """Bytes that came since the request began, or since the last part of its body."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            to_close = open_connections.opened(self)
            if to_close is self:
                self._answer_and_close(
                    503,
                    "Service Unavailable",
                    f"{limit} connections are open, and all have a request under way",
                    "retry-after: 1\r\n",
                )
                return
            if to_close is not None:
                to_close.transport.close()
            self._head_timer = self.loop.call_later(seconds, self._head_timed_out)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            self._unset_keepalive_if_required()
            self._outside_body = len(data) + (self._outside_body if self._message_begun else 0)
            try:
                self.parser.feed_data(data)
                if self._message_begun and self._outside_body > _HEAD_BYTES:
                    raise Doubtful(f"its head is longer than {_HEAD_BYTES} bytes")
            except httptools.HttpParserUpgrade:
                pass  # nothing is upgraded here: the request is answered, and the connection closed
            except (httptools.HttpParserError, Doubtful) as error:
                self._answer_and_close(
                    400,
                    "Bad Request",
                    f"this is no proper HTTP request: {error.__context__ or error}"[:300],
                )
            if not self._is_idle():
                self._stop_head_timer()
                open_connections.begins(self)
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self._head_timed_out)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._message_begun = True

        def on_headers_complete(self) -> None:
            check_head(self.headers, self.parser.get_http_version())
            if len(self.pipeline) >= _PIPELINED:
                raise Doubtful(
                    f"more than {_PIPELINED} requests wait behind one on this connection"
                )
            super().on_headers_complete()
            if self.parser.should_upgrade():
                self.cycle.keep_alive = False

        def on_body(self, body: bytes) -> None:
            self._outside_body = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._message_begun = False
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_idle():
                open_connections.ends(self)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            open_connections.closed(self)
            super().connection_lost(exc)

        def _answer_and_close(self, status: int, phrase: str, text: str, headers: str = "") -> None:
            """Sends a last answer and closes the connection; sends nothing if an answer is half sent."""
            if not self.transport.is_closing() and (
                self._is_idle() or not self.cycle.response_started
            ):
                body = json.dumps({"error": text})
                self.transport.write(
                    f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n{headers}"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
                )
            self.transport.close()

        def _is_idle(self) -> bool:
            """Whether no request has begun whose answer is not complete."""
            return self.cycle is None or self.cycle.response_complete

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_timed_out(self) -> None:
            self._head_timer = None
            if self._is_idle() and not self.transport.is_closing():
                self._answer_and_close(
                    408, "Request Timeout", f"the request's head did not come within {seconds:g} s"
                )

    return GuardedProtocol
