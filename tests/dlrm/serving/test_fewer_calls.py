"""What a server does once for many requests, values or writes, counted."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from sluice.dlrm.serving import decode
from sluice.dlrm.serving.connections import JoinedWrites
from sluice.dlrm.serving.decode import JSON, Decoder, Refusal
from sluice.dlrm.serving.scorer import PredictRequest, Scorer
from sluice.dlrm.serving.served_model import BadValue
from sluice.etl.spec.spec import Spec

SPEC = Spec.parse("""
[input]
format = "json"
columns = ["label:int", "x:float", "n:int", "word:text"]
[table]
split = {train = 1}
[[column]]
name = "label"
role = "label"
[[column]]
match = "[xn]"
role = "dense"
ops = [{op = "fill", value = 0}]
[[column]]
name = "word"
role = "sparse"
ops = [{op = "hash", size = 10}]
""")


class Transport:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def close(self) -> None:
        self.calls.append("close")

    def is_closing(self) -> bool:
        return "close" in self.calls


def test_a_head_and_its_body_are_one_write_and_come_before_the_end():
    async def written() -> list[object]:
        inner = Transport()
        transport = JoinedWrites(inner, asyncio.get_running_loop())  # type: ignore[arg-type]
        for data in (b"head", b"body"):
            transport.write(data)
        assert inner.calls == []
        await asyncio.sleep(0)
        assert inner.calls == [b"headbody"]
        transport.write(b"last")
        transport.close()
        assert transport.is_closing()
        await asyncio.sleep(0)
        return inner.calls

    assert asyncio.run(written()) == [b"headbody", b"last", "close"]


class Servable:
    """A model that counts its passes and cannot take the number 13."""

    spec, fingerprint = SPEC, ""
    meta = SimpleNamespace(step=1, version=0)

    def __init__(self) -> None:
        self.passes = 0

    def probabilities(self, columns):
        self.passes += 1
        numbers = columns["n"].to_numpy()
        if len(wrong := np.flatnonzero(numbers == 13)):
            raise BadValue(wrong.tolist(), "feature 'n' is 13")
        return numbers / 64


def test_one_bad_row_among_many_requests_costs_few_passes():
    servable = Servable()
    scorer = Scorer(servable, most_rows=10)  # type: ignore[arg-type]
    requests = [PredictRequest(JSON, b'{"rows": [{"n": %d}]}' % n) for n in range(64)]
    answers = scorer.answer(requests)
    assert servable.passes == 13  # two parts of each of six halvings, and the whole
    for number, answer in enumerate(answers):
        if number == 13:
            assert isinstance(answer, Refusal)
            assert str(answer) == "rows[0]: feature 'n' is 13"
        else:
            assert answer.probabilities == [number / 64]


VALUES = [None, 0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**400, 0.5, 1e300, 1e18, True]
VALUES += ["", "a", "\u00e9", "1", [], {}, ["a"]]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("name", ["x", "n", "word", "label"])
def test_a_row_is_taken_for_usual_only_if_it_fits(name, value, monkeypatch):
    decoder = Decoder(SPEC, "", most_rows=10)
    body = json.dumps({"rows": [{name: value}]}).encode()

    def outcome() -> object:
        try:
            return decoder.read(JSON, body)
        except Refusal as refusal:
            return refusal.status, str(refusal)

    found = outcome()
    monkeypatch.setattr(decoder, "_is_plain", lambda _row: False)
    assert found == outcome()


def test_usual_values_are_not_checked_one_by_one(monkeypatch):
    monkeypatch.setattr(decode, "fits", None)
    decoder = Decoder(SPEC, "", most_rows=10)
    rows = [{"x": 0.5, "n": 3, "word": "a"}, {"x": 1, "word": None}, {}]
    read = decoder.read(JSON, json.dumps({"rows": rows}).encode())
    assert read.objects == rows
    assert dict(read.missing) == {"x": 1, "n": 2, "word": 1}
