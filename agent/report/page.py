"""Writes a run folder as one HTML page that works offline: `write(run)`. Everything is inline."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template

from sluice.agent.report import figures, tables
from sluice.agent.report.format import count, percent, seconds
from sluice.agent.report.outcome import RunOutcome
from sluice.agent.report.story import Story
from sluice.agent.whole_file import replace_file
from sluice.ingest.knobs import format_bytes

_TEMPLATE, _STYLE, _SCRIPT = (
    Path(__file__).with_name(f"report.{kind}") for kind in ("html", "css", "js")
)


def write(run_path: str | os.PathLike[str]) -> Path:
    """Writes `report.html` in the run folder from the present content. Returns its path."""
    path = Path(run_path) / "report.html"
    replace_file(path, page(Story.read(run_path)))
    return path


def written(run_path: str | os.PathLike[str], say: Callable[[str], None]) -> Path | None:
    """Writes the report and returns its path. If it cannot be written, returns None, and the run is not affected."""
    try:
        return write(run_path)
    except OSError as error:
        say(
            f"{error.filename or run_path}: the report cannot be written ({error.strerror or error}); free some disk "
            f"space, then run `sluice report {run_path}`"
        )
        return None


def page(story: Story) -> str:
    """Returns the page of a run as HTML."""
    run, result = story.run, story.outcome
    first, *rest = story.sentences
    name = run.path.resolve().name
    warnings = tuple(dict.fromkeys(str(line["text"]) for line in run.of("warning")))
    return filled(
        title=name,
        name=name,
        headline=first,
        rest=" ".join(rest),
        tiles=_tiles(result, story.period),
        faults=_texts("Faults", result.faults) + _texts("Warnings", warnings),
        charts=figures.hero(story),
        incidents=tables.incidents_section(story.incidents),
        stages=figures.stages(story),
        decisions=tables.decisions(story.changes),
        training=figures.training(run),
        machine=figures.machine(run),
        plan=tables.plan(run),
        config=tables.config(run),
        footer=f"{len(run.events)} events and {len(run.metrics)} measurements over {seconds(result.seconds)}.",
    )


def filled(*, title: str, name: str, headline: str, rest: str, footer: str, **parts: str) -> str:
    """Returns the template filled with these texts, and with `parts` that are HTML. Other parts are empty."""
    texts = {
        "title": f"{title} · Sluice",
        "name": name,
        "whole": headline,
        "rest": rest,
        "footer": footer,
    }
    lead, more = re.split(r"[,;:] |\. (?=[A-Z])", f"{headline}, ", maxsplit=1)
    more = more.removesuffix(", ")
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        defaultdict(str, parts),
        **{key: escape(text) for key, text in texts.items()},
        style=_STYLE.read_text(encoding="utf-8"),
        script=_SCRIPT.read_text(encoding="utf-8"),
        headline=f"<strong>{escape(lead)}</strong>{escape(more[:1].upper() + more[1:])}",
    )


def _tiles(figures: RunOutcome, when: str) -> str:
    """Returns the most important figures of the run, each with its name."""
    tiles = []

    def tile(name: str, value: str, small: str = "") -> None:
        tiles.append(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>"
        )

    if figures.rows_per_s_settled is not None:
        first = figures.rows_per_s_first
        tile(
            f"Rows a second, {when}",
            count(figures.rows_per_s_settled),
            f"{count(first)} before tuning" if figures.changes_faster and first is not None else "",
        )
    if figures.stall_settled is not None:
        tile(
            f"Trainer waits, {when}",
            percent(figures.stall_settled),
            f"{percent(figures.stall_first)} before tuning"
            if figures.changes_faster and figures.stall_first is not None
            else "",
        )
    tile("Decisions", str(figures.decisions))
    if figures.peak_memory is not None:
        tile(
            "Most memory",
            format_bytes(figures.peak_memory),
            f"of {format_bytes(figures.memory_limit)}" if figures.memory_limit else "",
        )
    if figures.auc is not None:
        share = (
            f"{percent(min(1.0, (figures.auc - 0.5) / (figures.bayes_auc - 0.5)))} of the reachable gain"
            if figures.bayes_auc and figures.bayes_auc > 0.5
            else ""
        )
        tile("AUC, held out", f"{figures.auc:.4f}", share)
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _texts(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    items = "".join(f"<p>{escape(text)}</p>" for text in texts)
    return f'<section class="fault"><h2>{title}</h2>{items}</section>'
