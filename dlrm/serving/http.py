"""Answers HTTP requests by a scorer, within limits: `HttpApp`. It is an ASGI application, so it works with any ASGI
server."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST

from sluice.common.suggest import nearest
from sluice.dlrm.serving.batcher import Batcher, Full
from sluice.dlrm.serving.decode import Refusal
from sluice.dlrm.serving.limits import Bucket, ServerLimits
from sluice.dlrm.serving.metrics import ServerMetrics
from sluice.dlrm.serving.pace import Pace
from sluice.dlrm.serving.scorer import Answer, PredictRequest, Scorer

if TYPE_CHECKING:
    from sluice.dlrm.serving.reload import Reload

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
METHODS = {
    "/predict": ("POST",),
    "/model": ("GET", "HEAD"),
    "/health": ("GET", "HEAD"),
    "/metrics": ("GET", "HEAD"),
}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer over HTTP."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"

    async def send(self, send: Send) -> None:
        headers = [
            (b"content-type", self.content_type.encode()),
            (b"content-length", str(len(self.body)).encode()),
            *((name.encode(), value.encode()) for name, value in self.headers.items()),
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


def iso_time(moment: float) -> str:
    """Returns a time in seconds since 1970 as text in ISO 8601."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat(timespec="seconds")


class HttpApp:
    """Answers with one model, and after `take` with another. Earlier requests are still answered."""

    def __init__(
        self,
        scorer: Scorer,
        limits: ServerLimits,
        *,
        background: Reload | None = None,
        wall_clock: Callable[[], float] = time.time,
        pace: Pace | None = None,
    ) -> None:
        """`background` runs as long as the server. `pace` is the measured speed of the model. `wall_clock` returns
        seconds since 1970."""
        self.served = ServerMetrics()
        self.scorer = scorer
        self.limits = limits
        self._background = background
        self._wall_clock = wall_clock
        self._serving_since = wall_clock()
        self._bucket = Bucket(limits.rate, time.monotonic)
        self.batcher: Batcher[PredictRequest, Answer | Refusal] = Batcher(
            scorer.answer,
            size=lambda request: len(request.body),
            size_limit=limits.body_bytes,
            request_limit=limits.batch_requests,
            waiting_limit=limits.waiting,
            units=lambda request: request.units,
            answer_s=limits.seconds,
            pace=pace or Pace(),
        )
        self.batcher.on_batch = self.served.batch
        self.served.model(scorer.servable.about())

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request."""
        path, method = scope["path"], scope["method"]
        try:
            if path not in METHODS:
                reply = _error_reply(
                    404, f"there is no {path[:60]!r} here{nearest(path[:60], METHODS)}"
                )
            elif method not in METHODS[path]:
                reply = _error_reply(
                    405, f"{path} takes {METHODS[path][0]}", {"allow": ", ".join(METHODS[path])}
                )
            elif path == "/predict":
                reply = await self._predict(dict(scope["headers"]), receive)
            elif path == "/model":
                reply = _json_reply(
                    {**self.scorer.servable.about(), "features": self.scorer.decoder.kinds}
                )
            elif path == "/health":
                reload = {"reload": self._background.about()} if self._background else {}
                since = iso_time(self._serving_since)
                reply = _json_reply(
                    {"ok": True, **self.scorer.servable.about(), "since": since, **reload}
                )
            else:
                reply = Reply(
                    200, self.served.text(self.batcher.waiting), content_type=CONTENT_TYPE_LATEST
                )
        except Exception:
            await _error_reply(500, "the server failed on this request; its log says why").send(
                send
            )
            raise
        await reply.send(send)

    async def run_background(self) -> None:
        """Runs the server's other tasks, until it is cancelled."""
        if self._background is not None:
            await self._background(self)

    def take(self, scorer: Scorer) -> None:
        """Answers with this model from the next batch on."""
        self.served.model(scorer.servable.about())
        self.scorer = scorer
        self.batcher.work = scorer.answer
        self._serving_since = self._wall_clock()

    async def _predict(self, headers: Mapping[bytes, bytes], receive: Receive) -> Reply:
        begun_at = time.monotonic()
        try:
            if wait := self._bucket.take():
                text = (
                    f"more than {self.limits.rate:g} requests a second; try again in {wait:.1f} s"
                )
                reply = _error_reply(429, text, {"retry-after": str(math.ceil(wait))})
            else:
                answer = await self._answer_to(headers, receive)
                self.served.answered(len(answer.probabilities), answer.missing)
                reply = _json_reply(answer.to_dict())
        except Full as full:
            reply = _error_reply(503, str(full), {"retry-after": str(full.retry_after)})
        except Refusal as refusal:
            # After these two, the rest of the request is not read.
            close = {"connection": "close"} if refusal.status in (408, 413) else {}
            reply = _error_reply(refusal.status, str(refusal), close)
        except ClientGone:
            reply = _error_reply(499, "the client went away")
        except Exception:
            self.served.request(500, time.monotonic() - begun_at)
            raise
        self.served.request(reply.status, time.monotonic() - begun_at)
        return reply

    async def _answer_to(self, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        try:
            async with asyncio.timeout(self.limits.seconds):
                body = await self._body(headers, receive)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self.limits.seconds:g} s") from None
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding != "identity":
            raise Refusal(
                415,
                f"Content-Encoding {encoding[:60]!r}: a body must come as it is, without compression",
            )
        try:
            async with asyncio.timeout(self.limits.seconds):
                content_type = headers.get(b"content-type", b"").decode("latin-1")
                answer = await self.batcher.ask(PredictRequest(content_type, body))
        except TimeoutError:
            wait = max(1, math.ceil(self.batcher.ahead_s))
            raise Full(
                f"no answer within {self.limits.seconds:g} s: the server is busy", wait
            ) from None
        if isinstance(answer, Refusal):
            raise answer
        return answer

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        limit = self.limits.body_bytes
        length = headers.get(b"content-length", b"").decode("latin-1")
        if length.isdigit() and int(length[:20]) > limit:
            raise Refusal(413, f"a body of {length[:20]} bytes is larger than {limit}")
        parts = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise Refusal(413, f"the body is larger than {limit} bytes")
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)


def _json_reply(content: Mapping[str, Any]) -> Reply:
    return Reply(200, _JSON.encode(content).encode())


def _error_reply(status: int, text: str, headers: Mapping[str, str] | None = None) -> Reply:
    # A lone surrogate, which a client's JSON may contain, cannot be encoded.
    body = json.dumps({"error": text}, ensure_ascii=False).encode(errors="replace")
    return Reply(status, body, headers or {})
