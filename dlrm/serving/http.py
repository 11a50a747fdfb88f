"""Answers HTTP requests by a scorer, within limits: `HttpApp`. It is an ASGI application, so it works with any ASGI
server."""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST

from sluice.common.suggest import nearest
from sluice.dlrm.serving.batcher import Batcher
from sluice.dlrm.serving.decode import Refusal
from sluice.dlrm.serving.limits import ServerLimits
from sluice.dlrm.serving.metrics import ServerMetrics
from sluice.dlrm.serving.scorer import Answer, PredictRequest, Scorer

if TYPE_CHECKING:
    from sluice.dlrm.serving.reload import Reload

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CLOSE = {"connection": "close"}
"""The rest of the request is not read."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
METHODS = {
    "/predict": ("POST",),
    "/model": ("GET", "HEAD"),
    "/health": ("GET", "HEAD"),
    "/metrics": ("GET", "HEAD"),
}


class Reply:
    """One answer over HTTP."""

    def __init__(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        self.status = status
        self._body = body
        self._headers = {
            "content-type": content_type,
            "content-length": str(len(body)),
            **(headers or {}),
        }

    @classmethod
    def of_error(cls, error: Refusal) -> Reply:
        # A lone surrogate, which a client's JSON may contain, cannot be encoded.
        body = json.dumps({"error": str(error)}, ensure_ascii=False).encode(errors="replace")
        return cls(error.status, body, error.headers)

    async def send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


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
    ) -> None:
        """`background` runs as long as the server. `wall_clock` returns seconds since 1970."""
        self.served = ServerMetrics()
        self.limits = limits
        self._background = background
        self._wall_clock = wall_clock
        self.batcher: Batcher[PredictRequest, Answer | Refusal] = Batcher(
            scorer.answer,
            size=lambda request: request.size,
            waiting_limit=limits.max_waiting,
            on_batch=self.served.batch,
        )
        self.take(scorer)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request."""
        begun_at = time.monotonic()
        path = scope["path"]
        failure = None
        try:
            reply = await self._reply(path, scope, receive)
        except Refusal as refusal:
            reply = Reply.of_error(refusal)
        except Exception as error:
            failure = error
            reply = Reply.of_error(
                Refusal(500, "the server failed on this request; its log says why")
            )
        if path == "/predict" and scope["method"] == "POST":
            self.served.request(reply.status, time.monotonic() - begun_at)
        await reply.send(send)
        if failure is not None:
            raise failure

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

    async def _reply(self, path: str, scope: Mapping[str, Any], receive: Receive) -> Reply:
        methods = METHODS.get(path)
        if methods is None:
            raise Refusal(404, f"there is no {path[:60]!r} here{nearest(path[:60], METHODS)}")
        if scope["method"] not in methods:
            raise Refusal(405, f"{path} takes {methods[0]}", {"allow": ", ".join(methods)})
        if path == "/predict":
            answer = await self._answer_to(dict(scope["headers"]), receive)
            self.served.answered(len(answer.probabilities), answer.missing)
            content = answer.to_dict()
        elif path == "/metrics":
            text = self.served.text(self.batcher.waiting)
            return Reply(200, text, content_type=CONTENT_TYPE_LATEST)
        else:
            content = self.scorer.servable.about()
            if path == "/model":
                content["features"] = self.scorer.decoder.kinds
            else:
                content |= {"ok": True, "since": iso_time(self._serving_since)}
                content |= {"reload": self._background.about()} if self._background else {}
        return Reply(200, _JSON.encode(content).encode())

    async def _answer_to(self, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        timeout = self.limits.timeout
        try:
            async with asyncio.timeout(timeout):
                body = await self._body(headers, receive)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {timeout:g} s", _CLOSE) from None
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding != "identity":
            raise Refusal(
                415,
                f"Content-Encoding {encoding[:60]!r}: a body must come as it is, without compression",
            )
        try:
            async with asyncio.timeout(timeout):
                content_type = headers.get(b"content-type", b"").decode("latin-1")
                answer = await self.batcher.ask(PredictRequest(content_type, body))
        except TimeoutError:
            raise Refusal(
                503, f"no answer within {timeout:g} s: the server is busy", {"retry-after": "1"}
            ) from None
        if isinstance(answer, Refusal):
            raise answer
        return answer

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        limit = self.limits.max_body
        length = headers.get(b"content-length", b"").decode("latin-1")
        if length.isdigit() and int(length[:20]) > limit:
            raise Refusal(413, f"a body of {length[:20]} bytes is larger than {limit}", _CLOSE)
        parts = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(499, "the client went away")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise Refusal(413, f"the body is larger than {limit} bytes", _CLOSE)
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)
