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

_EACH_TURN = 8
"""How many requests for predictions are accepted before others, such as /health, have their turn."""
ROUTES = ("/predict", "/model", "/health", "/metrics")


class Beside(Protocol):
    """A task that runs beside a server, and reports how it is doing."""

    async def __call__(self, service: HttpApp) -> None: ...
    def about(self) -> dict[str, Any]: ...


def at(moment: float) -> str:
    """A moment in seconds since 1970, as text."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat(timespec="seconds")


class HttpApp:
    """Answers with one model, and after `take` with another; requests that came before are still answered."""

    def __init__(self, scorer: Scorer, limits: ServerLimits, *, beside: Beside | None = None,
                 clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time,
                 pace: Pace | None = None) -> None:
        """`beside` runs as long as the server does; `pace` says how fast the model is, as far as that is known."""
        self.served = ServerMetrics()
        self.scorer, self.limits = scorer, limits
        self._beside, self._clock, self._now = beside, clock, now
        self._since = now()
        self._bucket, self._turns = Bucket(limits.rate, clock), Turns(_EACH_TURN)
        self.batcher: Batcher[PredictRequest, Answer | Refusal] = Batcher(
            self._score, size=lambda request: len(request.body), most=limits.body_bytes, together=limits.together,
            waiting=limits.waiting, units=lambda request: request.units, within=limits.seconds, pace=pace, clock=clock)
        self.batcher.sizes = self.served.batch
        self.served.model(scorer.servable.about())
        self.app = Starlette(lifespan=self._life, routes=[
            Route("/predict", self._predict, methods=["POST"]), Route("/model", self._model),
            Route("/health", self._health), Route("/metrics", self._metrics)],
            exception_handlers={404: _nowhere, 405: _not_so, 500: _failed})

    def take(self, scorer: Scorer) -> None:
        """Answers with this model from the next batch on."""
        self.served.model(scorer.servable.about())
        self.scorer, self._since = scorer, self._now()

    def _score(self, requests: Sequence[PredictRequest]) -> Sequence[Answer | Refusal]:
        return self.scorer.answer(requests)

    @asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._beside(self)) if self._beside else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _predict(self, http: Http) -> Response:
        began = self._clock()
        await self._turns.mine()
        extra = {}
        try:
            if wait := self._bucket.take():
                extra["retry-after"] = str(math.ceil(wait))
                raise Refusal(429, f"more than {self.limits.rate:g} requests a second; try again in {wait:.1f} s")
            answer = await self._asked(http)
            self.served.answered(len(answer.probabilities), answer.missing)
            response: Response = JSONResponse(answer.to_dict())
        except Full as full:
            response = _said(503, str(full), {"retry-after": str(full.retry_after)})
        except Refusal as refusal:
            response = _said(refusal.status, str(refusal), extra)
            if refusal.status in (408, 413):
                response.headers["connection"] = "close"  # what is still to come is not read
        except ClientDisconnect:
            response = _said(499, "the client went away")
        except Exception:
            self.served.request(500, self._clock() - began)
            raise
        self.served.request(response.status_code, self._clock() - began)
        return response

    async def _asked(self, http: Http) -> Answer:
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
        most = self.limits.body_bytes
        length = http.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > most:
            raise Refusal(413, f"a body of {length[:20]} bytes is larger than {most}")
        parts, size = [], 0
        async for part in http.stream():
            size += len(part)
            if size > most:
                raise Refusal(413, f"the body is larger than {most} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _model(self, _http: Http) -> Response:
        return JSONResponse({**self.scorer.servable.about(), "features": self.scorer.decoder.kinds})

    async def _health(self, _http: Http) -> Response:
        beside = {"reload": self._beside.about()} if self._beside else {}
        return JSONResponse({"ok": True, **self.scorer.servable.about(), "since": at(self._since), **beside})

    async def _metrics(self, _http: Http) -> Response:
        return Response(self.served.text(self.batcher.waiting), media_type=CONTENT_TYPE_LATEST)


def _said(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, headers)


async def _nowhere(http: Http, _error: Exception) -> Response:
    return _said(404, f"no {http.url.path[:60]!r} here{nearest(http.url.path[:60], ROUTES)}")


async def _not_so(http: Http, _error: Exception) -> Response:
    return _said(405, f"{http.url.path} takes {'POST' if http.url.path == '/predict' else 'GET'}")


async def _failed(_http: Http, _error: Exception) -> Response:
    return _said(500, "the server failed on this request; its log says why")
