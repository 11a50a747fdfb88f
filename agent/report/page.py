"""A run folder as one HTML page that opens offline: `write(run)`. Everything is inline; nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from sluice.agent.report import charts, ladder
from sluice.agent.report.charts import Mark, Points, Series, chart
from sluice.agent.report.format import count, percent, seconds
from sluice.agent.report.incidents import Incident, occasions
from sluice.agent.report.narrative import DecisionEffect, RunOutcome, changes, outcome, sentences
from sluice.agent.report.run_folder import Run, replace_text
from sluice.ingest.knobs import format_bytes

_TEMPLATE = Path(__file__).with_name("report.html")
_PARTS = ("tiles", "faults", "charts", "occasions", "decisions", "plan", "config")
_HEADROOM = "headroom: what the trainer would take if it never waited"
_OFF_SCALE = 3.0  # times the highest use: a limit above that would flatten the curves


def write(run_path: str | os.PathLike[str]) -> Path:
    """Makes `report.html` in the run folder from whatever is there so far."""
    run = Run.read(run_path)
    path = run.path / "report.html"
    replace_text(path, page(run))
    return path


def written(run_path: str | os.PathLike[str], say: Callable[[str], None]) -> Path | None:
    """Writes the report and returns where it is; None if it could not be written, which does the run no harm."""
    try:
        return write(run_path)
    except OSError as error:
        say(f"{error.filename or run_path}: the report cannot be written ({error.strerror or error}); make room, then "
            f"`sluice report {run_path}` writes it")
        return None


def page(run: Run) -> str:
    figures, story, incidents = outcome(run), changes(run), occasions(run)
    first, *rest = sentences(run)
    name = run.path.resolve().name
    return filled(
        title=name, name=name, verdict=first, rest=" ".join(rest), tiles=_tiles(figures), faults=_faults(figures),
        charts=_charts(run, story, incidents, figures.seconds), occasions=_occasions(incidents),
        decisions=_decisions(story), plan=_plan(run) + ladder.section(run), config=_config(run),
        footer=f"{len(run.events)} events and {len(run.metrics)} measurements over {seconds(figures.seconds)}.")


def filled(*, title: str, name: str, verdict: str, rest: str, footer: str, **parts: str) -> str:
    """The template filled with these texts, and with the given `parts`, which are HTML."""
    texts = {"title": f"{title} · Sluice", "name": name, "verdict": verdict, "rest": rest, "footer": footer}
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        {**dict.fromkeys(_PARTS, ""), **parts}, **{key: escape(text) for key, text in texts.items()})


def _tiles(figures: RunOutcome) -> str:
    tiles = []

    def tile(name: str, value: str, small: str = "") -> None:
        tiles.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>")

    if figures.rows_per_s_settled is not None:
        first = figures.rows_per_s_first
        tile("Rows a second, settled", count(figures.rows_per_s_settled),
             f"{count(first)} before tuning" if figures.changes_settling and first is not None else "")
    if figures.stall_settled is not None:
        tile("Trainer waits for input", percent(figures.stall_settled),
             f"{percent(figures.stall_first)} before tuning"
             if figures.changes_settling and figures.stall_first is not None else "")
    tile("Decisions", str(figures.decisions))
    if figures.peak_memory is not None:
        tile("Most memory", format_bytes(figures.peak_memory),
             f"of {format_bytes(figures.memory_limit)}" if figures.memory_limit else "")
    if figures.auc is not None:
        share = f"{(figures.auc - 0.5) / (figures.bayes_auc - 0.5):.0%} of the reachable gain" \
            if figures.bayes_auc and figures.bayes_auc > 0.5 else ""
        tile("AUC, held out", f"{figures.auc:.4f}", share)
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _faults(figures: RunOutcome) -> str:
    if not figures.faults:
        return ""
    items = "".join(f"<p>{escape(text)}</p>" for text in figures.faults)
    return f'<section class="fault"><h2>Faults</h2>{items}</section>'


def _points(lines: Sequence[Mapping[str, Any]], *path: str) -> Points:
    """The points (at, value) of all lines that have a value at this path."""
    points = []
    for line in lines:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            points.append((float(line["at"]), float(value)))
    return points


def _headroom(loader: Sequence[Mapping[str, Any]]) -> Points:
    """The rate that the trainer would take, from its latest computing times; empty if that is far beyond what it
    gets."""
    demand = _points(loader, "demand_rows_per_s")
    most = max((rate for _, rate in _points(loader, "rows_per_s")), default=0.0)
    if not demand or demand[-1][1] > _OFF_SCALE * most:
        return []
    return [(at, max(rate for _, rate in demand[max(0, n - 4):n + 1])) for n, (at, _) in enumerate(demand)]


def _names(lines: Sequence[Mapping[str, Any]], *path: str) -> list[str]:
    """The keys found at this path in any line, in order."""
    names: dict[str, None] = {}
    for line in lines:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        names.update(dict.fromkeys(value or ()))
    return list(names)


def _charts(run: Run, story: Sequence[DecisionEffect], incidents: Sequence[Incident], end: float) -> str:
    loader, train, evaluations = run.of("loader"), run.of("train"), run.of("eval")
    taking = run.looks() or loader  # where each look has an evaluation in it, they are all that is known
    marks = [Mark(at=c.at, label=str(c.number), title=f"{c.number}. {c.moves}\n{c.reason}\n{c.effect}") for c in story]
    marks += [Mark(at=o.at, label=o.label, title=f"{o.label}. {o.sentence}", kind="occasion") for o in incidents]
    # A decision changes its knobs at once; measurements show them only a tick later.
    turned = sorted([*loader, *({"at": d["at"], "knobs": d.get("after")} for d in run.of("decision"))],
                    key=lambda line: float(line["at"]))
    stages = _names(loader, "stages")
    used, limit = _points(loader, "memory_used"), _points(loader, "memory_limit")
    memory, note = [Series(name="in use", points=used)], ""
    if limit and used and limit[-1][1] <= _OFF_SCALE * max(y for _, y in used):
        memory.append(Series(name="limit", points=limit, style="limit"))
    elif limit:
        note = f"limit {format_bytes(limit[-1][1])}, beyond the scale"
    if held_back := loader[-1].get("held_back") if loader else 0:
        pressed = loader[-1].get("held_back_pressure", 0)
        waited = (f"work waited for it {held_back} times: {held_back - pressed} for the limit, {pressed} as the system "
                  "was short of memory")
        note = f"{note}; {waited}" if note else waited
    cores = [Series(name="in use", points=_points(loader, "cpu")),
             Series(name="at hand", points=_points(loader, "cpu_quota"), style="limit")]
    busy = [Series(name=name, points=[(at, min(1.0, value / workers)) for (at, value), (_, workers) in
                                      zip(_points(loader, "stages", name, "busy"),
                                          _points(loader, "stages", name, "workers"), strict=False) if workers])
            for name in stages]
    mine = f"of each of {run.ranks} ranks" if run.ranks > 1 else ""
    splits = dict.fromkeys(str(e.get("split", "")) for e in evaluations)
    figures = [
        chart("Rows a second", [Series(name="taken by the trainer", points=_points(taking, "rows_per_s")),
                                Series(name="headroom", points=_headroom(taking), style="limit")], marks, end=end,
              axis=charts.ROWS, note="; ".join(filter(None, [
                  _whose(run), _HEADROOM if _headroom(taking) else ""]))),
        chart("Time the trainer waits for input", [Series(name="stall", points=_points(taking, "stall"))], marks,
              end=end, axis=charts.SHARE),
        chart("Workers", [Series(name=name, points=_points(turned, "knobs", "workers", name), style="step")
                          for name in _names(turned, "knobs", "workers")], marks, end=end, axis=charts.WHOLE,
              note=mine),
        chart("Buffers", [Series(name="read-ahead", points=_points(turned, "knobs", "read_ahead_bytes"), style="step"),
                          Series(name="prefetch", points=_points(turned, "knobs", "prefetch_bytes"), style="step")],
              marks, end=end, axis=charts.BYTES, note=mine),
        chart("Memory", memory, marks, end=end, axis=charts.BYTES, note=note),
        chart("Workers at useful work", busy, marks, end=end, axis=charts.SHARE,
              note="share of each stage's; near 100 %: the bottleneck"),
        chart("Cores", cores, marks, end=end, axis=charts.WHOLE, note=mine),
        chart("Training loss", [Series(name="loss", points=_points(train, "loss"))], (), end=end, axis=charts.SCORE),
        chart("AUC", [Series(name=split or "AUC", style="dots",
                             points=_points([e for e in evaluations if str(e.get("split", "")) == split], "auc"))
                      for split in splits], (), end=end, axis=charts.SCORE),
    ]
    return "\n".join(figures)


def _whose(run: Run) -> str:
    """Whose rows are counted: a Loader writes down its own rank's alone."""
    ranks = run.config.get("ranks")
    if run.ranks > 1:
        return f"of all {run.ranks} ranks"
    return f"of one rank; there are {ranks}" if isinstance(ranks, int) and ranks > 1 else ""


def _table(head: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    """`kind` is `story` for rows that a narrow screen shows as paragraphs."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (f'<div class="wide"><table class="{kind}"><thead><tr>{names}</tr></thead><tbody>{"".join(rows)}</tbody>'
            "</table></div>")


def _occasions(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return ""
    rows = [f'<tr class="occasion"><td class="o">{o.label}</td><td class="m">{escape(o.result or "too short to say")}'
            f"</td><td>{escape(o.sentence)}</td></tr>" for o in incidents]
    return f"<section><h2>What happened</h2>{_table(('', 'result', 'what came of it'), rows, 'story')}</section>"


def _decisions(story: Sequence[DecisionEffect]) -> str:
    rows = [f'<tr class="decision"><td class="n">{c.number}</td><td class="t">{seconds(c.at)}</td>'
            f'<td class="m">{escape(c.moves)}</td><td>{escape(c.reason)}</td><td>{escape(c.effect)}</td></tr>'
            for c in story]
    inside = _table(("", "when", "change", "why", "what came of it"), rows, "story") if rows else \
        '<p class="empty">None: the knobs stayed as they were.</p>'
    return f"<section><h2>Decisions</h2>{inside}</section>"


def _text(value: Any) -> str:
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _plan(run: Run) -> str:
    event = next((e for e in reversed([*run.of("plan"), *run.of("start")]) if e.get("plan")), run.config)
    plan = event.get("plan")
    if not plan:
        return ""
    about = [f"{text} {format_bytes(int(event[key]))}" for key, text in (
        ("state_bytes", "the tables' optimiser keeps"), ("gradient_bytes", "a rank holds gradients of at most"),
        ("bytes_per_step", "a rank sends, in a step,")) if key in event]
    if "balance" in event:
        about.append("largest over mean load of a rank: {:.2f} in bytes, {:.2f} in reads".format(*event["balance"]))
    note = f'<p>{escape("; ".join(about))}</p>' if about else ""
    if isinstance(plan, Mapping):
        plan = [{"table": name, **(value if isinstance(value, Mapping) else {"sharding": value})}
                for name, value in plan.items()]
    if not (isinstance(plan, list) and all(isinstance(row, Mapping) for row in plan)):
        return f"<section><h2>Sharding plan</h2><p>{_text(plan)}</p></section>"
    head = list(dict.fromkeys(key for row in plan for key in row))
    rows = ["".join(["<tr>", *(f"<td>{_text(row.get(key, ''))}</td>" for key in head), "</tr>"]) for row in plan]
    return f"<section><h2>Sharding plan</h2>{_table(head, rows)}{note}</section>"


def _config(run: Run) -> str:
    rows = [f'<tr><td class="m">{escape(name)}</td><td>{_text(value)}</td></tr>'
            for name, value in run.config.items() if name not in ("plan", "format")]
    return f"<section><details><summary>Run configuration</summary>{_table(('', ''), rows)}</details></section>"
