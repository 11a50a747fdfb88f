"""Makes the tables of a run's page, and its coloured verdicts. A narrow screen shows each row as a card."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sluice.agent.report.changes import Change
from sluice.agent.report.format import seconds
from sluice.agent.report.incidents import Incident
from sluice.agent.report.run_folder import Line, Run
from sluice.common.errors import without_keys
from sluice.ingest.knobs import format_bytes

_MOST_OPEN_ROWS = 15
"""A table with more rows is folded."""
TONES = {
    "recovered": "good",
    "as fast as before": "good",
    "the input keeps up": "good",
    "limited by the cores": "warn",
    "still slow": "bad",
    "faster": "good",
    "slower": "bad",
}
"""Verdict → its colour. The others are grey."""


def verdict(word: str, tone: str = "") -> str:
    """Returns a coloured label with this text. Without a `tone`, the text decides the colour."""
    return f'<b class="verdict {tone or TONES.get(word, "")}">{escape(word)}</b>'


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    kind: str = "",
    row: str = "",
    classes: Sequence[str] = (),
) -> str:
    """Returns a table of cells that are HTML.

    `kind` is the CSS class of the table, `row` that of each row, and `classes` are those of the cells of a row."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    opened = [
        f"<td{_attribute('class', style)}{_attribute('data-name', name)}>"
        for name, style in itertools.zip_longest(head, classes, fillvalue="")
    ]
    lines = "".join(
        f"<tr{_attribute('class', row)}>"
        + "".join(f"{td}{cell}</td>" for td, cell in zip(opened, cells, strict=True))
        + "</tr>"
        for cells in rows
    )
    return f"<table{_attribute('class', kind)}><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape(value)}"' if value else ""


def incidents_section(incidents: Sequence[Incident]) -> str:
    """Returns the section for the incidents. Empty if there were none."""
    if not incidents:
        return ""
    rows = [[i.label, verdict(i.verdict), escape(i.sentence)] for i in incidents]
    inside = table(("", "result", "effect"), rows, kind="story", row="incident", classes=("o", "v"))
    results = [incident.verdict for incident in incidents]
    return f"<section><h2>What happened</h2>{_folded(inside, results)}</section>"


def decisions(changes: Sequence[Change]) -> str:
    """Returns the section for all decisions."""
    inside = '<p class="empty">None: the knobs stayed as they were.</p>'
    if changes:
        rows = [
            [
                str(c.number),
                seconds(c.at),
                verdict(c.result),
                *map(escape, (c.moves, c.reason, c.effect)),
            ]
            for c in changes
        ]
        inside = table(
            ("", "when", "result", "change", "why", "effect"),
            rows,
            kind="story",
            row="decision",
            classes=("n", "t", "v", "m"),
        )
    return f"<section><h2>Decisions</h2>{_folded(inside, [c.result for c in changes])}</section>"


def plan(run: Run) -> str:
    """Returns the section for the sharding plan. Empty if the run has none."""
    event = next(
        (e for e in reversed([*run.of("plan"), *run.of("start")]) if e.get("plan")), run.config
    )
    tables = event.get("plan")
    if not tables:
        return ""
    about = [
        f"{text} {format_bytes(int(event[key]))}"
        for key, text in (
            ("state_bytes", "the tables' optimiser keeps"),
            ("gradient_bytes", "a rank holds gradients of at most"),
            ("bytes_per_step", "a rank sends, in a step,"),
        )
        if key in event
    ]
    if "balance" in event:
        about.append(
            "largest over mean load of a rank: {:.2f} in bytes, {:.2f} in reads".format(
                *event["balance"]
            )
        )
    note = f"<p>{escape('; '.join(about))}</p>" if about else ""
    head = list(dict.fromkeys(key for row in tables for key in row))
    rows = [[_text(row[key], key) if key in row else "" for key in head] for row in tables]
    return (
        f"<section><details><summary>Sharding plan, {len(rows)} tables</summary>{table(head, rows)}{note}"
        "</details></section>"
    )


def config(run: Run) -> str:
    """Returns the section for the run's configuration."""

    def flat(settings: Line, before: str = "") -> list[list[str]]:
        return [
            row
            for name, value in settings.items()
            for row in (
                flat(value, f"{before}{name}.")
                if isinstance(value, Mapping) and value
                else [[escape(before + name), _text(value, name)]]
            )
        ]

    rows = flat(
        {name: value for name, value in run.config.items() if name not in ("plan", "format")}
    )
    return (
        f"<section><details><summary>Run configuration</summary>"
        f"{table(('', ''), rows, kind='settings', classes=('m',))}</details></section>"
    )


def _folded(rows: str, results: Sequence[str]) -> str:
    """Returns the table. A long table is folded under the counts of its results."""
    if len(results) <= _MOST_OPEN_ROWS:
        return rows
    words = " ".join(
        verdict(f"{number} {result}", TONES.get(result, ""))
        for result, number in Counter(results).items()
    )
    return f"<details><summary>{len(results)} in all: {words}</summary>{rows}</details>"


def _text(value: Any, name: str = "") -> str:
    """Returns the value of a setting as HTML. `name` is the setting's name: it shows whether the value is in bytes."""
    if value is None or value in ("", []):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return escape(
            format_bytes(value) if name.endswith(("bytes", "memory_limit")) else f"{value:,}"
        )
    if isinstance(value, list) and not any(isinstance(item, (list, Mapping)) for item in value):
        return escape(", ".join(map(str, value)))
    if isinstance(value, str):
        return escape(without_keys(value))
    return escape(json.dumps(value, ensure_ascii=False))
