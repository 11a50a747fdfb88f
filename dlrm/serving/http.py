"""Answers HTTP requests by a scorer, within limits: `HttpApp`, an ASGI application. `ServerMetrics` counts its requests
for Prometheus."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import time
from collections import Counter as Count
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

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
from sluice.dlrm.serving.options import ServerLimits
from sluice.dlrm.serving.scorer import Answer, Scorer

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_JSON = "application/json"
_ROW_BYTES = 512
"""How many bytes of a request take as long as a row."""
_CLOSE = {"connection": "close"}
"""The rest of the request is not read."""
_READ = ("GET", "HEAD")
METHODS = {"/predict": ("POST",), "/model": _READ, "/health": _READ, "/metrics": _READ}


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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock` returns seconds since 1970."""
        self.served = ServerMetrics()
        self.limits = limits
        self.wall_clock = wall_clock
        self.reload: dict[str, Any] = {}
        """What `/health` says of newer checkpoints."""
        self.batcher = Batcher(self._answer_batch, limits.max_waiting)
        self.take(scorer)

    def take(self, scorer: Scorer) -> None:
        """Answers with this model from the next batch on."""
        about = scorer.servable.about()
        for name, gauge in self.served.model.items():
            gauge.set(about[name])
        self.scorer = scorer
        self._serving_since = self.wall_clock()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answers one request."""
        begun_at = time.monotonic()
        path, status, headers = scope["path"], 200, {"content-type": _JSON}
        try:
            body = await self._body_of_answer(path, scope, receive)
            if path == "/metrics":
                headers["content-type"] = CONTENT_TYPE_LATEST
        except Exception as error:
            if not isinstance(error, Refusal):
                logging.exception("a request failed")
                error = Refusal(500, "the server failed on this request; its log says why")
            status = error.status
            headers |= error.headers
            # A lone surrogate, which a client's JSON may contain, cannot be encoded.
            body = json.dumps({"error": str(error)}, ensure_ascii=False).encode(errors="replace")
        if path == "/predict" and scope["method"] == "POST":
            self.served.statuses[status] += 1
            self.served.requests(status).inc()
            self.served.seconds.observe(time.monotonic() - begun_at)
        headers["content-length"] = str(len(body))
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    async def _body_of_answer(self, path: str, scope: Mapping[str, Any], receive: Any) -> bytes:
        methods = METHODS.get(path)
        if methods is None:
            raise Refusal(404, f"there is no {path[:60]!r} here{nearest(path[:60], METHODS)}")
        if scope["method"] not in methods:
            raise Refusal(405, f"{path} takes {methods[0]}", {"allow": ", ".join(methods)})
        if path == "/metrics":
            self.served.waiting.set(len(self.batcher.queue))
            return generate_latest(self.served.registry)
        if path == "/predict":
            content = await self._predict(dict(scope["headers"]), receive)
        else:
            content = self.scorer.servable.about()
            if path == "/model":
                content["features"] = self.scorer.decoder.kinds
            else:
                since = iso_time(self._serving_since)
                content |= {"ok": True, "since": since, "reload": self.reload}
        return _ENCODER.encode(content).encode()

    async def _predict(self, headers: Mapping[bytes, bytes], receive: Any) -> dict[str, Any]:
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
        # A short row takes its time, too.
        work = len(body) + _ROW_BYTES * body.count(b"{")
        try:
            async with asyncio.timeout(timeout):
                answer: Answer = await self.batcher.ask(bytes(body), work)
        except TimeoutError:
            raise Refusal(
                503, f"no answer within {timeout:g} s: the server is busy", {"retry-after": "1"}
            ) from None
        self.served.rows.inc(len(answer.probabilities))
        return answer._asdict()

    def _answer_batch(self, bodies: Sequence[bytes]) -> list[Answer | Refusal]:
        self.served.batches.observe(len(bodies))
        scorer = self.scorer  # `take` may replace it meanwhile
        answers = scorer.answer(bodies)
        for name, rows in scorer.missing.items():
            self.served.missing(name).inc(rows)
        scorer.missing.clear()
        return answers


_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """A server's counters, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        requests = counter(
            "sluice_serve_requests", "Requests for predictions, by status", ["status"]
        )
        missing = counter(
            "sluice_serve_missing_features",
            "Rows in which a feature was missing, null or refused",
            ["feature"],
        )
        # Cached, because finding a label's counter takes longer than counting.
        self.requests, self.missing = cache(requests.labels), cache(missing.labels)
        self.rows = counter("sluice_serve_rows", "Rows predicted")
        self.seconds = histogram(
            "sluice_serve_seconds", "From a request's head to its answer", buckets=_SECONDS
        )
        self.batches = histogram(
            "sluice_serve_batch_requests", "Requests in a batch", buckets=_BATCH_SIZES
        )
        self.waiting = gauge("sluice_serve_waiting", "Requests that wait for the model")
        self.model = {
            "step": gauge("sluice_serve_model_step", "Training step of the model that answers"),
            "version": gauge(
                "sluice_serve_model_version", "Version of the feature table behind it"
            ),
            "table_bytes": gauge("sluice_serve_table_bytes", "Bytes of its embedding tables"),
        }
        reloads = counter(
            "sluice_serve_reloads", "Newer checkpoints looked at, by what came of it", ["result"]
        )
        self.taken, self.refused = map(reloads.labels, ("taken", "refused"))
        self.statuses = Count[int]()
