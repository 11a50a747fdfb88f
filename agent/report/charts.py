"""Line charts against time as inline SVG: axes with units, series, and marks that explain a moment when pointed at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from sluice.agent.report.format import count, percent
from sluice.agent.report.format import seconds as format_seconds
from sluice.ingest.knobs import format_bytes

WIDTH, HEIGHT = 940, 210
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 22, 28
MOST_POINTS = 600  # points of a series in the page; more could not be distinguished
COLOURS = 8
_STEPS_S = (0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200)

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    points: Points
    style: str = "line"
    """`line`, `step` (holds its value until the next), `dots` (few points, each shown) or `limit` (dashed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment that is marked in all charts."""

    at: float
    label: str
    title: str
    kind: str = "decision"
    """`decision`, or `occasion` for an event that no decision caused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A chart's vertical axis, and how its values are written."""

    form: Callable[[float], str]
    base: float = 10.0
    """Ticks are round in powers of this: 10, or 2 for bytes."""
    from_zero: bool = True
    top: float | None = None
    """The upper end of the axis, where it is fixed."""


ROWS = Axis(form=count)
SHARE = Axis(form=percent, top=1.0)
BYTES = Axis(form=format_bytes, base=2.0)
WHOLE = Axis(form=lambda value: f"{value:g}")
SCORE = Axis(form=lambda value: f"{value:.4g}", from_zero=False)


def decimate(points: Points, max_points: int = MOST_POINTS) -> Points:
    """Reduces a series to about `max_points`: the lowest and highest of each stretch, so that no peak is lost."""
    if len(points) <= max_points:
        return points
    size = math.ceil(2 * len(points) / max_points)
    extremes = []
    for start in range(0, len(points), size):
        stretch = points[start:start + size]
        extremes += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return extremes


def ticks(low: float, high: float, base: float = 10.0, about: int = 4) -> list[float]:
    """Round values from `low` to beyond `high`."""
    span = (high - low) or 1.0
    step = base ** math.floor(math.log(span / about, base))
    for factor in (1, 2, 2.5, 5, 10) if base == 10 else (1, 2):
        if span / (step * factor) <= about:
            step *= factor
            break
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def moments(end: float, about: int = 8) -> list[float]:
    """Round times from 0 to at most `end` seconds."""
    step = next((s for s in _STEPS_S if end / s <= about), 86400 * math.ceil(end / 86400 / about))
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def chart(title: str, series: Sequence[Series], marks: Sequence[Mark], *, end: float, axis: Axis,
          note: str = "") -> str:
    """A figure, or nothing if no series has a point. `end` is the last moment of the run, the same in all charts."""
    series = [s for s in series if s.points]
    if not series:
        return ""
    values = [y for s in series for _, y in s.points]
    low = 0.0 if axis.from_zero else min(values)
    grid = ticks(low, axis.top or max([*values, low + 1e-9]), axis.base)
    low, high, end = grid[0], grid[-1], max(end, 1e-9)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / end

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
             f'<text class="tick" x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{escape(axis.form(v))}</text>'
             for v in grid]
    parts += [f'<text class="tick" x="{x(v):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{format_seconds(v)}</text>'
              for v in moments(end)]
    parts += [_mark(x(mark.at), mark, numbered=len(marks) <= 40) for mark in marks]
    parts += [_path(s, i % COLOURS, x, y, end) for i, s in enumerate(series)]
    keys = "".join(f'<li class="c{i % COLOURS} {s.style}"><i></i>{escape(s.name)}</li>' for i, s in enumerate(series))
    about = f"<small>{escape(note)}</small>" if note else ""
    return (f'<figure><figcaption><h2>{escape(title)}</h2>{about}<ul class="keys">{keys}</ul></figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
            "</figure>")


def _mark(x: float, mark: Mark, numbered: bool) -> str:
    label = f'<text x="{x:.1f}" y="14" text-anchor="middle">{escape(mark.label)}</text>' if numbered else ""
    return (f'<g class="mark {mark.kind}"><title>{escape(mark.title)}</title>'
            f'<line class="hit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT - BOTTOM}"/>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{HEIGHT - BOTTOM}"/>{label}</g>')


def _path(series: Series, colour: int, x: Callable[[float], float], y: Callable[[float], float], end: float) -> str:
    points = series.points
    if series.style == "step":
        points = points[:1] + [after for before, after in itertools.pairwise(points) if after[1] != before[1]]
    points = decimate(points)
    if series.style == "step":
        corners = [(at, before) for (_, before), (at, _) in itertools.pairwise(points)]
        points = [p for pair in zip(points, [*corners, (end, points[-1][1])], strict=True) for p in pair]
    line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    dots = "".join(f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5"/>' for at, value in points) \
        if series.style == "dots" or len(points) == 1 else ""
    return f'<g class="series c{colour} {series.style}"><polyline points="{line}"/>{dots}</g>'
