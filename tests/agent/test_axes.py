"""Where the axes of a run's charts end, and its animated picture: no browser is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sluice.agent.report import animation, charts, page
from sluice.agent.report.charts import BYTES, ROWS, SCORE, SHARE, WHOLE, Panel, Series, chart, scale
from sluice.agent.report.run_folder import Run, RunFolder
from tests.agent import grown_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
DRAWN = [
    (5.0, {"looks": 5}),
    (58.7, {"looks": 60, "decisions": 3, "faults": 2, "seed": 1}),
    (601.3, {"looks": 300, "decisions": 12, "faults": 5, "seed": 2}),
    (36_000.0, {"looks": 1_800, "decisions": 60, "faults": 14, "seed": 3}),
]


@pytest.fixture(params=DRAWN, ids=lambda one: f"{one[0]:g}s")
def run(request, tmp_path):
    seconds, made = request.param
    return Run.read(grown_run.write(tmp_path / "run", seconds, **made))


def _figures(text):
    return [
        json.loads(one)
        for one in re.findall(r'<script type="application/json" class="">(.*?)</script>', text)
    ]


def test_each_axis_of_a_run_ends_where_its_data_end(run):
    found = _figures(page.page(run))
    assert len(found) > 8
    for figure in found:
        times = [at for panel in figure["panels"] for one in panel["series"] for at in one["at"]]
        assert figure["end"] >= max(times)
        for panel in figure["panels"]:
            values = [value for one in panel["series"] for value in one["value"]]
            assert panel["ticks"]
            assert panel["ticks"][-1] <= panel["high"] * (1 + 1e-9)
            assert panel["ticks"][0] >= panel["low"]
            if len(set(values)) > 1 and panel["form"] != "share":
                assert panel["high"] == max(values)
                assert panel["ticks"][-1] <= max(values) * (1 + 1e-9)


def test_a_chart_ends_at_its_last_point_also_that_of_a_value_that_stays():
    steps = Series(name="workers", points=[(0.0, 1.0), (3.0, 2.0), (7.25, 2.0)], style="step")
    level = Series(name="before", points=[(0.0, 1.5)], style="level")
    (found,) = _figures(chart("Workers", Panel(axis=WHOLE, series=[steps, level])))
    assert found["end"] == 7.25
    assert found["panels"][0]["series"][0]["at"] == [0.0, 3.0]


@pytest.mark.parametrize(
    ("axis", "values", "ends_only", "expected"),
    [
        (ROWS, [9_000.0, 44_000.0], False, (0.0, 44_000.0, (0.0, 20_000.0, 40_000.0))),
        (ROWS, [0.93], False, (0.0, 0.93, (0.0, 0.25, 0.5, 0.75))),
        (SHARE, [0.2, 0.4], False, (0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))),
        (BYTES, [3.0 * 2**20], False, (0.0, 3.0 * 2**20, (0.0, 2**20, 2**21, 3 * 2**20))),
        (WHOLE, [1.0, 7.0], True, (0.0, 7.0, (0.0, 7.0))),
        (WHOLE, [0.0, 0.0], False, (0.0, 1.0, (0.0,))),
        (SCORE, [0.405, 0.5], False, (0.405, 0.5, (0.425, 0.45, 0.475, 0.5))),
        (SCORE, [0.81, 0.81], False, (0.8, 0.82, (0.81,))),
    ],
)
def test_ticks_are_round_and_none_is_beyond_the_data(axis, values, ends_only, expected):
    found = scale(axis, values, ends_only=ends_only)
    assert (found.low, found.high) == pytest.approx(expected[:2])
    assert found.ticks == pytest.approx(expected[2])


def test_an_axis_has_two_to_five_ticks_whatever_its_values():
    for exponent in range(-3, 10):
        for factor in (1.0, 1.1, 1.9, 2.4, 3.3, 4.9, 7.7, 9.99):
            for axis in (ROWS, BYTES):
                found = scale(axis, [factor * 10.0**exponent])
                assert 3 <= len(found.ticks) <= charts._INTERVALS + 1


# ---- the animated picture


def _inside(svg, wide, tall, left=0.0, top=0.0):
    """Every mark of a picture lies in its frame. The curtain and the cover wait outside of theirs, unseen."""
    for one in svg:
        get = one.attrib.get
        if one.tag == f"{SVG}svg":
            assert left + float(get("x", 0)) + float(get("width")) <= wide
            assert float(get("y", 0)) + float(get("height")) <= tall
            continue
        xs = [float(get(name)) for name in ("x", "x1", "x2") if get(name)]
        ys = [float(get(name)) for name in ("y", "y1", "y2") if get(name)]
        for x, y in (pair.split(",") for pair in get("points", "").split()):
            xs.append(float(x))
            ys.append(float(y))
        if one.tag == f"{SVG}rect":
            xs.append(float(get("x", 0)) + float(get("width")))
            ys.append(float(get("y", 0)) + float(get("height")))
        assert all(0 <= x <= wide for x in xs), (one.tag, one.attrib)
        assert all(0 <= y <= tall for y in ys), (one.tag, one.attrib)


def _checked(text):
    svg = ET.fromstring(text)
    _, _, wide, tall = map(float, svg.attrib["viewBox"].split())
    _inside(svg, wide, tall)
    assert len(text.encode()) < 60_000
    assert "<script" not in text
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)", text)
    style = svg.find(f"{SVG}style").text
    before = style.partition("@media (prefers-reduced-motion:no-preference)")[0]
    assert "animation" in style
    assert "animation" not in before, "nothing moves for who asked for reduced motion"
    return svg


def test_a_run_has_a_small_picture_without_a_script_and_all_of_it_is_inside(run):
    text = animation.picture(run)
    svg = _checked(text)
    assert text == animation.picture(run)
    shown = ["".join(one.itertext()) for one in svg.findall(f"{SVG}text")]
    assert "rows a second" in " ".join(shown)
    events = len(run.of("decision")) + len(run.of("fault"))
    listed = len([one for one in svg.findall(f"{SVG}text") if one.get("x") == "16"])
    title = len([one for one in svg.findall(f"{SVG}text") if one.get("class") == "h"])
    assert listed - title == min(events, 12)
    assert (f"… and {events - 12} more" in shown) == (events > 12)
    times = [one for one in shown if re.fullmatch(r"\d+( \d+)? ?(s|min|h)( \d+ (s|min))?", one)]
    assert times


def test_a_picture_begins_and_ends_complete():
    """A program that shows only the first moment shows all of it."""
    style = animation._style([animation._Event(1.0, None, "1", "x", "#000")], 2.0, 27)
    for name in ("move", "list"):
        first = re.search(rf"@keyframes {name}{{from,.*?{{transform:(\w+)}}", style)
        assert first[1] == "none"
    # Half of the run is half of the time that is left after the beginning.
    assert "62.6%{transform:translateY(-8px)}" in style


def test_a_run_without_measurements_has_a_picture_that_says_so(tmp_path):
    with RunFolder.create(tmp_path / "run", {}):
        pass
    svg = _checked(animation.picture(Run.read(tmp_path / "run")))
    assert "Nothing is measured yet." in svg.find(f"{SVG}title").text


def test_the_committed_picture_of_the_demo_is_one_of_these_and_is_shown():
    svg = _checked((ROOT / "docs" / "pictures" / "demo.svg").read_text())
    assert "Waiting for input" in svg.find(f"{SVG}title").text
    assert "(docs/pictures/demo.svg)" in (ROOT / "README.md").read_text()


def test_the_program_writes_a_picture_where_it_is_told(tmp_path):
    folder = grown_run.write(tmp_path / "run", 60.0, looks=60, decisions=3)
    for path, code in ((tmp_path / "a.svg", 0), (tmp_path / "none" / "a.svg", 2)):
        done = subprocess.run(
            [sys.executable, "-m", "sluice", "report", folder, "--picture", path],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        if code:
            assert f"--picture {path}: cannot be written" in done.stderr
        else:
            assert json.loads(done.stdout.splitlines()[-1])["picture"] == str(path)
            assert path.read_text() == animation.picture(Run.read(folder))
