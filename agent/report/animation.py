"""Draws a run as an animated picture: `picture` returns an SVG that any browser plays, without a script.

It shows the rows a second and the waiting of the report's overview, the workers of each stage that was changed, and
what happened. It begins with the complete picture. Then a curtain in front of the curves moves away. Where nothing
moves there is no curtain: in a program without CSS animations, on paper, and for readers who asked for reduced motion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap

from sluice.agent.report import charts
from sluice.agent.report.charts import ROWS, WHOLE, AxisRange, Panel, Series, columns, scale
from sluice.agent.report.figures import lasting, overview, workers
from sluice.agent.report.format import count, percent, seconds
from sluice.agent.report.incidents import find_incidents
from sluice.agent.report.narrative import changes, outcome, sentences
from sluice.agent.report.run_folder import Run
from sluice.agent.report.tables import TONES

WIDTH = 680
_LEFT, _RIGHT = 56, WIDTH - 16
_ACROSS = _RIGHT - _LEFT + 2
"""The width of the curtain: that of the plot with the ends of its lines."""
_HEIGHTS = (130, 60, 60)
_PLAYS_S = 18
_STANDS = 0.25
"""The share of that time in which the complete picture stands still, before it plays."""
_MOST_EVENTS = 12
_CHARACTERS = 92
"""The most characters of a line that fit into the picture."""
_LINE = 19
_COLOURS = ("#2563a8", "#c96f12", "#2a8c6a", "#a23b72", "#6b5fb5", "#8a6d1f", "#2b86a5", "#b04a4a")
_LEVEL = "#1b2126"
_BANDS = {"good": "#14684a", "warn": "#875200", "bad": "#a3262a", "": "#5d6770"}
_CHANGE = "#b3541e"
_FORMS = {ROWS: count, charts.SHARE: percent, WHOLE: "{:g}".format}
_STYLE = """text{{font:13px system-ui,sans-serif;fill:#5d6770;
stroke:#fff;stroke-width:3px;paint-order:stroke}}.h{{font-weight:600;font-size:16px;fill:#1b2126}}
.l{{font-weight:600}}.curtain{{fill:#fff}}.edge{{stroke:#e4e4dd}}.line{{fill:none;stroke-width:2;stroke-linejoin:round}}
@media (prefers-reduced-motion:no-preference){{.curtain{{animation:move {plays}s linear infinite}}
.cover{{animation:list {plays}s step-end infinite}}}}
@keyframes move{{from,{stands:g}%,to{{transform:none}}{starts:g}%{{transform:translateX(-{across}px)}}}}
@keyframes list{{from,to{{transform:none}}{stops}}}"""


@dataclass(frozen=True, slots=True)
class _Event:
    """What happened in a run, for the list and for its mark above the curves."""

    at: float
    until: float | None
    """The end of a disturbance. None: it is a change by the agent."""
    label: str
    text: str
    colour: str


def picture(run: Run) -> str:
    """Returns the picture of a run as SVG. Before anything is measured, it is the first sentence of the report."""
    found = outcome(run)
    panels = [
        replace(panel, series=shown)
        for panel in (*overview(run, found), _workers(run))
        if (shown := [one for one in panel.series if one.points and one.style != "limit"])
    ]
    end = max([0.01, *(one.points[-1][0] for panel in panels for one in panel.series)])
    events = [one for one in _events(run, found.seconds) if panels and one.at <= end]
    # A number and its unit stay on one line.
    title = wrap(re.sub(r"(\d) (?=[%kMGs]\b|%)", "\\1\u00a0", sentences(run)[0]), 68)
    top = 22 + 22 * len(title)
    plot, bottom = _plot(panels, events, end, top) if panels else ([], top)
    lines = len(events[:_MOST_EVENTS]) + (len(events) > _MOST_EVENTS)
    height = bottom + _LINE * lines + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(sentences(run)[0])}</title>",
        f"<style>{_style(events, end, height - bottom)}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        *(
            f'<text class="h" x="16" y="{24 + 22 * n}">{escape(line)}</text>'
            for n, line in enumerate(title)
        ),
        *plot,
        *_list(events, bottom, height - bottom),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _plot(
    panels: Sequence[Panel], events: Sequence[_Event], end: float, top: int
) -> tuple[list[str], int]:
    """Returns the panels below each other, and where the list of events begins."""
    placed = list(_placed(panels, top + 40))
    _, lowest, tall = placed[-1]
    bottom = lowest + tall
    parts = list(_marks(events, end, top, bottom))
    for panel, y, tall in placed:
        parts += _curves(panel, y, tall, end)
    # The curtain is inside the plot, and what says how to read the curves is in front of it.
    size = f'width="{_ACROSS}" height="{bottom - top + 1}"'
    parts.append(
        f'<svg x="{_LEFT}" y="{top}" {size}><rect class="curtain" x="{_ACROSS}" {size}/></svg>'
    )
    for panel, y, tall in placed:
        parts += _axis(panel, y, tall)
    return [*parts, *_times(end, bottom)], bottom + 34


def _workers(run: Run) -> Panel:
    """Returns the panel of the stages whose workers were changed."""
    changed = [one for one in workers(run) if len({value for _, value in one.points}) > 1]
    return Panel(name="workers", axis=WHOLE, series=changed)


def _events(run: Run, until: float) -> list[_Event]:
    """Returns the disturbances and the agent's changes in order of time."""
    found = [
        _Event(
            one.at,
            end,
            one.label,
            f"{one.what}: {one.text.partition(': ')[2] or one.text}{one.result and ': '}{one.result}",
            _BANDS[TONES.get(one.result, "")],
        )
        for one, end in lasting(find_incidents(run), until)
    ]
    found += [
        _Event(one.at, None, str(one.number), f"agent: {one.moves}: {one.result}", _CHANGE)
        for one in changes(run)
    ]
    return sorted(found, key=lambda one: one.at)


def _placed(panels: Sequence[Panel], top: int) -> Iterator[tuple[Panel, int, int]]:
    """Returns each panel with the place of its upper edge, and its height."""
    for panel, tall in zip(panels, _HEIGHTS, strict=False):
        top += 22
        yield panel, top, tall
        top += tall + 14


def _x(at: float, end: float) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * min(at, end) / end, 1)


def _scale(panel: Panel) -> tuple[AxisRange, list[tuple[int, Series, dict[str, list[float]]]]]:
    """Returns a panel's axis, and its series with the numbers of their colours and what is drawn of them."""
    first = 3 if panel.axis is charts.SHARE else 0
    drawn = [
        (first + n, one, columns(one, panel.axis.top, charts.FEW_POINTS))
        for n, one in enumerate(panel.series)
    ]
    values = [value for *_, data in drawn for value in data["value"]]
    return scale(panel.axis, values, ends_only=panel.axis is not ROWS), drawn


def _y(value: float, axis: AxisRange, top: int, tall: int) -> float:
    return round(top + tall * (axis.high - value) / (axis.high - axis.low), 1)


def _curves(panel: Panel, top: int, tall: int, end: float) -> Iterator[str]:
    """Returns the grid of a panel and its curves."""
    axis, drawn = _scale(panel)
    for tick in axis.ticks:
        y = _y(tick, axis, top, tall)
        yield f'<line class="edge" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:g}" y2="{y:g}"/>'
    for n, one, data in drawn:
        points = [
            (_x(at, end), _y(value, axis, top, tall))
            for at, value in zip(data["at"], data["value"], strict=True)
        ]
        if one.style == "level":
            points = [(_LEFT, points[0][1]), (_RIGHT, points[0][1])]
        if one.style == "step":
            nexts = [x for x, _ in points[1:]] + [_x(one.points[-1][0], end)]
            points = [(x, at) for (a, at), b in zip(points, nexts, strict=True) for x in (a, b)]
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        colour = _COLOURS[n % len(_COLOURS)]
        if one.style == "area":
            floor = top + tall
            yield (
                f'<polygon points="{points[0][0]:g},{floor:g} {path} {points[-1][0]:g},{floor:g}" '
                f'fill="{colour}" opacity=".13"/>'
            )
        stroke, dash = (_LEVEL, ' stroke-dasharray="1 5"') if one.style == "level" else (colour, "")
        yield f'<polyline class="line" points="{path}" stroke="{stroke}"{dash}/>'


def _axis(panel: Panel, top: int, tall: int) -> Iterator[str]:
    """Returns the values of the axis, and the names of panel and series."""
    axis, drawn = _scale(panel)
    for tick in axis.ticks:
        y = _y(tick, axis, top, tall) + 4
        yield f'<text x="{_LEFT - 8}" y="{y:g}" text-anchor="end">{_FORMS[panel.axis](tick)}</text>'
    keys = "".join(
        f'<tspan dx="10" fill="{_LEVEL if one.style == "level" else _COLOURS[n % len(_COLOURS)]}">'
        f"{'┈' if one.style == 'level' else '━'}</tspan><tspan> {escape(one.name)}</tspan>"
        for n, one, _ in drawn
        if len(drawn) > 1
    )
    yield f'<text x="{_LEFT}" y="{top - 7:g}">{escape(panel.name)} {keys}</text>'


def _times(end: float, bottom: int) -> Iterator[str]:
    """Returns the values of the axis of time."""
    for tick in scale(WHOLE, [end]).ticks:
        yield (
            f'<text x="{_x(tick, end):g}" y="{bottom + 18:g}" text-anchor="middle">{seconds(tick)}</text>'
        )


def _marks(events: Sequence[_Event], end: float, top: int, bottom: int) -> Iterator[str]:
    """Returns a band for each disturbance and a line for each change. A label that would touch the one before it is
    left out."""
    free = {True: 0.0, False: 0.0}
    for one in events:
        x, is_change = _x(one.at, end), one.until is None
        if one.until is not None:
            yield (
                f'<rect x="{x:g}" y="{top + 36}" width="{max(_x(one.until, end) - x, 2):g}" '
                f'height="{bottom - top - 36:g}" fill="{one.colour}" opacity=".1"/>'
            )
        dash = ' stroke-dasharray="2 3"' if is_change else ""
        yield (
            f'<line x1="{x:g}" x2="{x:g}" y1="{top + 36}" y2="{bottom:g}" stroke="{one.colour}"{dash}/>'
        )
        if x >= free[is_change]:
            free[is_change] = x + 8 * len(one.label) + 8
            yield (
                f'<text class="l" x="{x:g}" y="{top + (32 if is_change else 14)}" text-anchor="middle" '
                f'style="fill:{one.colour}">{one.label}</text>'
            )


def _list(events: Sequence[_Event], top: int, tall: int) -> Iterator[str]:
    """Returns a line for each event, and the cover that uncovers them one after another."""
    for n, one in enumerate(events[:_MOST_EVENTS]):
        text = f"{seconds(one.at)}  {one.text}"
        if len(text) > _CHARACTERS:
            text = f"{text[: _CHARACTERS - 2].rstrip(' ,:(')} …"
        y = top + _LINE * n + 14
        yield (
            f'<text x="16" y="{y:g}"><tspan class="l" style="fill:{one.colour}">{one.label}</tspan>'
            f'<tspan x="36">{escape(text)}</tspan></text>'
        )
    if len(events) > _MOST_EVENTS:
        y = top + _LINE * _MOST_EVENTS + 14
        yield f'<text x="36" y="{y:g}">… and {len(events) - _MOST_EVENTS} more</text>'
    yield (
        f'<svg y="{top:g}" width="{WIDTH}" height="{tall:g}"><rect class="cover" y="{tall:g}" width="{WIDTH}" '
        f'height="{tall:g}" fill="#fff"/></svg>'
    )


def _style(events: Sequence[_Event], end: float, tall: int) -> str:
    """Returns the style sheet. The cover of the list, so `tall`, moves at the moment of each event."""
    shown = [one.at for one in events[:_MOST_EVENTS]]
    starts = 100 * _STANDS + 0.1
    stops = f"{starts:g}%{{transform:translateY(-{tall}px)}}"
    for n, at in enumerate(shown, 1):
        share = starts + (100 - starts) * at / end
        stops += f"{share:.1f}%{{transform:translateY({_LINE * n - tall}px)}}"
    return _STYLE.format(
        plays=_PLAYS_S, across=_ACROSS, stands=100 * _STANDS, starts=starts, stops=stops
    )
