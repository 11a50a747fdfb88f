"""Requests over HTTP that are not as they should be: each gets the status that says what to change."""

import asyncio
import gzip
import re

import httpx
import pytest

from sluice.dlrm.serving.http import METHODS
from sluice.dlrm.serving.scorer import Answer
from tests.dlrm import clicks_table
from tests.dlrm.serving import stub
from tests.product import HttpApp, Scorer, ServerLimits, Spec
from tests.raises import MISTAKES, assert_names

JSON = "application/json"
GOOD = b'{"rows": [{"C1": "a:b"}, {}]}'


def clicks_scorer() -> Scorer:
    return stub.scorer(Spec.parse(clicks_table.spec_text()))


def features(reply: httpx.Response) -> list[dict[str, object]]:
    """The features of each row that the scorer got."""
    return [
        {name: value for name, value in row.items() if value is not None}
        for row in reply.json()["probabilities"]
    ]


def asked(*requests: tuple[str, str, dict[str, object]]) -> list[httpx.Response]:
    """What a server answers to requests of method, path and what else they bring."""

    async def talk(http: httpx.AsyncClient) -> list[httpx.Response]:
        return [await http.request(method, path, **more) for method, path, more in requests]

    return stub.talk_to(HttpApp(clicks_scorer(), ServerLimits()), talk)


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
    assert features(posted(GOOD)) == [{"C1": "a:b"}, {}]
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
        *((body.encode(), *rest) for body, *rest in MISTAKES["request"]),
        (b'{"rows": [{"C1": "a:b", "I1": ' + b"1" * 5000 + b"}]}", 422, ["rows[0]", "'I1'"]),
        (b'{"rows": [{"C1": "\xe9"}]}', 400, ["not JSON", "utf-8"]),
        (GOOD.decode().encode("utf-16"), 400, ["not JSON", "utf-8"]),
        (b"{" * 100_000, 400, ["not JSON"]),
        (b'{"rows": [{"I1": 1' + b"0" * 5000 + b"}]}", 422, ["rows[0]", "whole number"]),
        (stub.body_of(*[{}] * 100), 413, [100, 99]),
    ],
)
def test_a_bad_request_is_a_status_and_a_line(body, status, facts):
    reply = posted(body)
    error = reply.json()["error"]
    assert reply.status_code == status
    assert_names(error, *facts)
    assert "\n" not in error
    assert len(error) < 300


@pytest.mark.parametrize(
    "body",
    [
        '{"%s": 1, "rows": []}',
        '{"rows": [{"%s": 1}]}',
        '{"rows": [{"I1": "%s"}]}',
        '{"rows": [{"%s": 1, "%s": 2}]}',
    ],
)
def test_an_error_shows_sixty_letters_of_what_is_wrong(body):
    shown = posted(body.replace("%s", "x" * 61).encode()).json()["error"]
    assert max(map(len, re.findall("x+", shown))) == 60 - ('"I1"' in body)  # and a quotation mark


def test_an_error_has_the_letters_of_a_name_as_they_are():
    assert "größe" in posted('{"rows": [{"größe": 1}]}'.encode()).text


def test_a_body_that_is_too_large_is_refused_before_it_is_read_and_one_without_a_length_at_the_limit():
    async def nothing():
        raise AssertionError("the body is read")

    def refused(receive, *headers):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"path": "/predict", "method": "POST", "headers": headers}
        app = HttpApp(clicks_scorer(), ServerLimits(max_body=100))
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
    reply = posted(b'{"rows": [{"C1": "a:1", "C5": "\\":", "tags": ["x:y"]}]}')
    assert features(reply) == [{"C1": "a:1", "C5": '":', "tags": ["x:y"]}]
    assert posted(b"\xef\xbb\xbf" + GOOD).status_code == 200


def test_the_page_has_every_status_and_field(repo):
    code = "".join(path.read_text() for path in (repo / "dlrm/serving").glob("*.py"))
    page = (repo / "docs/serving.md").read_text()
    statuses = ["200", *re.findall(r"\b(?:Refusal|_answer_and_close)\(\s*(\d{3}),", code)]
    rows = re.findall(r"^\| ([\d, ]+) \|", page, re.M)
    assert {status for row in rows for status in row.split(", ")} == set(statuses)
    fields = {*Answer._fields, "rows", "fingerprint"}
    assert [name for name in fields if f"`{name}`" not in page] == []


@pytest.mark.parametrize("others", [0, 3])
def test_a_text_that_is_too_long_is_refused_by_name_and_other_requests_are_read(others):
    long, longest = (stub.body_of({"C1": "a"}, {"C1": "é" * size}) for size in (2**19 + 1, 2**19))
    refusal, *answers = clicks_scorer().answer([long, longest] + [GOOD] * others)
    assert refusal.status == 422
    assert_names(str(refusal), "rows[1]", "C1", "1,048,576")
    assert [len(answer.probabilities) for answer in answers] == [2] * (1 + others)
