"""The server's HTTP side: `HttpApp` makes a Starlette application of a scorer, within limits."""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.dlrm.serving.batcher import Batcher, Full, Turns
from sluice.dlrm.serving.decode import Refusal
from sluice.dlrm.serving.limits import Bucket, ServerLimits
from sluice.dlrm.serving.metrics import ServerMetrics
from sluice.dlrm.serving.pace import Pace
from sluice.dlrm.serving.scorer import Answer, PredictRequest, Scorer
from sluice.etl.common.suggest import nearest

_REQUESTS_A_TURN = 8
"""How many requests for predictions are accepted before others, such as /health, have their turn."""
ROUTES = ("/predict", "/model", "/health", "/metrics")


class BackgroundTask(Protocol):
    """A task that runs beside a server, and reports how it is doing."""

    async def __call__(self, service: HttpApp) -> None: ...
    def about(self) -> dict[str, Any]: ...


def iso_time(moment: float) -> str:
    """A moment, given in seconds since 1970, as text in ISO 8601."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat(timespec="seconds")


class HttpApp:
    """Answers with one model, and after `take` with another; requests that came before are still answered."""

    def __init__(self, scorer: Scorer, limits: ServerLimits, *, background: BackgroundTask | None = None,
                 clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time,
                 pace: Pace | None = None) -> None:
        """`background` runs as long as the server does; `pace` says how fast the model is, as far as that is known.
        `wall_clock` gives seconds since 1970."""
        self.served = ServerMetrics()
        self.scorer, self.limits = scorer, limits
        self._background, self._clock, self._wall_clock = background, clock, wall_clock
        self._serving_since = wall_clock()
        self._bucket, self._turns = Bucket(limits.rate, clock), Turns(_REQUESTS_A_TURN)
        self.batcher: Batcher[PredictRequest, Answer | Refusal] = Batcher(
            self._score, size=lambda request: len(request.body), size_limit=limits.body_bytes,
            request_limit=limits.batch_requests, waiting_limit=limits.waiting, units=lambda request: request.units,
            answer_s=limits.seconds, pace=pace, clock=clock)
        self.batcher.on_batch = self.served.batch
        self.served.model(scorer.servable.about())
        self.app = Starlette(lifespan=self._lifespan, routes=[
            Route("/predict", self._predict, methods=["POST"]), Route("/model", self._model),
            Route("/health", self._health), Route("/metrics", self._metrics)],
            exception_handlers={404: _unknown_path, 405: _wrong_method, 500: _server_error})

    def take(self, scorer: Scorer) -> None:
        """Answers with this model from the next batch on."""
        self.served.model(scorer.servable.about())
        self.scorer, self._serving_since = scorer, self._wall_clock()

    def _score(self, requests: Sequence[PredictRequest]) -> Sequence[Answer | Refusal]:
        return self.scorer.answer(requests)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._background(self)) if self._background else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _predict(self, http: Http) -> Response:
        begun_at = self._clock()
        await self._turns.wait()
        headers = {}
        try:
            if wait := self._bucket.take():
                headers["retry-after"] = str(math.ceil(wait))
                raise Refusal(429, f"more than {self.limits.rate:g} requests a second; try again in {wait:.1f} s")
            answer = await self._answer_to(http)
            self.served.answered(len(answer.probabilities), answer.missing)
            response: Response = JSONResponse(answer.to_dict())
        except Full as full:
            response = _error_response(503, str(full), {"retry-after": str(full.retry_after)})
        except Refusal as refusal:
            response = _error_response(refusal.status, str(refusal), headers)
            if refusal.status in (408, 413):
                response.headers["connection"] = "close"  # what is still to come is not read
        except ClientDisconnect:
            response = _error_response(499, "the client went away")
        except Exception:
            self.served.request(500, self._clock() - begun_at)
            raise
        self.served.request(response.status_code, self._clock() - begun_at)
        return response

    async def _answer_to(self, http: Http) -> Answer:
        try:
            async with asyncio.timeout(self.limits.seconds):
                body = await self._body(http)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self.limits.seconds:g} s") from None
        try:
            async with asyncio.timeout(self.limits.seconds):
                answer = await self.batcher.ask(PredictRequest(http.headers.get("content-type", ""), body))
        except TimeoutError:
            wait = max(1, math.ceil(self.batcher.ahead_s))
            raise Full(f"no answer within {self.limits.seconds:g} s: the server is busy", wait) from None
        if isinstance(answer, Refusal):
            raise answer
        return answer

    async def _body(self, http: Http) -> bytes:
        limit = self.limits.body_bytes
        length = http.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            raise Refusal(413, f"a body of {length[:20]} bytes is larger than {limit}")
        parts, size = [], 0
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise Refusal(413, f"the body is larger than {limit} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _model(self, _http: Http) -> Response:
        return JSONResponse({**self.scorer.servable.about(), "features": self.scorer.decoder.kinds})

    async def _health(self, _http: Http) -> Response:
        reload = {"reload": self._background.about()} if self._background else {}
        return JSONResponse({"ok": True, **self.scorer.servable.about(), "since": iso_time(self._serving_since),
                             **reload})

    async def _metrics(self, _http: Http) -> Response:
        return Response(self.served.text(self.batcher.waiting), media_type=CONTENT_TYPE_LATEST)


def _error_response(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, headers)


async def _unknown_path(http: Http, _error: Exception) -> Response:
    return _error_response(404, f"there is no {http.url.path[:60]!r} here{nearest(http.url.path[:60], ROUTES)}")


async def _wrong_method(http: Http, _error: Exception) -> Response:
    return _error_response(405, f"{http.url.path} takes {'POST' if http.url.path == '/predict' else 'GET'}")


async def _server_error(_http: Http, _error: Exception) -> Response:
    return _error_response(500, "the server failed on this request; its log says why")
