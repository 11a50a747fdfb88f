"""The charts of a run's page: `hero`, which says it all, `stages`, `training` and `machine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The chart that says it all, after what happened when, which all charts show."""
    looks, end = run.looks() or run.of("loader"), _last(run.of("loader"), figures)
    rate, decisions = figures.rows_per_s_first, run.of("decision")
    before = Series(name="before tuning", points=[])
    if figures.changes_faster and rate is not None:
        alone = set((decisions[0].get("before") or {}).get("workers", {}).values()) == {1}
        before = Series(
            name="with one worker a stage" if alone else "before tuning",
            style="level",
            points=[(0.0, rate), (end, rate)],
        )
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
                Series(
                    name="taken by the trainer", points=_points(looks, "rows_per_s"), style="area"
                ),
                Series(
                    name="what it would take without waiting",
                    points=_headroom(looks),
                    style="limit",
                ),
                before,
            ],
        ),
        Panel(
            name="time that the trainer waits for input",
            axis=charts.SHARE,
            series=[Series(name="waiting", points=_points(looks, "stall"), style="area")],
        ),
        end=end,
        kind="hero",
        note=_whose(run),
    )


def stages(run: Run, figures: RunOutcome) -> str:
    """A small chart for each stage: its workers, and how much of their time they were at useful work."""
    loader, end = run.of("loader"), _last(run.of("loader"), figures)
    turned = _turned(run)
    last = (turned[-1].get("knobs") or {}) if turned else {}
    names = dict.fromkeys(
        name for line in turned for name in (line.get("knobs") or {}).get("workers", ())
    )
    settled, parts = run.looks()[-max(1, len(run.looks()) // 3) :], {}
    for name in names:
        workers = _points(turned, "knobs", "workers", name)
        shares = [
            (at, min(1.0, value / n))
            for (at, value), (_, n) in zip(
                _points(loader, "stages", name, "busy"),
                _points(loader, "stages", name, "workers"),
                strict=False,
            )
            if n
        ]
        parts[name] = (
            workers,
            shares,
            mean(
                [{"busy": share} for at, share in shares if settled and at >= settled[0]["at"]],
                "busy",
            ),
        )
    waits = figures.stall_last is not None and figures.stall_last > HARDLY
    slowest = max((busy or 0.0, name) for name, (_, _, busy) in parts.items())[1] if parts else ""
    drawn = []
    for name, (workers, shares, busy) in parts.items():
        if not workers:
            continue
        first, now = int(workers[0][1]), int(workers[-1][1])
        unit = "process" if (last.get("backend") or {}).get(name) == "process" else "worker"
        if now != 1:
            unit += "es" if unit == "process" else "s"
        said = (
            ["by the workers before it"]
            if name in (last.get("fused") or ())
            else [f"{first} → {now} {unit}" if first != now else f"{now} {unit}"]
        )
        said += [f"busy {percent(busy)}"] if busy is not None else []
        drawn.append(
            chart(
                name,
                Panel(
                    axis=charts.WHOLE, series=[Series(name="workers", points=workers, style="step")]
                ),
                Panel(axis=charts.SHARE, series=[Series(name="at work", points=shares)]),
                end=end,
                kind="part",
                note=", ".join(said),
                corner=verdict("the bottleneck", "bad")
                if waits and name == slowest and (busy or 0.0) >= _BUSY
                else " ",
            )
        )
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


def training(run: Run, figures: RunOutcome) -> str:
    evaluations = run.of("eval")
    end = _last([*run.of("train"), *evaluations], figures)
    splits = dict.fromkeys(str(e.get("split", "")) for e in evaluations)
    return _side_by_side(
        "Training",
        [
            chart(
                "Training loss",
                Panel(
                    axis=charts.SCORE,
                    series=[Series(name="loss", points=_points(run.of("train"), "loss"))],
                ),
                end=end,
            ),
            chart(
                "AUC",
                Panel(
                    axis=charts.SCORE,
                    series=[
                        Series(
                            name=split or "AUC",
                            style="dots",
                            points=_points(
                                [e for e in evaluations if str(e.get("split", "")) == split], "auc"
                            ),
                        )
                        for split in splits
                    ],
                ),
                end=end,
            ),
        ],
    )


def machine(run: Run, figures: RunOutcome) -> str:
    """What the loader takes of the machine."""
    end = _last(run.of("loader"), figures)
    loader = run.of("loader")
    turned = _turned(run)
    whose = _of_each(run)
    used, limit = _points(loader, "memory_used"), _points(loader, "memory_limit")
    memory, note = [Series(name="in use", points=used, style="area")], ""
    if limit and used and limit[-1][1] <= _OFF_SCALE * max(y for _, y in used):
        memory.append(Series(name="limit", points=limit, style="limit"))
    elif limit:
        note = f"limit {format_bytes(limit[-1][1])}, beyond the scale"
    if held_back := loader[-1].get("held_back") if loader else 0:
        pressed = loader[-1].get("held_back_pressure", 0)
        waited = (
            f"work waited for it {held_back} times: {held_back - pressed} for the limit, {pressed} as the system "
            "was short of memory"
        )
        note = f"{note}; {waited}" if note else waited
    drawn = [
        chart("Memory", Panel(axis=charts.BYTES, series=memory), end=end, note=note),
        chart(
            "Buffers",
            Panel(
                axis=charts.BYTES,
                series=[
                    Series(
                        name="read-ahead",
                        points=_points(turned, "knobs", "read_ahead_bytes"),
                        style="step",
                    ),
                    Series(
                        name="prefetch",
                        points=_points(turned, "knobs", "prefetch_bytes"),
                        style="step",
                    ),
                ],
            ),
            end=end,
            note=whose,
        ),
        chart(
            "Cores",
            Panel(
                axis=charts.WHOLE,
                series=[
                    Series(name="in use", points=_points(loader, "cpu"), style="area"),
                    Series(name="at hand", points=_points(loader, "cpu_quota"), style="limit"),
                ],
            ),
            end=end,
            note=whose,
        ),
    ]
    if there := loader[-1].get("elsewhere") if loader else None:
        drawn.append(
            chart(
                "Workers elsewhere",
                Panel(
                    axis=charts.WHOLE,
                    series=[
                        Series(
                            name="workers",
                            points=_points(loader, "elsewhere", "workers"),
                            style="step",
                        ),
                        Series(
                            name="starting",
                            points=_points(loader, "elsewhere", "starting"),
                            style="step",
                        ),
                    ],
                ),
                end=end,
                note=(
                    f"{format_bytes(there['bytes'])} came from them for {there['core_s']:,.0f} core-seconds; "
                    f"{there['retries']:,} requests were made again, {there['hedges']:,} to a second worker as "
                    f"the first "
                    "was slow"
                ),
            )
        )
    return _side_by_side("Memory and cores", drawn)


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
    """The rate that the trainer would take, from its latest computing times; empty if that is far beyond what it
    gets."""
    demand = _points(loader, "demand_rows_per_s")
    most = max((rate for _, rate in _points(loader, "rows_per_s")), default=0.0)
    if not demand or demand[-1][1] > _OFF_SCALE * most:
        return []
    return [
        (at, max(rate for _, rate in demand[max(0, n - 4) : n + 1]))
        for n, (at, _) in enumerate(demand)
    ]


def _lasting(incidents: Sequence[Incident], end: float) -> list[tuple[Incident, float]]:
    """Each incident, and until when it made itself felt: until the rate was back, or until the next one. It is a
    moment where too little came after it to say."""
    following = [*(one.at for one in incidents[1:]), end]
    found = []
    for one, until in zip(incidents, following, strict=False):
        if not one.result:
            felt_until = one.at
        elif one.result in WELL and one.recovered_s is not None:
            felt_until = min(until, one.at + one.recovered_s)
        else:
            felt_until = until
        found.append((one, felt_until))
    return found


def _turned(run: Run) -> list[Mapping[str, Any]]:
    """The knobs as they were: a decision changes them at once; measurements show them only a tick later."""
    return sorted(
        [
            *run.of("loader"),
            *({"at": d["at"], "knobs": d.get("after")} for d in run.of("decision")),
        ],
        key=lambda line: float(line["at"]),
    )


def _whose(run: Run) -> str:
    """Whose rows are counted: a Loader writes down its own rank's alone."""
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
