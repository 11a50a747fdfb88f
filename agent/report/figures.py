"""The charts of a run's page: `hero` (the overview), `stages`, `training` and `machine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from sluice.agent.report import charts
from sluice.agent.report.charts import Axis, Panel, Points, Series, chart
from sluice.agent.report.format import percent
from sluice.agent.report.incidents import SMALL_STALL
from sluice.agent.report.run_folder import Line, Run
from sluice.agent.report.story import Story
from sluice.agent.report.tables import TONES, verdict
from sluice.ingest.knobs import format_bytes

_OFF_SCALE = 3.0
"""A limit above this many times the highest use is not drawn, because it would flatten the curves."""
_BUSY = 0.9
"""While the trainer waits, a stage whose workers are busy for this share of their time is the bottleneck."""


def hero(story: Story) -> str:
    """Returns the overview chart, after the decisions and incidents that all charts show."""
    run, figures = story.run, story.outcome
    next_at = [*(incident.at for incident in story.incidents[1:]), figures.seconds]
    moments = {
        "decisions": [
            {"at": c.at, "label": str(c.number), "text": f"{c.number}. {c.moves}: {c.effect}"}
            for c in story.changes
        ],
        "bands": [
            {
                "from": incident.at,
                "to": incident.ends_at(following),
                "label": incident.label,
                "what": incident.what,
                "text": f"{incident.label}. {incident.sentence}",
                "tone": TONES.get(incident.result, ""),
            }
            for incident, following in zip(story.incidents, next_at, strict=False)
        ],
    }
    looks = run.looks() or run.of("loader")
    before, first = "before tuning", figures.rows_per_s_first
    if figures.changes_faster and first is not None:
        knobs = story.part.of("decision")[0].get("before") or {}
        if set(knobs.get("workers", {}).values()) == {1}:
            before = "with one worker a stage"
    else:
        first = None
    rates = [
        _series("taken by the trainer", "area", looks, "rows_per_s"),
        Series(name="possible without waiting", points=_headroom(looks), style="limit"),
        Series(name=before, points=[] if first is None else [(0.0, first)], style="level"),
    ]
    waits = [_series("waiting", "area", looks, "stall")]
    # A Loader records only its own rank.
    ranks = run.config.get("ranks")
    of_one = f"of one rank; there are {ranks}" if isinstance(ranks, int) and ranks > 1 else ""
    return charts.embedded(moments, "moments") + chart(
        "Rows a second, and waiting for input",
        Panel(name="rows a second", axis=charts.ROWS, series=rates),
        Panel(name="time that the trainer waits for input", axis=charts.SHARE, series=waits),
        kind="hero",
        note=f"of all {run.ranks} ranks" if run.ranks > 1 else of_one,
    )


class _Stage(NamedTuple):
    """A stage over time."""

    name: str
    workers: Points
    shares: Points
    """The share of its workers' time at useful work."""
    busy: float | None
    """The mean of `shares` in the last third of the judged part. None: not measured."""


def stages(story: Story) -> str:
    """Returns a small chart for each stage: its workers, and the share of their time at useful work."""
    shown = _stages(story)
    if not shown:
        return ""
    stall = story.outcome.stall_last
    busiest = max(shown, key=lambda stage: (stage.busy or 0.0, stage.name))
    waits = stall is not None and stall > SMALL_STALL and (busiest.busy or 0.0) >= _BUSY
    backends = (_knobs_over_time(story.run)[-1].get("knobs") or {}).get("backend") or {}
    drawn = "".join(
        _stage_chart(stage, backends.get(stage.name) == "process", waits and stage is busiest)
        for stage in shown
    )
    about = "Top: number of workers. Bottom: share of time spent working"
    about = ", ".join(filter(None, [about, _of_each(story.run)]))
    return (
        f'<section class="bare"><h2>Workers of each stage</h2><p class="empty">{about}</p>'
        f'<div class="small">{drawn}</div></section>'
    )


def _stages(story: Story) -> list[_Stage]:
    """Returns the stages whose workers are known."""
    knobs = _knobs_over_time(story.run)
    names = dict.fromkeys(
        name for line in knobs for name in (line.get("knobs") or {}).get("workers", ())
    )
    looks = story.part.looks()
    late = looks[-max(1, len(looks) // 3) :]
    since = late[0]["at"] if late else inf
    loader = story.run.of("loader")
    found = []
    for name in names:
        busy, workers = (_points(loader, "stages", name, key) for key in ("busy", "workers"))
        shares = [
            (at, min(1.0, value / n))
            for (at, value), (_, n) in zip(busy, workers, strict=False)
            if n
        ]
        settled = [share for at, share in shares if at >= since]
        if points := _points(knobs, "knobs", "workers", name):
            found.append(_Stage(name, points, shares, fmean(settled) if settled else None))
    return found


def _stage_chart(stage: _Stage, in_processes: bool, is_bottleneck: bool) -> str:
    """Returns the small chart of a stage."""
    first, now = (int(count) for _, count in (stage.workers[0], stage.workers[-1]))
    unit = "process" if in_processes else "worker"
    if now != 1:
        unit += "es" if in_processes else "s"
    note = f"{first} → {now} {unit}" if first != now else f"{now} {unit}"
    return chart(
        stage.name,
        Panel(
            axis=charts.WHOLE, series=[Series(name="workers", points=stage.workers, style="step")]
        ),
        Panel(axis=charts.SHARE, series=[Series(name="at work", points=stage.shares)]),
        kind="part",
        note=note if stage.busy is None else f"{note}, busy {percent(stage.busy)}",
        corner=verdict("the bottleneck", "bad") if is_bottleneck else " ",
    )


def training(run: Run) -> str:
    """Returns the charts of the training loss and the AUC."""
    by_split: dict[str, list[Line]] = {}
    for evaluation in run.of("eval"):
        by_split.setdefault(str(evaluation.get("split", "")), []).append(evaluation)
    aucs = [_series(split or "AUC", "dots", lines, "auc") for split, lines in by_split.items()]
    loss = _series("loss", "line", run.of("train"), "loss")
    return _side_by_side(
        "Training",
        _chart("Training loss", charts.SCORE, [loss]),
        _chart("AUC", charts.SCORE, aucs),
    )


def machine(run: Run) -> str:
    """Returns the charts of memory, buffers, cores and remote workers."""
    loader = run.of("loader")
    last = loader[-1] if loader else {}
    each = _of_each(run)
    knobs = _knobs_over_time(run)
    buffers = [
        _series("read-ahead", "step", knobs, "knobs", "read_ahead_bytes"),
        _series("prefetch", "step", knobs, "knobs", "prefetch_bytes"),
    ]
    cores = [
        _series("in use", "area", loader, "cpu"),
        _series("available", "limit", loader, "cpu_quota"),
    ]
    drawn = [
        _memory_chart(loader, last),
        _chart("Buffers", charts.BYTES, buffers, each),
        _chart("Cores", charts.WHOLE, cores, each),
    ]
    if remote := last.get("elsewhere"):
        workers = [
            _series(name, "step", loader, "elsewhere", name) for name in ("workers", "starting")
        ]
        note = (
            f"they sent {format_bytes(remote['bytes'])} for {remote['core_s']:,.0f} core-seconds; "
            f"{remote['retries']:,} requests were repeated, and {remote['hedges']:,} also went to a second worker "
            "because the first was slow"
        )
        drawn.append(_chart("Remote workers", charts.WHOLE, workers, note))
    return _side_by_side("Memory and cores", *drawn)


def _memory_chart(loader: Sequence[Line], last: Line) -> str:
    """Returns the chart of memory. The note says how often work waited for memory."""
    used, limit = (
        _series("in use", "area", loader, "memory_used"),
        _series("limit", "limit", loader, "memory_limit"),
    )
    memory = [used]
    notes = []
    if limit.points:
        most = limit.points[-1][1]
        if used.points and most <= _OFF_SCALE * max(y for _, y in used.points):
            memory.append(limit)
        else:
            notes.append(f"limit {format_bytes(most)}, beyond the scale")
    if held_back := last.get("held_back"):
        pressed = last.get("held_back_pressure", 0)
        notes.append(
            f"work waited for memory {held_back} times: {held_back - pressed} for the limit, {pressed} because the "
            "system was short of memory"
        )
    return _chart("Memory", charts.BYTES, memory, "; ".join(notes))


def _chart(title: str, axis: Axis, series: Sequence[Series], note: str = "") -> str:
    return chart(title, Panel(axis=axis, series=series), note=note)


def _series(name: str, style: str, lines: Sequence[Line], *path: str) -> Series:
    return Series(name=name, style=style, points=_points(lines, *path))


def _points(lines: Sequence[Line], *path: str) -> Points:
    """Returns a point (at, value) for each line that has a value at this path."""
    points = []
    for line in lines:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            points.append((float(line["at"]), float(value)))
    return points


def _headroom(loader: Sequence[Line]) -> Points:
    """Returns the rate that the trainer could take, from its latest computing times, while that is not far above all
    rates. Empty if it is in the end."""
    demand = _points(loader, "demand_rows_per_s")
    most = _OFF_SCALE * max((rate for _, rate in _points(loader, "rows_per_s")), default=0.0)
    if not demand or demand[-1][1] > most:
        return []
    rates = [
        (at, max(rate for _, rate in demand[max(0, n - 4) : n + 1]))
        for n, (at, _) in enumerate(demand)
    ]
    return [(at, rate) for at, rate in rates if rate <= most]


def _knobs_over_time(run: Run) -> list[Line]:
    """Returns the knobs over time. A decision changes them at once, and measurements show them a tick later."""
    return sorted(
        [
            *run.of("loader"),
            *({"at": d["at"], "knobs": d.get("after")} for d in run.of("decision")),
        ],
        key=lambda line: float(line["at"]),
    )


def _of_each(run: Run) -> str:
    return f"of each of {run.ranks} ranks" if run.ranks > 1 else ""


def _side_by_side(title: str, *drawn: str) -> str:
    return (
        f'<section class="bare"><h2>{title}</h2><div class="grid2">{"".join(drawn)}</div></section>'
        if any(drawn)
        else ""
    )
