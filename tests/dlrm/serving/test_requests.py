"""Requests over HTTP that are not as they should be: each gets the status that says what to change."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from types import SimpleNamespace

import httpx
import pytest

from sluice.dlrm.serving.decode import Decoder, Refusal
from sluice.dlrm.serving.http import METHODS, HttpApp
from sluice.dlrm.serving.scorer import Answer
from sluice.dlrm.serving.server import ServerLimits
from sluice.etl.spec.spec import Spec
from tests.dlrm import clicks_table
from tests.raises import assert_names

JSON = "application/json"
GOOD = b'{"rows": [{"C1": "a:b"}, {}]}'


class CountingScorer:
    """Answers each row with its number of features, by the decoder of a server."""

    def __init__(self) -> None:
        self.missing = {}
        self.servable = SimpleNamespace(about=lambda: {"step": 1, "version": 0, "table_bytes": 0})
        self.decoder = Decoder(Spec.parse(clicks_table.spec_text()), "", most_rows=99)

    def answer(self, bodies):
        (count,), rows = self.decoder.read_all(bodies)
        if isinstance(count, Refusal):
            return [count]
        counts = [len(row) - list(row.values()).count(None) for row in rows.to_pylist()]
        return [Answer(probabilities=counts, step=1, version=0)]


def asked(*requests: tuple[str, str, dict[str, object]]) -> list[httpx.Response]:
    """What a server answers to requests of method, path and what else they bring."""

    async def talk() -> list[httpx.Response]:
        app = HttpApp(CountingScorer(), ServerLimits())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://here"
        ) as http:
            return [await http.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(talk())


def posted(body: bytes, content_type: str = JSON, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    (reply,) = asked(
        ("POST", "/predict", {"content": body, "headers": {"content-type": content_type, **named}})
    )
    return reply


def test_each_path_says_which_methods_it_takes():
    for path, methods in METHODS.items():
        for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
            (reply,) = asked((method, path, {}))
            if method not in methods:
                assert (reply.status_code, reply.headers["allow"]) == (405, ", ".join(methods))
            elif path != "/predict":
                assert (reply.status_code, "content-type" in reply.headers) == (200, True)


def test_a_body_is_taken_as_it_comes():
    assert posted(GOOD).json()["probabilities"] == [1.0, 0.0]
    assert posted(GOOD, content_encoding="identity").status_code == 200
    for encoding in ("gzip", "br", "deflate, gzip"):
        reply = posted(gzip.compress(GOOD), content_encoding=encoding)
        assert reply.status_code == 415
        assert_names(reply.json()["error"], f"Content-Encoding {encoding!r}", "compression")


@pytest.mark.parametrize(
    ("content_type", "fact"),
    [
        (f"{JSON}; charset=utf-8", ""),
        ("", "application/json"),
        ("text/plain", "'text/plain'"),
    ],
)
def test_another_content_type_is_415(content_type, fact):
    reply = posted(GOOD, content_type)
    assert reply.status_code == (415 if fact else 200)
    assert fact in reply.json().get("error", "")


@pytest.mark.parametrize(
    ("body", "status", "facts"),
    [
        (b'{"rows": [{"C1": "a"}, {"C1": "a", "C5": "b", "C1": "c"}]}', 422, ["'C1'", "twice"]),
        (b'{"rows": [{"C1": "a:b", "C\\u0031": "a"}]}', 422, ["'C1'", "twice"]),
        (b'{"rows": [], "rows": [{}]}', 422, ["'rows'", "twice"]),
        (b'{"rows": [{"C1": 12}]}', 422, ["rows[0]", "'C1'", 'write "12"']),
        (b'{"rows": [{"C1": true}]}', 422, ["rows[0]", "'C1'", 'write "true"']),
        (b'{"rows": [{}, {"I5": 1e999}]}', 422, ["rows[1]", "'I5'", "64 bits"]),
        (b'{"rows": [{"I1": "three"}]}', 422, ["rows[0]", "'I1'", '"three"', "without quotes"]),
        (b'{"rows": [{"I5": NaN}]}', 400, ["NaN", "send null"]),
        (b'{"rows": [{"C1": "\xe9"}]}', 400, ["not JSON", "utf-8"]),
        (GOOD.decode().encode("utf-16"), 400, ["not JSON", "utf-8"]),
    ],
)
def test_a_value_that_readers_may_take_for_another_is_refused(body, status, facts):
    reply = posted(body)
    assert reply.status_code == status
    assert_names(reply.json()["error"], *facts)


def test_a_body_that_is_too_large_is_refused_before_it_is_read_and_one_without_a_length_at_the_limit():
    async def nothing():
        raise AssertionError("the body is read")

    def refused(receive, *headers):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"path": "/predict", "method": "POST", "headers": headers}
        app = HttpApp(CountingScorer(), ServerLimits(max_body=100))
        asyncio.run(app(scope, receive, send))
        assert sent[0]["status"] == 413
        assert (b"connection", b"close") in sent[0]["headers"]
        assert b"larger than 100 bytes" in sent[1]["body"]

    refused(nothing, (b"content-length", b"101"))
    messages = iter([{"type": "http.request", "body": b"x" * 60, "more_body": True}] * 2)

    async def receive():
        return next(messages)

    refused(receive)


def test_colons_in_texts_are_no_keys_and_a_mark_at_the_head_is_skipped():
    assert posted(b'{"rows": [{"C1": "a:1", "C5": "\\":", "tags": ["x:y"]}]}').json()[
        "probabilities"
    ] == [3.0]
    assert posted(b"\xef\xbb\xbf" + GOOD).status_code == 200


def test_the_page_has_every_status_and_field(repo):
    code = "".join(path.read_text() for path in (repo / "dlrm/serving").glob("*.py"))
    page = (repo / "docs/serving.md").read_text()
    statuses = ["200", *re.findall(r"\b(?:Refusal|_answer_and_close)\(\s*(\d{3}),", code)]
    rows = re.findall(r"^\| ([\d, ]+) \|", page, re.M)
    assert {status for row in rows for status in row.split(", ")} == set(statuses)
    fields = Answer(probabilities=[], step=1, version=0).to_dict().keys() | {"rows", "fingerprint"}
    assert [name for name in fields if f"`{name}`" not in page] == []


@pytest.mark.parametrize("others", [0, 3])
def test_a_text_that_is_too_long_is_refused_by_name_and_other_requests_are_read(others):
    decoder = Decoder(Spec.parse(clicks_table.spec_text()), "", most_rows=99)
    long, longest = (
        json.dumps({"rows": [{"C1": "a"}, {"C1": "é" * size}]}).encode()
        for size in (2**19 + 1, 2**19)
    )
    (refusal, *counts), rows = decoder.read_all([long, longest] + [GOOD] * others)
    assert refusal.status == 422
    assert_names(str(refusal), "rows[1]", "C1", "1,048,576")
    assert (counts, len(rows)) == ([2] * (1 + others), 2 + 2 * others)
