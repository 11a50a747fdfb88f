"""The charts of a run's page: `hero` (the overview), `stages`, `training` and `machine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sluice.agent.report import charts
from sluice.agent.report.charts import Panel, Points, Series, chart
from sluice.agent.report.format import percent
from sluice.agent.report.incidents import GOOD_RESULTS, SMALL_STALL, Incident
from sluice.agent.report.narrative import (
    DecisionEffect,
    RunOutcome,
    judged_part,
    mean,
)
from sluice.agent.report.run_folder import Line, Run
from sluice.agent.report.tables import TONES, verdict
from sluice.ingest.knobs import format_bytes

_OFF_SCALE = 3.0
"""A limit above this many times the highest use is not drawn, because it would flatten the curves."""
_BUSY = 0.9
"""While the trainer waits, a stage whose workers are busy for this share of their time is the bottleneck."""


def hero(
    run: Run, figures: RunOutcome, story: Sequence[DecisionEffect], incidents: Sequence[Incident]
) -> str:
    """Returns the overview chart, after the decisions and incidents that all charts show."""
    moments = {
        "decisions": [
            {"at": c.at, "label": str(c.number), "text": f"{c.number}. {c.moves}: {c.effect}"}
            for c in story
        ],
        "bands": [
            {
                "from": incident.at,
                "to": until,
                "label": incident.label,
                "what": incident.what,
                "text": f"{incident.label}. {incident.sentence}",
                "tone": TONES.get(incident.result, ""),
            }
            for incident, until in lasting(incidents, figures.seconds)
        ],
    }
    return charts.embedded(moments, "moments") + chart(
        "Rows a second, and waiting for input",
        *overview(run, figures),
        kind="hero",
        note=_whose(run),
    )


def overview(run: Run, figures: RunOutcome) -> list[Panel]:
    """Returns the panels of the overview: rows a second, and the trainer's share of waiting."""
    looks = run.looks() or run.of("loader")
    rate = figures.rows_per_s_first
    before = Series(name="before tuning", points=[])
    if figures.changes_faster and rate is not None:
        knobs = judged_part(run).of("decision")[0].get("before") or {}
        one_each = set(knobs.get("workers", {}).values()) == {1}
        before = Series(
            name="with one worker a stage" if one_each else "before tuning",
            style="level",
            points=[(0.0, rate)],
        )
    rates = [
        _series("taken by the trainer", "area", looks, "rows_per_s"),
        Series(name="possible without waiting", points=_headroom(looks), style="limit"),
        before,
    ]
    waits = [_series("waiting", "area", looks, "stall")]
    return [
        Panel(name="rows a second", axis=charts.ROWS, series=rates),
        Panel(name="time that the trainer waits for input", axis=charts.SHARE, series=waits),
    ]


def workers(run: Run) -> list[Series]:
    """Returns the number of workers of each stage over time."""
    knobs = _knobs_over_time(run)
    names = dict.fromkeys(
        name for line in knobs for name in (line.get("knobs") or {}).get("workers", ())
    )
    return [_series(name, "step", knobs, "knobs", "workers", name) for name in names]


class _Stage(NamedTuple):
    workers: Series
    shares: Points
    """The share of its workers' time at useful work."""
    busy: float | None
    """The mean of `shares` in the last third of the judged part. None: not measured."""


def stages(run: Run, figures: RunOutcome) -> str:
    """Returns a small chart for each stage: its workers, and the share of their time at useful work."""
    knobs = _knobs_over_time(run)
    last = (knobs[-1].get("knobs") or {}) if knobs else {}
    shown = [_stage(run, pool) for pool in workers(run)]
    waits = figures.stall_last is not None and figures.stall_last > SMALL_STALL
    busiest = max(((stage.busy or 0.0, stage.workers.name) for stage in shown), default=(0.0, ""))
    bottleneck = busiest[1] if waits and busiest[0] >= _BUSY else ""
    drawn = [
        _stage_chart(stage, last, stage.workers.name == bottleneck)
        for stage in shown
        if stage.workers.points
    ]
    about = "Top: number of workers. Bottom: share of time spent working"
    about = ", ".join(filter(None, [about, _of_each(run)]))
    return (
        (
            f'<section class="bare"><h2>Workers of each stage</h2><p class="empty">{about}</p>'
            f'<div class="small">{"".join(drawn)}</div></section>'
        )
        if drawn
        else ""
    )


def _stage(run: Run, workers: Series) -> _Stage:
    """Returns the figures of a stage over time."""
    name = workers.name
    loader = run.of("loader")
    looks = judged_part(run).looks()
    shares = [
        (at, min(1.0, value / n))
        for (at, value), (_, n) in zip(
            _points(loader, "stages", name, "busy"),
            _points(loader, "stages", name, "workers"),
            strict=False,
        )
        if n
    ]
    settled = looks[-max(1, len(looks) // 3) :]
    late = [{"busy": share} for at, share in shares if settled and at >= settled[0]["at"]]
    return _Stage(workers, shares, mean(late, "busy"))


def _stage_chart(stage: _Stage, knobs: Line, bottleneck: bool) -> str:
    """Returns the small chart of a stage."""
    name, points = stage.workers.name, stage.workers.points
    first = int(points[0][1])
    now = int(points[-1][1])
    unit = "process" if (knobs.get("backend") or {}).get(name) == "process" else "worker"
    if now != 1:
        unit += "es" if unit == "process" else "s"
    note = f"{first} → {now} {unit}" if first != now else f"{now} {unit}"
    return chart(
        name,
        Panel(axis=charts.WHOLE, series=[replace(stage.workers, name="workers")]),
        Panel(axis=charts.SHARE, series=[Series(name="at work", points=stage.shares)]),
        kind="part",
        note=note if stage.busy is None else f"{note}, busy {percent(stage.busy)}",
        corner=verdict("the bottleneck", "bad") if bottleneck else " ",
    )


def training(run: Run) -> str:
    """Returns the charts of the training loss and the AUC."""
    evaluations = run.of("eval")
    splits = dict.fromkeys(str(e.get("split", "")) for e in evaluations)
    return _side_by_side(
        "Training",
        [
            chart(
                "Training loss",
                Panel(
                    axis=charts.SCORE,
                    series=[_series("loss", "line", run.of("train"), "loss")],
                ),
            ),
            chart(
                "AUC",
                Panel(
                    axis=charts.SCORE,
                    series=[
                        _series(
                            split or "AUC",
                            "dots",
                            [e for e in evaluations if str(e.get("split", "")) == split],
                            "auc",
                        )
                        for split in splits
                    ],
                ),
            ),
        ],
    )


def machine(run: Run) -> str:
    """Returns the charts of memory, buffers, cores and remote workers."""
    loader = run.of("loader")
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
        _memory_chart(loader),
        chart("Buffers", Panel(axis=charts.BYTES, series=buffers), note=each),
        chart("Cores", Panel(axis=charts.WHOLE, series=cores), note=each),
    ]
    if remote := loader[-1].get("elsewhere") if loader else None:
        workers = [
            _series(name, "step", loader, "elsewhere", name) for name in ("workers", "starting")
        ]
        note = (
            f"they sent {format_bytes(remote['bytes'])} for {remote['core_s']:,.0f} core-seconds; "
            f"{remote['retries']:,} requests were repeated, and {remote['hedges']:,} also went to a second worker "
            "because the first was slow"
        )
        drawn.append(chart("Remote workers", Panel(axis=charts.WHOLE, series=workers), note=note))
    return _side_by_side("Memory and cores", drawn)


def _memory_chart(loader: Sequence[Line]) -> str:
    """Returns the chart of memory. The note says how often work waited for memory."""
    used = _points(loader, "memory_used")
    limit = _points(loader, "memory_limit")
    memory = [Series(name="in use", points=used, style="area")]
    notes = []
    if limit and used and limit[-1][1] <= _OFF_SCALE * max(y for _, y in used):
        memory.append(Series(name="limit", points=limit, style="limit"))
    elif limit:
        notes.append(f"limit {format_bytes(limit[-1][1])}, beyond the scale")
    if held_back := loader[-1].get("held_back") if loader else 0:
        pressed = loader[-1].get("held_back_pressure", 0)
        notes.append(
            f"work waited for memory {held_back} times: {held_back - pressed} for the limit, {pressed} because the "
            "system was short of memory"
        )
    return chart("Memory", Panel(axis=charts.BYTES, series=memory), note="; ".join(notes))


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
    most = max((rate for _, rate in _points(loader, "rows_per_s")), default=0.0)
    if not demand or demand[-1][1] > _OFF_SCALE * most:
        return []
    rates = [
        (at, max(rate for _, rate in demand[max(0, n - 4) : n + 1]))
        for n, (at, _) in enumerate(demand)
    ]
    return [(at, rate) for at, rate in rates if rate <= _OFF_SCALE * most]


def lasting(incidents: Sequence[Incident], end: float) -> list[tuple[Incident, float]]:
    """Returns each incident with its end: when the rate recovered, or at the next incident. Without a result, an
    incident ends at once."""
    following = [*(incident.at for incident in incidents[1:]), end]
    spans = []
    for incident, until in zip(incidents, following, strict=False):
        if not incident.result:
            until_s = incident.at
        elif incident.result in GOOD_RESULTS and incident.recovered_s is not None:
            until_s = min(until, incident.at + incident.recovered_s)
        else:
            until_s = until
        spans.append((incident, until_s))
    return spans


def _knobs_over_time(run: Run) -> list[Line]:
    """Returns the knobs over time. A decision changes them at once, and measurements show them a tick later."""
    return sorted(
        [
            *run.of("loader"),
            *({"at": d["at"], "knobs": d.get("after")} for d in run.of("decision")),
        ],
        key=lambda line: float(line["at"]),
    )


def _whose(run: Run) -> str:
    """Returns whose rows are counted. A Loader records only its own rank."""
    ranks = run.config.get("ranks")
    if run.ranks > 1:
        return f"of all {run.ranks} ranks"
    return f"of one rank; there are {ranks}" if isinstance(ranks, int) and ranks > 1 else ""


def _of_each(run: Run) -> str:
    return f"of each of {run.ranks} ranks" if run.ranks > 1 else ""


def _side_by_side(title: str, drawn: Sequence[str]) -> str:
    return (
        f'<section class="bare"><h2>{title}</h2><div class="grid2">{"".join(drawn)}</div></section>'
        if any(drawn)
        else ""
    )
