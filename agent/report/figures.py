"""The charts of a run's page: `hero`, the main one, `stages`, `training` and `machine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.agent.report import charts
from sluice.agent.report.charts import Panel, Points, Series, chart
from sluice.agent.report.format import percent
from sluice.agent.report.incidents import WELL, Incident
from sluice.agent.report.narrative import HARDLY, DecisionEffect, RunOutcome, mean
from sluice.agent.report.run_folder import Run
from sluice.agent.report.tables import TONES, verdict
from sluice.ingest.knobs import format_bytes

_OFF_SCALE = 3.0  # times the highest use: a limit above that would flatten the curves
_BUSY = 0.9  # of its workers' time: the bottleneck, where the trainer waits


def hero(
    run: Run, figures: RunOutcome, story: Sequence[DecisionEffect], incidents: Sequence[Incident]
) -> str:
    """The main chart, after the decisions and incidents that all charts show."""
    looks, end = run.looks() or run.of("loader"), _last(run.of("loader"), figures)
    moments = {
        "decisions": [
            {"at": c.at, "label": str(c.number), "text": f"{c.number}. {c.moves}: {c.effect}"}
            for c in story
        ],
        "bands": [
            {
                "from": one.at,
                "to": until,
                "label": one.label,
                "what": one.what,
                "text": f"{one.label}. {one.sentence}",
                "tone": TONES.get(one.result, ""),
            }
            for one, until in _lasting(incidents, end)
        ],
    }
    return charts.embedded(moments, "moments") + chart(
        "Rows a second, and waiting for input",
        Panel(
            name="rows a second",
            axis=charts.ROWS,
            series=[
                _series("taken by the trainer", _points(looks, "rows_per_s"), "area"),
                _series("what it would take without waiting", _headroom(looks), "limit"),
                _rate_before(run, figures, end),
            ],
        ),
        Panel(
            name="time that the trainer waits for input",
            axis=charts.SHARE,
            series=[_series("waiting", _points(looks, "stall"), "area")],
        ),
        end=end,
        kind="hero",
        note=_ranks_counted(run),
    )


def _rate_before(run: Run, figures: RunOutcome, end: float) -> Series:
    """A level at the rate before the first change, if the changes made the run faster."""
    rate, decisions = figures.rows_per_s_first, run.of("decision")
    if not figures.changes_faster or rate is None:
        return _series("before tuning", [])
    workers = (decisions[0].get("before") or {}).get("workers", {}).values()
    name = "with one worker a stage" if set(workers) == {1} else "before tuning"
    return _series(name, [(0.0, rate), (end, rate)], "level")


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageCourse:
    """The course of one stage: its number of workers, and the share of their time at work."""

    workers: Points
    shares: Points
    busy: float | None
    """The mean share in the last third of the run."""

    @classmethod
    def of(cls, name: str, run: Run, knobs: Sequence[Mapping[str, Any]]) -> _StageCourse:
        looks, loader = run.looks(), run.of("loader")
        busy = _points(loader, "stages", name, "busy")
        counts = _points(loader, "stages", name, "workers")
        shares = [
            (at, min(1.0, value / count))
            for (at, value), (_, count) in zip(busy, counts, strict=False)
            if count
        ]
        settled_at = looks[-max(1, len(looks) // 3)]["at"] if looks else float("inf")
        last = [{"busy": share} for at, share in shares if at >= settled_at]
        workers = _points(knobs, "knobs", "workers", name)
        return cls(workers=workers, shares=shares, busy=mean(last, "busy"))

    def note(self, name: str, last: Mapping[str, Any]) -> str:
        """Describes the workers at the end, by the `last` knobs."""
        first, now = int(self.workers[0][1]), int(self.workers[-1][1])
        unit = "process" if (last.get("backend") or {}).get(name) == "process" else "worker"
        if now != 1:
            unit += "es" if unit == "process" else "s"
        count = f"{first} → {now} {unit}" if first != now else f"{now} {unit}"
        if name in (last.get("fused") or ()):
            count = "by the workers before it"
        return count if self.busy is None else f"{count}, busy {percent(self.busy)}"


def stages(run: Run, figures: RunOutcome) -> str:
    """A small chart for each stage: its workers, and the share of their time at work."""
    end = _last(run.of("loader"), figures)
    knobs = _knobs_over_time(run)
    last = (knobs[-1].get("knobs") or {}) if knobs else {}
    names = dict.fromkeys(
        name for line in knobs for name in (line.get("knobs") or {}).get("workers", ())
    )
    courses = {name: _StageCourse.of(name, run, knobs) for name in names}
    busiest = max(((one.busy or 0.0, name) for name, one in courses.items()), default=None)
    waits = figures.stall_last is not None and figures.stall_last > HARDLY
    bottleneck = busiest[1] if busiest and waits and busiest[0] >= _BUSY else None
    drawn = [
        chart(
            name,
            Panel(axis=charts.WHOLE, series=[_series("workers", course.workers, "step")]),
            Panel(axis=charts.SHARE, series=[_series("at work", course.shares)]),
            end=end,
            kind="part",
            note=course.note(name, last),
            aside=verdict("the bottleneck", "bad") if name == bottleneck else " ",
        )
        for name, course in courses.items()
        if course.workers
    ]
    if not drawn:
        return ""
    about = "Top: number of workers. Bottom: share of time spent working"
    about = ", ".join(filter(None, [about, _of_each(run)]))
    return (
        f'<section class="bare"><h2>Workers of each stage</h2><p class="empty">{about}</p>'
        f'<div class="small">{"".join(drawn)}</div></section>'
    )


def training(run: Run, figures: RunOutcome) -> str:
    evaluations = run.of("eval")
    end = _last([*run.of("train"), *evaluations], figures)
    by_split: dict[str, list[Mapping[str, Any]]] = {}
    for evaluation in evaluations:
        by_split.setdefault(str(evaluation.get("split", "")), []).append(evaluation)
    scores = [
        _series(split or "AUC", _points(lines, "auc"), "dots") for split, lines in by_split.items()
    ]
    loss = _series("loss", _points(run.of("train"), "loss"))
    return _side_by_side(
        "Training",
        [
            chart("Training loss", Panel(axis=charts.SCORE, series=[loss]), end=end),
            chart("AUC", Panel(axis=charts.SCORE, series=scores), end=end),
        ],
    )


def machine(run: Run, figures: RunOutcome) -> str:
    """The loader's use of memory, buffers, cores and remote workers."""
    end = _last(run.of("loader"), figures)
    loader = run.of("loader")
    knobs = _knobs_over_time(run)
    each = _of_each(run)
    buffers = [
        _series("read-ahead", _points(knobs, "knobs", "read_ahead_bytes"), "step"),
        _series("prefetch", _points(knobs, "knobs", "prefetch_bytes"), "step"),
    ]
    cores = [
        _series("in use", _points(loader, "cpu"), "area"),
        _series("at hand", _points(loader, "cpu_quota"), "limit"),
    ]
    drawn = [
        _memory(loader, end),
        chart("Buffers", Panel(axis=charts.BYTES, series=buffers), end=end, note=each),
        chart("Cores", Panel(axis=charts.WHOLE, series=cores), end=end, note=each),
    ]
    if remote := loader[-1].get("elsewhere") if loader else None:
        workers = [
            _series(name, _points(loader, "elsewhere", name), "step")
            for name in ("workers", "starting")
        ]
        note = (
            f"{format_bytes(remote['bytes'])} came from them for {remote['core_s']:,.0f} core-seconds; "
            f"{remote['retries']:,} requests were repeated, {remote['hedges']:,} went to a second worker because "
            "the first was slow"
        )
        drawn.append(
            chart("Remote workers", Panel(axis=charts.WHOLE, series=workers), end=end, note=note)
        )
    return _side_by_side("Memory and cores", drawn)


def _memory(loader: Sequence[Mapping[str, Any]], end: float) -> str:
    used, limit = _points(loader, "memory_used"), _points(loader, "memory_limit")
    series, notes = [_series("in use", used, "area")], []
    if limit and used and limit[-1][1] <= _OFF_SCALE * max(y for _, y in used):
        series.append(_series("limit", limit, "limit"))
    elif limit:
        notes.append(f"limit {format_bytes(limit[-1][1])}, beyond the scale")
    if held_back := loader[-1].get("held_back") if loader else 0:
        pressed = loader[-1].get("held_back_pressure", 0)
        notes.append(
            f"work waited for it {held_back} times: {held_back - pressed} for the limit, {pressed} because the "
            "system was short of memory"
        )
    return chart("Memory", Panel(axis=charts.BYTES, series=series), end=end, note="; ".join(notes))


def _series(name: str, points: Points, style: str = "line") -> Series:
    return Series(name=name, points=points, style=style)


def _last(lines: Sequence[Mapping[str, Any]], figures: RunOutcome) -> float:
    """The moment of the last of these lines, where the axis of their charts ends."""
    return max((float(line["at"]) for line in lines), default=figures.seconds)


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
    """The rate that the trainer would take, from its latest computing times. Empty if that is far above its rate."""
    demand = _points(loader, "demand_rows_per_s")
    most = max((rate for _, rate in _points(loader, "rows_per_s")), default=0.0)
    if not demand or demand[-1][1] > _OFF_SCALE * most:
        return []
    return [
        (at, max(rate for _, rate in demand[max(0, n - 4) : n + 1]))
        for n, (at, _) in enumerate(demand)
    ]


def _lasting(incidents: Sequence[Incident], end: float) -> list[tuple[Incident, float]]:
    """Each incident with its end: the moment when the rate was back, or the next incident. An incident without a result
    ends at once."""
    following = [*(one.at for one in incidents[1:]), end]
    found = []
    for one, until in zip(incidents, following, strict=False):
        if not one.result:
            ends_at = one.at
        elif one.result in WELL and one.recovered_s is not None:
            ends_at = min(until, one.at + one.recovered_s)
        else:
            ends_at = until
        found.append((one, ends_at))
    return found


def _knobs_over_time(run: Run) -> list[Mapping[str, Any]]:
    """The knobs over time. A decision changes them at once; measurements show them one tick later."""
    return sorted(
        [
            *run.of("loader"),
            *({"at": d["at"], "knobs": d.get("after")} for d in run.of("decision")),
        ],
        key=lambda line: float(line["at"]),
    )


def _ranks_counted(run: Run) -> str:
    """The ranks whose rows are counted. A Loader records only its own rank."""
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
