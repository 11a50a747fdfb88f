"""What a server does once for many requests, values or writes, counted."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

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


BODIES = [
    b'{"rows": [{"x": 0.5, "n": 3, "word": "a"}, {"x": -1.25e-05, "n": -7}, {}]}',
    b'{"rows": [{"x": 7, "word": "", "n": 9223372036854775807}], "fingerprint": "f"}',
    '{"rows":[{"word":"\u00e9\u2028{}[]:,"}]}'.encode(),
    b'{"rows": [\n{"x": 12345678901234567890}\n]}',
    b'{"rows": []}',
    b'{"rows": [{"word": "\\"\\\\}"}]}',
    b'{"rows": [{"x": 1e-400}, {"x": 9007199254740993}]}',
    *(
        b'{"rows": [{"x": %s}]}' % value
        for value in (
            b"NaN",
            b"-Infinity",
            b"1e400",
            b"-0",
            b"-0.0",
            b"01",
            b"1.",
            b"true",
            b"null",
        )
    ),
    b'{"rows": [{"x": 1%s}]}' % (b"0" * 400),
    b'{"rows": [{"n": -0}, {"n": 9223372036854775808}]}',
    b'{"rows": [{"n": 1, "n": 1}]}',
    b'{"rows": [{"n": 1}], "rows": []}',
    b'{"rows": [{"n": 1.0}]}',
    b'{"rows": [{"word": 5}]}',
    b'{"rows": [{"word": "\\udc00"}]}',
    b'{"rows": [{"word": "\xff"}]}',
    b'{"rows": [{"label": 1}]}',
    b'{"rows": [{"other": 1}]}',
    b'{"rows": [{"n": 1}], "more": 1}',
    b'{"rows": [{"n": 1}], "fingerprint": "g"}',
    b'{"rows": [{"n": 1}], "fingerprint": null}',
    b'{"rows": [null]}',
    b'{"rows": null}',
    b"{}",
    b'{"rows": [%s]}' % b",".join([b"{}"] * 11),
    # These would answer each other's rows if bodies were joined without care.
    b'{"rows": [{"n": 1}]}{"rows": [{"n": 2}]}',
    b'{"rows": [{"n": 1}',
    b'}, {"n": 2}]}',
    b']}{"rows": []}',
    b'{"rows": [{"n": 3, "word": "}',
    b'{"n": 4}]}',
    b'{"rows": [{"n": 7},',
    b'{"n": 8}]}{"rows": []}',
    b'{"rows": [{"n": 5}]}\0{"rows": [{"n": 6}]}',
    b"",
]
"""Bodies that both readers read, that only one reads, and that are wrong."""


def outcomes(decoder, read):
    """What a client sees of requests: the refusal, or the values and the features that were not named."""
    found = []
    for rows in read:
        if isinstance(rows, Refusal):
            found.append((rows.status, str(rows)))
            continue
        try:
            columns = decoder.columns([rows])
        except Refusal as refusal:
            found.append((refusal.status, str(refusal)))
            continue
        found.append(
            (rows.count, dict(rows.missing), repr({n: a.to_pylist() for n, a in columns.items()}))
        )
    return found


def test_requests_that_are_read_together_are_read_as_alone():
    decoder, alone = (Decoder(SPEC, "f", most_rows=10, together_bytes=n) for n in (0, 10**9))
    expected = {body: outcomes(alone, alone.read_all([(JSON, body)]))[0] for body in BODIES}
    draw = random.Random(1)
    groups = [[first, second] for first in BODIES for second in BODIES]
    groups += [draw.choices(BODIES[:7], k=5) + draw.choices(BODIES, k=1) for _ in range(200)]
    for bodies in groups:
        read = decoder.read_all([(JSON, body) for body in bodies])
        assert outcomes(decoder, read) == [expected[body] for body in bodies], bodies


@pytest.mark.parametrize("format", ["tsv", "json"])
def test_an_empty_text_is_a_missing_one_where_the_input_has_no_other(format):
    spec = Spec.parse(SPEC.text.replace('"json"', f'"{format}"'))
    body = b'{"rows": [{"word": ""}, {"word": "a"}, {}]}'
    for together_bytes in (0, 10**9):
        decoder = Decoder(spec, "f", most_rows=10, together_bytes=together_bytes)
        first, second = decoder.read_all([(JSON, body), (JSON, body)])
        assert bool(first.columns) == (together_bytes == 0)
        words = decoder.columns([first, second])["word"].to_pylist()
        assert words == 2 * [None if format == "tsv" else "", "a", None]
