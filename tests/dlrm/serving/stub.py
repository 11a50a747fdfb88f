"""Requests without a model: `decoded` gives their features, and `scorer` answers each row with its own values. Also
what can be served, and what talks to a server."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow as pa
import torch

from sluice import FeatureTable
from sluice.ingest.batch import Batch
from tests.product import (
    ColumnTransforms,
    Decoder,
    Features,
    FittedState,
    HttpApp,
    Refusal,
    Scorer,
    Servable,
    Serving,
    Spec,
    online_of,
)

GOOD = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def body_of(*rows: dict[str, Any]) -> bytes:
    return json.dumps({"rows": rows}).encode()


def assert_same_features(made: Batch, batch: Any) -> None:
    assert torch.equal(made.dense, batch.dense)
    assert made.values.tolist() == batch.values.tolist()
    assert made.lengths.tolist() == batch.lengths.tolist()


def talk_to(app: HttpApp, talk: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """What `talk` returns, with a client of the application."""

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await talk(http)

    return asyncio.run(run())


def servable(table: FeatureTable, *columns: Any) -> Servable:
    """What `batch` needs of a model of this table, with these embedding tables."""
    state = table.state()
    return Servable(
        path=None,
        meta=SimpleNamespace(dense=tuple(f.name for f in table.fields if f.role == "dense")),
        table=table,
        model=None,
        rows=Serving.open(table),
        features=Features(table.spec(), state or FittedState()),
        online=online_of(table, state),
        transforms=ColumnTransforms.of(table),
        layout=SimpleNamespace(columns=columns),
    )


def decoded(decoder: Decoder, *bodies: bytes) -> dict[str, pa.Array]:
    """Raises the first refusal."""
    counts, columns = decoder.read(bodies, problems := {})
    for row, text in problems.items():
        raise Refusal(422, f"rows[{row}]: {text}")
    for refusal in counts:
        if isinstance(refusal, Refusal):
            raise refusal
    return columns


def scorer(spec: Spec, fingerprint: str = "", most_rows: int = 99) -> Scorer:
    """Its answers to rows that have a problem are left to the scorer."""
    return Scorer(
        SimpleNamespace(
            features=SimpleNamespace(spec=spec),
            meta=SimpleNamespace(step=1, version=0, fingerprint={"layout": fingerprint}),
            about=lambda: {"step": 1, "version": 0, "table_bytes": 0},
            probabilities=lambda columns, _: pa.StructArray.from_arrays(
                list(columns.values()), list(columns)
            ),
        ),
        most_rows=most_rows,
    )
