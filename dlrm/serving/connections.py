"""Guards uvicorn's protocol: `protocol` limits open connections and slow ones, and refuses ambiguous HTTP requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 * 2**10
"""The most bytes of a request outside its body: its head, or headers after the last chunk."""
_PIPELINED = 16
"""The most unanswered requests that may wait behind another one on the same connection."""


class AmbiguousRequest(Exception):
    """A proxy in front of this server may read the request differently, for example as two requests."""


class JoinedWrites:
    """A transport that sends by one system call what is written in one turn of the event loop, such as the head and the
    body of an answer."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()


def protocol(seconds: float, limit: int) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol with limits: `seconds` to wait for a request's head, and `limit` open connections."""
    limits = {"head_timeout_s": seconds, "most_open": limit}
    return type("LimitedProtocol", (GuardedProtocol,), limits)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes slow and surplus connections and refuses ambiguous requests."""

    head_timeout_s: float
    most_open: int
    _head_timer: asyncio.TimerHandle | None = None
    _message_begun = False
    _outside_body = 0
    """Bytes received since the request began, or since the last part of its body."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > self.most_open:
            self._answer_and_close(
                503,
                "Service Unavailable",
                f"{self.most_open} connections are open already",
                "retry-after: 1\r\n",
            )
            return
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_timed_out)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._outside_body = len(data) + (self._outside_body if self._message_begun else 0)
        try:
            self.parser.feed_data(data)
            if self._message_begun and self._outside_body > _HEAD_BYTES:
                raise AmbiguousRequest(f"its head is longer than {_HEAD_BYTES} bytes")
        except httptools.HttpParserUpgrade:
            pass  # No upgrade is supported: the request is answered, and the connection is closed.
        except (httptools.HttpParserError, AmbiguousRequest) as error:
            self._answer_and_close(
                400,
                "Bad Request",
                f"this is not a valid HTTP request: {error.__context__ or error}"[:300],
            )
        if not self._is_idle():
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_timed_out)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message_begun = True

    def on_headers_complete(self) -> None:
        # The parser itself refuses two lengths, folded headers, and lines that do not end in a carriage return and a
        # line feed.
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if b"transfer-encoding" in names and version != "1.1":
            raise AmbiguousRequest(f"HTTP/{version} has no Transfer-Encoding")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            raise AmbiguousRequest("it does not name one host")
        if len(self.pipeline) >= _PIPELINED:
            raise AmbiguousRequest(
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _answer_and_close(self, status: int, phrase: str, text: str, headers: str = "") -> None:
        """Closes the connection. Sends a last answer first, unless another answer is half sent."""
        if not self.transport.is_closing() and (self._is_idle() or not self.cycle.response_started):
            body = json.dumps({"error": text})
            self.transport.write(
                f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n{headers}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
            )
        self.transport.close()

    def _is_idle(self) -> bool:
        """Whether every request that has begun is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self._is_idle() and not self.transport.is_closing():
            self._answer_and_close(
                408,
                "Request Timeout",
                f"the request's head did not come within {self.head_timeout_s:g} s",
            )
