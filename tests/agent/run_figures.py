"""`assert_same_figures`: a run's last line, page, explanation and terminal show the same figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

from sluice.ingest.knobs import format_bytes
from tests.product import Story, count, percent


def assert_same_figures(folder: Path, last: Mapping[str, Any], terminal: str) -> None:
    """`last` is the last line of the program, `terminal` is everything that it printed before."""
    story, page = Story.read(folder), (folder / "report.html").read_text()
    explained, outcome = story.explanation, last["outcome"]
    assert json.loads(json.dumps(story.summary)) == outcome
    assert outcome["headline"] in unescape(page)
    for text in (terminal, explained):
        for sentence in (
            outcome["headline"],
            *(incident["sentence"] for incident in outcome["incidents"]),
        ):
            assert sentence in text
    assert last["decisions"] == outcome["decisions"] == len(_cells(page, "decision"))
    for number, when, _, moves, why, effect in _cells(page, "decision"):
        assert f"{number}. at {when}: {moves}\n     why: {why}\n     effect: {effect}" in explained
        assert f"decision {number}: {why}; now " in terminal
    assert [row[2] for row in _cells(page, "incident")] == [
        incident["sentence"] for incident in last.get("incidents", outcome["incidents"])
    ]
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small></dd>", page)
    shown = {
        _text(name).split(",")[0]: (_text(value), _text(small)) for name, value, small in tiles
    }
    assert shown["Most memory"] == (
        format_bytes(last["peak_bytes"]),
        f"of {format_bytes(last['memory']['limit'])}",
    )
    for name, key, form in (
        ("Rows a second", "rows_per_s", count),
        ("Trainer waits", "stall", percent),
    ):
        if outcome[f"{key}_settled"] is not None:
            assert shown[name][0] == form(outcome[f"{key}_settled"])


def _cells(page: str, kind: str) -> list[list[str]]:
    """The texts of the page's table rows of this kind."""
    return [
        [_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(rf'<tr class="{kind}">(.*?)</tr>', page)
    ]


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))
