"""Where the axes of a run's charts end: no browser is needed."""

from __future__ import annotations

import json
import re

import pytest

from sluice.agent.report.charts import BYTES, ROWS, SCORE, SHARE, WHOLE, Panel, Series, chart, scale

pytestmark = pytest.mark.slow


def _figures(text):
    return [
        json.loads(one)
        for one in re.findall(r'<script type="application/json" class="">(.*?)</script>', text)
    ]


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
        (SHARE, [0.2, 0.4], False, (0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))),
        (BYTES, [3.0 * 2**20], False, (0.0, 3.0 * 2**20, (0.0, 2**20, 2**21, 3 * 2**20))),
        (WHOLE, [1.0, 7.0], True, (0.0, 7.0, (0.0, 7.0))),
        (SCORE, [0.405, 0.5], False, (0.405, 0.5, (0.425, 0.45, 0.475, 0.5))),
        (SCORE, [0.81, 0.81], False, (0.8, 0.82, (0.81,))),
    ],
)
def test_ticks_are_round_and_none_is_beyond_the_data(axis, values, ends_only, expected):
    found = scale(axis, values, ends_only=ends_only)
    assert (found.low, found.high) == pytest.approx(expected[:2])
    assert found.ticks == pytest.approx(expected[2])
