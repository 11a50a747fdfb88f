"""Holds against each other what is said of a run: by the last line of its program, its page, `explain` and the
terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from sluice.agent.report import narrative
from sluice.agent.report.format import count, percent
from sluice.agent.report.narrative import HARDLY
from sluice.agent.report.run_folder import Run
from sluice.ingest.knobs import format_bytes

_EFFECT = re.compile(r"after decision (\d+) there were ([\d,]+) rows/s(?:, ([\d,]+) before)?")


class Page:
    """The texts and figures of a run's page."""

    def __init__(self, html: str) -> None:
        self.headline = unescape(re.search(r'<meta name="description" content="(.*?)">', html)[1])
        self.lead, self.more = map(
            _text, re.search(r"<h1><strong>(.*?)</strong>(.*?)</h1>", html, re.DOTALL).groups()
        )
        self.rest = _text(re.search(r'<p class="rest">(.*?)</p>', html, re.DOTALL)[1])
        self.tiles = {
            _text(name): (_text(value), _text(small))
            for name, value, small in re.findall(
                r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small></dd>", html
            )
        }
        self.decisions, self.occasions = (
            [
                [_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
                for row in re.findall(rf'<tr class="{kind}">(.*?)</tr>', html)
            ]
            for kind in ("decision", "occasion")
        )
        self.verdicts = [
            _text(word)
            for word in re.findall(
                r'<b class="verdict[^"]*">(.*?)</b>',
                re.search(r'<p class="verdicts">(.*?)</p>', html)[1],
            )
        ]
        self.moments = json.loads(re.search(r'class="moments">(.*?)</script>', html)[1])
        self.charts = {
            _text(name): json.loads(data)
            for name, data in re.findall(
                r'<h2>([^<]*)</h2>(?:(?!</?figure).)*?<script type="application/json" class="">(.*?)</script>',
                html,
                re.DOTALL,
            )
        }

    def series(self, chart: str, name: str) -> list[float]:
        """The values of a series of a chart."""
        return next(
            one["value"]
            for panel in self.charts[chart]["panels"]
            for one in panel["series"]
            if one["name"] == name
        )


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


def agree(folder: Path, last: Mapping[str, Any], terminal: str) -> None:
    """Every figure that more than one of them tells is the same in all. `last` is the last line of the program,
    `terminal` all that it said before."""
    run, page = Run.read(folder), Page((folder / "report.html").read_text())
    told, outcome = narrative.tell(run), last["outcome"]
    assert json.loads(json.dumps(narrative.summary(run))) == outcome
    assert page.headline == outcome["headline"]
    assert (
        f"{page.lead} {page.more}".strip(" .").lower()
        == re.sub(r"[,;:] |\. (?=[A-Z])", " ", outcome["headline"], count=1).strip(" .").lower()
    )
    for where in (terminal, told):
        assert outcome["headline"] in where
    assert page.rest in told
    _tiles(page, outcome, last)
    _decisions(page, run, told, terminal)
    assert len(page.moments["bands"]) == len(outcome["occasions"])
    assert [row[1:] for row in page.occasions] == [
        [one["result"] or "too short to judge", one["sentence"]]
        for one in last.get("occasions", outcome["occasions"])
    ]
    for one in outcome["occasions"]:
        assert one["sentence"] in terminal
        assert one["sentence"] in told
    _charts(page, run, outcome, last)


def _tiles(page: Page, outcome: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    before = bool(outcome["changes_faster"]) and outcome["rows_per_s_first"] is not None
    for name, key, form in (
        ("Rows a second", "rows_per_s", count),
        ("Trainer waits", "stall", percent),
    ):
        if outcome[f"{key}_settled"] is not None:
            (tile,) = (value for said, value in page.tiles.items() if said.startswith(f"{name}, "))
            assert tile == (
                form(outcome[f"{key}_settled"]),
                f"{form(outcome[f'{key}_first'])} before tuning" if before else "",
            )
    assert (
        page.tiles["Decisions"][0]
        == str(last["decisions"])
        == str(outcome["decisions"])
        == str(len(page.decisions))
    )
    peak, limit = format_bytes(last["peak_bytes"]), format_bytes(last["memory"]["limit"])
    assert page.tiles["Most memory"] == (peak, f"of {limit}")
    if outcome["stall_last"] is not None:
        keeps_up = outcome["stall_last"] <= HARDLY
        assert any(word.startswith("input keeps up") for word in page.verdicts) == keeps_up
        assert any(word.startswith("input is the bottleneck") for word in page.verdicts) != keeps_up


def _decisions(page: Page, run: Run, told: str, terminal: str) -> None:
    for (number, when, _, moves, why, effect), moment in zip(
        page.decisions, page.moments["decisions"], strict=True
    ):
        assert f"{number}. at {when}: {moves}\n     why: {why}\n     effect: {effect}" in told
        assert moment["text"] == f"{number}. {moves}: {effect}"
        assert f"decision {number}: {why}; now " in terminal
    said = {number: rates for number, *rates in _EFFECT.findall(terminal)}
    for event in run.of("effect"):
        number, rates = (
            str(event["sequence"]),
            [event["rows_per_s_after"], event["rows_per_s_before"]],
        )
        assert said[number] == ["" if rate is None else f"{rate:,.0f}" for rate in rates]
        cell = page.decisions[int(number) - 1][-1]
        assert "not comparable" in cell or all(
            count(rate) in cell for rate in rates if rate is not None
        )


def _charts(page: Page, run: Run, outcome: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    hero = "Rows a second, and waiting for input"
    looks = run.looks()
    assert page.series(hero, "taken by the trainer")[-1] == pytest.approx(
        looks[-1]["rows_per_s"], rel=1e-4
    )
    assert page.series(hero, "waiting")[-1] == pytest.approx(
        min(1.0, looks[-1]["stall"]), rel=1e-4, abs=1e-4
    )
    levels = [
        one
        for panel in page.charts[hero]["panels"]
        for one in panel["series"]
        if one["style"] == "level"
    ]
    if outcome["changes_faster"] and outcome["rows_per_s_first"] is not None:
        assert levels[0]["value"][0] == pytest.approx(outcome["rows_per_s_first"], rel=1e-4)
    for stage, workers in last["knobs"]["workers"].items():
        if stage not in last["knobs"]["fused"]:
            assert page.series(stage, "workers")[-1] == workers
