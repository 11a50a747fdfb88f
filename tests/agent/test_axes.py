"""Where the axes of a run's charts end: no browser is needed."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sluice.agent.report import charts, page
from sluice.agent.report.charts import BYTES, ROWS, SCORE, SHARE, WHOLE, Panel, Series, chart, scale
from sluice.agent.report.run_folder import Run
from tests.agent import grown_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_picture_of_the_demo_is_shown_and_holds_no_script():
    text = (ROOT / "docs" / "pictures" / "demo.svg").read_text()
    assert "Waiting for input" in ET.fromstring(text).find("{http://www.w3.org/2000/svg}title").text
    assert "<script" not in text
    assert "(docs/pictures/demo.svg)" in (ROOT / "README.md").read_text()
