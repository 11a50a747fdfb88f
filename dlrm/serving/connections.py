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
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)")


class Connections(Generic[C]):
    """The open connections. A request is under way from the end of its head to the end of its answer. A connection
    without one is idle, and the longest idle one is closed when too many are open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: OrderedDict[C, None] = OrderedDict()
        self._busy: set[C] = set()

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def opened(self, new: C) -> C | None:
        """Which connection is to be closed for the new one, if any: the new one itself if all others have a request
        under way."""
        gone = None
        if len(self) >= self._most:
            gone = next(iter(self._idle), new)
            self._idle.pop(gone, None)
        if gone is not new:
            self._idle[new] = None
        return gone

    def begins(self, one: C) -> None:
        """Notes that a connection's request is under way."""
        if one in self._idle:
            del self._idle[one]
            self._busy.add(one)

    def ends(self, one: C) -> None:
        """Notes that the answer to a connection's request is complete."""
        if one in self._busy:
            self._busy.discard(one)
            self._idle[one] = None

    def closed(self, one: C) -> None:
        self._idle.pop(one, None)
        self._busy.discard(one)


class _Lines(ReceiveBuffer):
    """Accepts only lines that end in a carriage return and a line feed, and headers of one line: a proxy before this
    server may read other bytes differently, and see two requests where this one sees one."""

    def _extract(self, count: int) -> bytearray:
        self._extracted = super()._extract(count)
        return self._extracted

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines and _BARE.search(self._extracted):
            raise h11.LocalProtocolError("a line does not end in a carriage return and a line feed")
        if any(line.startswith((b" ", b"\t")) for line in lines or ()):
            raise h11.LocalProtocolError("a header goes on in the next line")
        return lines


class _Strict(h11.Connection):
    """Refuses a request that gives its length in two ways."""

    why = ""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self._receive_buffer = _Lines()

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.why = str(error)
            raise
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and b"content-length" in names:
                self.why = "Content-Length and Transfer-Encoding exclude each other"
            elif b"transfer-encoding" in names and event.http_version < b"1.1":
                self.why = "HTTP/1.0 has no Transfer-Encoding"
            if self.why:
                raise h11.RemoteProtocolError(self.why)
        return event


def protocol(seconds: float, most: int) -> type[H11Protocol]:
    """uvicorn's protocol, which waits at most `seconds` for a request's head, keeps at most `most` connections open,
    and refuses doubtful requests."""
    open_ones: Connections[H11Protocol] = Connections(most)

    class Held(H11Protocol):
        conn: _Strict
        _late: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.conn = _Strict(self.conn._max_incomplete_event_size)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            gone = open_ones.opened(self)
            if gone is self:
                self._say(503, "Service Unavailable", f"{most} connections are open, and all have a request under way",
                          "retry-after: 1\r\n")
                return
            if gone is not None:
                gone.transport.close()
            self._late = self.loop.call_later(seconds, self._too_late)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if not self._between():
                self._in_time()
                open_ones.begins(self)
            elif self._late is None:
                self._late = self.loop.call_later(seconds, self._too_late)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._between():
                open_ones.ends(self)

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            open_ones.closed(self)
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._say(400, "Bad Request", f"this is no proper HTTP request: {self.conn.why or msg}"[:300])

        def _say(self, status: int, phrase: str, text: str, headers: str = "") -> None:
            """Sends a last answer and closes the connection; sends nothing if an answer is half sent."""
            if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json.dumps({"error": text})
                self.transport.write(f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n{headers}"
                                     f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
            self.transport.close()

        def _between(self) -> bool:
            """Whether no request has begun whose answer is not complete."""
            return self.cycle is None or self.cycle.response_complete

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _too_late(self) -> None:
            self._late = None
            if self._between() and not self.transport.is_closing():
                self._say(408, "Request Timeout", f"the request's head did not come within {seconds:g} s")

    return Held
