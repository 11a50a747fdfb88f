"""Makes charts over time, as data for the page's script (report.js), which draws them: `chart`. `scale` decides where
an axis ends and which values it names.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

MOST_POINTS = 600
"""The most points of a series. A reader could not distinguish more."""
FEW_POINTS = 120
"""The most points of a series in a small chart."""
COLOURS = 8
_INTERVALS = 4
"""The most intervals between the ticks of an axis."""
_PAD = 0.01
"""The range above and below values that are all the same, on an axis that need not begin at 0."""

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The points of one curve."""

    name: str
    points: Points
    style: str = "line"
    """`line`, `area`, `step` (each value holds until the next), `dots` (each point is shown), `limit` (dashed), or
    `level` (dashed, with its name: its one value is that of the whole time)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A vertical axis, and the format of its values."""

    form: str
    """A key of `forms` in report.js."""
    base: int = 10
    """Ticks are round numbers of this base: 10, or 2 for bytes."""
    from_zero: bool = True
    top: float | None = None
    """The fixed end of the axis. Larger values are shown at the end. None: it ends at the highest value."""


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


@dataclass(frozen=True, slots=True)
class AxisRange:
    """The range of a vertical axis, and the values that it names."""

    low: float
    high: float
    ticks: tuple[float, ...]


def scale(axis: Axis, values: Sequence[float], *, ends_only: bool = False) -> AxisRange:
    """Returns an axis that ends where the values end. Its ticks are round numbers, none of them beyond that. With
    `ends_only` they are both ends."""
    low = 0.0 if axis.from_zero else min(values)
    high = max(values) if axis.top is None else axis.top
    if axis.from_zero and high <= 0:
        return AxisRange(0.0, 1.0, (0.0,))
    if high - low < 1e-3 * abs(high):
        return AxisRange(low - _PAD, high + _PAD, (high,))
    if ends_only:
        return AxisRange(low, high, (low, high))
    widest = (high - low) / _INTERVALS
    power = axis.base ** math.floor(math.log(widest, axis.base) + 1e-9)
    factors = (1, 2, 2.5, 5, 10) if axis.base == 10 else (1, 2)
    step = next(f * power for f in factors if f * power >= widest * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return AxisRange(low, high, tuple(float(f"{n * step:.10g}") for n in range(first, last + 1)))


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


def chart(title: str, *panels: Panel, note: str = "", kind: str = "", corner: str = "") -> str:
    """Returns a figure as HTML. Empty if no series has a point. Its time ends at the last point.

    `corner` is HTML that replaces the series' names at the end of the headline."""
    # The position of a name decides its colour, even if earlier series have no points.
    names = list(dict.fromkeys(s.name for panel in panels for s in panel.series))
    drawn = [
        (panel, some)
        for panel in panels
        if (some := [(names.index(s.name) % COLOURS, s) for s in panel.series if s.points])
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
    end = max(s.points[-1][0] for _, some in drawn for _, s in some)
    data = {
        "end": max(round(end, 2), 0.01),
        "panels": [_panel(panel, some, is_small=kind == "part") for panel, some in drawn],
    }
    about = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<figure class="{kind}"><figcaption><h2>{escape(title)}</h2>{about}'
        f'{corner or f"""<ul class="keys">{keys}</ul>"""}</figcaption>{embedded(data)}'
        f'<div class="plot" role="img" aria-label="{escape(title)}"></div></figure>\n'
    )


def _panel(panel: Panel, series: Sequence[tuple[int, Series]], *, is_small: bool) -> dict[str, Any]:
    """Returns a panel with these series and the numbers of their colours."""
    most = FEW_POINTS if is_small else MOST_POINTS
    drawn = [columns(s, panel.axis.top, most) for _, s in series]
    values = [value for line in drawn for value in line["value"]]
    return {
        "form": panel.axis.form,
        "name": panel.name,
        **asdict(scale(panel.axis, values, ends_only=is_small)),
        "series": [
            {"name": s.name, "style": s.style, "colour": n, **line}
            for (n, s), line in zip(series, drawn, strict=True)
        ],
    }


def embedded(data: Any, kind: str = "") -> str:
    """Returns data for the page's script, escaped so that it cannot end its element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" class="{kind}">{text}</script>'


def columns(series: Series, top: float | None, most: int) -> dict[str, list[float]]:
    """Returns the times and values that are drawn of a series."""
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
