"""A server's connections: how many may be open, which one is closed for a new one, and what a request must look like.

`Connections` decides, and knows nothing of sockets; `protocol` makes uvicorn's protocol obey it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

C = TypeVar("C")
_BARE_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)")


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


class _StrictLines(ReceiveBuffer):
    """Accepts only lines that end in a carriage return and a line feed, and headers of one line: a proxy before this
    server may read other bytes differently, and see two requests where this one sees one."""

    def _extract(self, count: int) -> bytearray:
        self._extracted = super()._extract(count)
        return self._extracted

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines and _BARE_LINE_END.search(self._extracted):
            raise h11.LocalProtocolError("a line does not end in a carriage return and a line feed")
        if any(line.startswith((b" ", b"\t")) for line in lines or ()):
            raise h11.LocalProtocolError("a header goes on in the next line")
        return lines


class _StrictConnection(h11.Connection):
    """Refuses a request that gives its length in two ways."""

    refusal = ""
    """Why the request was refused."""

    def __init__(self, byte_limit: int) -> None:
        super().__init__(h11.SERVER, byte_limit)
        self._receive_buffer = _StrictLines()

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.refusal = str(error)
            raise
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and b"content-length" in names:
                self.refusal = "Content-Length and Transfer-Encoding exclude each other"
            elif b"transfer-encoding" in names and event.http_version < b"1.1":
                self.refusal = "HTTP/1.0 has no Transfer-Encoding"
            if self.refusal:
                raise h11.RemoteProtocolError(self.refusal)
        return event


def protocol(seconds: float, limit: int) -> type[H11Protocol]:
    """uvicorn's protocol, which waits at most `seconds` for a request's head, keeps at most `limit` connections open,
    and refuses doubtful requests."""
    open_connections: Connections[H11Protocol] = Connections(limit)

    class GuardedProtocol(H11Protocol):
        conn: _StrictConnection
        _head_timer: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.conn = _StrictConnection(self.conn._max_incomplete_event_size)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            to_close = open_connections.opened(self)
            if to_close is self:
                self._answer_and_close(503, "Service Unavailable",
                                       f"{limit} connections are open, and all have a request under way",
                                       "retry-after: 1\r\n")
                return
            if to_close is not None:
                to_close.transport.close()
            self._head_timer = self.loop.call_later(seconds, self._head_timed_out)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if not self._is_idle():
                self._stop_head_timer()
                open_connections.begins(self)
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self._head_timed_out)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_idle():
                open_connections.ends(self)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            open_connections.closed(self)
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._answer_and_close(400, "Bad Request",
                                   f"this is no proper HTTP request: {self.conn.refusal or msg}"[:300])

        def _answer_and_close(self, status: int, phrase: str, text: str, headers: str = "") -> None:
            """Sends a last answer and closes the connection; sends nothing if an answer is half sent."""
            if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json.dumps({"error": text})
                self.transport.write(f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n{headers}"
                                     f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
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
                self._answer_and_close(408, "Request Timeout", f"the request's head did not come within {seconds:g} s")

    return GuardedProtocol
