"""Answers HTTP requests by a scorer, within limits: `HttpApp`. It is an ASGI application, so it works with any ASGI
server. `ServerMetrics` counts its requests for Prometheus."""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import time
from collections import Counter as Count
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from sluice.common.suggest import nearest
from sluice.dlrm.serving.batcher import Batcher
from sluice.dlrm.serving.decode import Refusal
from sluice.dlrm.serving.scorer import Answer, Scorer, work_of
from sluice.dlrm.serving.server import ServerLimits

if TYPE_CHECKING:
    from sluice.dlrm.serving.reload import Reload

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_JSON = "application/json"
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
        reload: Reload | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`/health` shows the state of `reload`. `wall_clock` returns seconds since 1970."""
        self.served = ServerMetrics()
        self.limits = limits
        self._reload = reload
        self._wall_clock = wall_clock
        self.batcher = Batcher(
            self._answer_batch,
            size=work_of,
            waiting_limit=limits.max_waiting,
            on_batch=self.served.batches.observe,
        )
        self.take(scorer)

    def take(self, scorer: Scorer) -> None:
        """Answers with this model from the next batch on."""
        self.served.model(scorer.servable.about())
        self.scorer = scorer
        self._serving_since = self._wall_clock()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request."""
        begun_at = time.monotonic()
        path, status, headers = scope["path"], 200, {"content-type": _JSON}
        failure: Exception | None = None
        try:
            body = await self._body_of_answer(path, scope, receive)
            if path == "/metrics":
                headers["content-type"] = CONTENT_TYPE_LATEST
        except Exception as error:
            refusal = error
            if not isinstance(refusal, Refusal):
                failure = error
                refusal = Refusal(500, "the server failed on this request; its log says why")
            status, headers = refusal.status, {**headers, **refusal.headers}
            # A lone surrogate, which a client's JSON may contain, cannot be encoded.
            body = json.dumps({"error": str(refusal)}, ensure_ascii=False).encode(errors="replace")
        if path == "/predict" and scope["method"] == "POST":
            self.served.request(status, time.monotonic() - begun_at)
        headers["content-length"] = str(len(body))
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})
        if failure is not None:
            raise failure

    async def _body_of_answer(self, path: str, scope: Mapping[str, Any], receive: Receive) -> bytes:
        methods = METHODS.get(path)
        if methods is None:
            raise Refusal(404, f"there is no {path[:60]!r} here{nearest(path[:60], METHODS)}")
        if scope["method"] not in methods:
            raise Refusal(405, f"{path} takes {methods[0]}", {"allow": ", ".join(methods)})
        if path == "/metrics":
            self.served.waiting.set(self.batcher.waiting)
            return self.served.text()
        if path == "/predict":
            content = await self._predict(dict(scope["headers"]), receive)
        else:
            content = self.scorer.servable.about()
            if path == "/model":
                content["features"] = self.scorer.decoder.kinds
            else:
                content |= {"ok": True, "since": iso_time(self._serving_since)}
                content |= {"reload": self._reload.about()} if self._reload else {}
        return _ENCODER.encode(content).encode()

    async def _predict(self, headers: Mapping[bytes, bytes], receive: Receive) -> dict[str, Any]:
        timeout, largest = self.limits.timeout, self.limits.max_body
        content_type, encoding = (
            headers.get(name, b"").decode("latin-1").strip().lower()
            for name in (b"content-type", b"content-encoding")
        )
        body, size, more = bytearray(), int(headers.get(b"content-length", 0)), True
        try:
            async with asyncio.timeout(timeout):
                while more and size <= largest:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(499, "the client went away")
                    body += message.get("body", b"")
                    more, size = message.get("more_body", False), len(body)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {timeout:g} s", _CLOSE) from None
        if size > largest:
            raise Refusal(413, f"the body is larger than {largest} bytes", _CLOSE)
        if encoding not in ("", "identity"):
            raise Refusal(
                415,
                f"Content-Encoding {encoding[:60]!r}: a body must come as it is, without compression",
            )
        if content_type.partition(";")[0].strip() != _JSON:
            raise Refusal(
                415,
                f"Content-Type {content_type[:60]!r} is not {_JSON}; say that the rows are JSON, as curl does with "
                f"-H 'content-type: {_JSON}'",
            )
        try:
            async with asyncio.timeout(timeout):
                answer: Answer | Refusal = await self.batcher.ask(bytes(body))
        except TimeoutError:
            raise Refusal(
                503, f"no answer within {timeout:g} s: the server is busy", {"retry-after": "1"}
            ) from None
        if isinstance(answer, Refusal):
            raise answer
        self.served.rows.inc(len(answer.probabilities))
        return answer.to_dict()

    def _answer_batch(self, bodies: Sequence[bytes]) -> list[Answer | Refusal]:
        scorer = self.scorer  # `take` may replace it meanwhile
        answers = scorer.answer(bodies)
        self.served.missing(scorer.missing)
        return answers


_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """A server's counters, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        home: dict[str, Any] = {"registry": self.registry}
        requests = Counter(
            "sluice_serve_requests", "Requests for predictions, by status", ["status"], **home
        )
        missing = Counter(
            "sluice_serve_missing_features",
            "Rows in which a feature was missing or null",
            ["feature"],
            **home,
        )
        # Cached, because finding a label's counter takes longer than counting.
        self._requests_by_status = functools.cache(requests.labels)
        self._missing_by_feature = functools.cache(missing.labels)
        self.rows = Counter("sluice_serve_rows", "Rows predicted", **home)
        self._seconds = Histogram(
            "sluice_serve_seconds", "From a request's head to its answer", buckets=_SECONDS, **home
        )
        self.batches = Histogram(
            "sluice_serve_batch_requests", "Requests in a batch", buckets=_BATCH_SIZES, **home
        )
        self.waiting = Gauge("sluice_serve_waiting", "Requests that wait for the model", **home)
        self._step = Gauge(
            "sluice_serve_model_step", "Training step of the model that answers", **home
        )
        self._version = Gauge(
            "sluice_serve_model_version", "Version of the feature table behind it", **home
        )
        self._bytes = Gauge("sluice_serve_table_bytes", "Bytes of its embedding tables", **home)
        reloads = Counter(
            "sluice_serve_reloads",
            "Newer checkpoints looked at, by what came of it",
            ["result"],
            **home,
        )
        self.taken, self.refused = map(reloads.labels, ("taken", "refused"))
        self.statuses: Count[int] = Count()

    def request(self, status: int, seconds: float) -> None:
        """Counts an answered request, with any status."""
        self.statuses[status] += 1
        self._requests_by_status(status).inc()
        self._seconds.observe(seconds)

    def missing(self, features: Mapping[str, int]) -> None:
        """Counts the rows of a batch that lacked a feature, by feature."""
        for name, rows in features.items():
            self._missing_by_feature(name).inc(rows)

    def model(self, about: Mapping[str, Any]) -> None:
        """Notes which model answers from now on."""
        self._step.set(about["step"])
        self._version.set(about["version"])
        self._bytes.set(about["table_bytes"])

    def text(self) -> bytes:
        """Returns all metrics in the format of Prometheus."""
        return generate_latest(self.registry)
