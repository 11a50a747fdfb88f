"""Requests that a server reads together are read as alone."""

import random

import pytest

from sluice.dlrm.serving import decode
from tests.dlrm.serving import stub
from tests.product import Decoder, Refusal, Spec

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
            b"-NaN",
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
"""Good bodies, the first seven of them, and odd and wrong ones."""


def outcomes(bodies):
    """What the client of each request gets: the refusal, or its rows."""
    return [
        (answer.status, str(answer)) if isinstance(answer, Refusal) else repr(answer.probabilities)
        for answer in stub.scorer(SPEC, "f", most_rows=10).answer(bodies)
    ]


def test_requests_that_are_read_together_are_read_as_alone(monkeypatch):
    expected = {body: outcomes([body])[0] for body in BODIES}
    monkeypatch.setattr(decode, "TOGETHER_BYTES", 0)
    draw = random.Random(1)
    groups = [[first, second] for first in BODIES for second in BODIES]
    groups += [draw.choices(BODIES[:7], k=5) + draw.choices(BODIES, k=1) for _ in range(200)]
    for bodies in groups:
        assert outcomes(bodies) == [expected[body] for body in bodies], bodies


@pytest.mark.parametrize("format", ["tsv", "json"])
def test_an_empty_text_is_a_missing_one_where_the_input_has_no_other(monkeypatch, format):
    spec = Spec.parse(SPEC.text.replace('"json"', f'"{format}"'))
    body = b'{"rows": [{"word": ""}, {"word": "a"}, {}]}'
    for together_bytes in (0, 10**9):
        monkeypatch.setattr(decode, "TOGETHER_BYTES", together_bytes)
        words = stub.decoded(Decoder(spec, "f", most_rows=10), body, body)["word"].to_pylist()
        assert words == 2 * [None if format == "tsv" else "", "a", None]
