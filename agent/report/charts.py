"""Makes charts over time, as data for the page's script (report.js), which draws them: `chart`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MOST_POINTS = 600
"""The most points of a series. A reader could not distinguish more."""
FEW_POINTS = 120
"""The most points of a series in a small chart."""
COLOURS = 8

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The points of one curve."""

    name: str
    points: Points
    style: str = "line"
    """`line`, `area`, `step` (each value holds until the next), `dots` (each point is shown), `limit` (dashed), or
    `level` (dashed, with its name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A vertical axis, and the format of its values."""

    form: str
    """A key of `forms` in report.js."""
    base: int = 10
    """Ticks are round numbers of this base: 10, or 2 for bytes."""
    from_zero: bool = True
    top: float | None = None
    """The fixed end of the axis. Larger values are shown at the end. None: the values decide."""


ROWS = Axis(form="rows")
SHARE = Axis(form="share", top=1.0)
BYTES = Axis(form="bytes", base=2)
WHOLE = Axis(form="whole")
SCORE = Axis(form="score", from_zero=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Series on one vertical axis. The panels of a chart are stacked and have the same times."""

    axis: Axis
    series: Sequence[Series]
    name: str = ""


def decimate(points: Points, max_points: int = MOST_POINTS) -> Points:
    """Returns about `max_points` of a series: the lowest and highest point of each group, so that no peak is lost."""
    if len(points) <= max_points:
        return points
    size = math.ceil(2 * len(points) / max_points)
    extremes = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        extremes += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return extremes


def chart(
    title: str, *panels: Panel, end: float, note: str = "", kind: str = "", corner: str = ""
) -> str:
    """Returns a figure as HTML. Empty if no series has a point.

    `end` is the last moment of the run, the same in all charts. `corner` is HTML that replaces the series' names at the
    end of the headline."""
    # The position of a name decides its colour, even if earlier series have no points.
    names = list(dict.fromkeys(s.name for panel in panels for s in panel.series))
    placed = [
        (panel, [(names.index(s.name) % COLOURS, s) for s in panel.series]) for panel in panels
    ]
    drawn = [
        (panel, some) for panel, all_ in placed if (some := [(n, s) for n, s in all_ if s.points])
    ]
    if not drawn:
        return ""
    keys = "".join(
        dict.fromkeys(
            f'<li class="c{n} {s.style}"><i></i>{escape(s.name)}</li>'
            for _, some in drawn
            for n, s in some
        )
    )
    data = {
        "end": max(end, 1e-9),
        "panels": [
            {
                "form": panel.axis.form,
                "base": panel.axis.base,
                "zero": panel.axis.from_zero,
                "top": panel.axis.top,
                "name": panel.name,
                "series": [
                    {
                        "name": s.name,
                        "style": s.style,
                        "colour": n,
                        **_columns(
                            s, panel.axis.top, FEW_POINTS if kind == "part" else MOST_POINTS
                        ),
                    }
                    for n, s in some
                ],
            }
            for panel, some in drawn
        ],
    }
    about = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<figure class="{kind}"><figcaption><h2>{escape(title)}</h2>{about}'
        f'{corner or f"""<ul class="keys">{keys}</ul>"""}</figcaption>{embedded(data)}'
        f'<div class="plot" role="img" aria-label="{escape(title)}"></div></figure>\n'
    )


def embedded(data: Any, kind: str = "") -> str:
    """Returns data for the page's script, escaped so that it cannot end its element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" class="{kind}">{text}</script>'


def _columns(series: Series, top: float | None, most: int) -> dict[str, list[float]]:
    points = series.points
    if series.style == "step":
        points = points[:1] + [
            after for before, after in itertools.pairwise(points) if after[1] != before[1]
        ]
    points = decimate(points, most)
    return {
        "at": [round(at, 2) for at, _ in points],
        "value": [float(f"{value if top is None else min(value, top):.5g}") for _, value in points],
    }
