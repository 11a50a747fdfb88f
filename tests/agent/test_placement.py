"""Advice on where operators belong: by arithmetic on known costs, and against a table that has them elsewhere."""

from __future__ import annotations

import json
from collections import deque

import pytest

from sluice.agent.report import narrative
from sluice.agent.report.operator_placement import Move, moves, placement
from sluice.agent.report.run_folder import Run
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
from tests.dlrm import clicks_table
from tests.raises import assert_names


def _run(tmp_path, *, demand=None, etl=(), workers=1, ids=()):
    """Two cores; reading, which moves rows too, takes 1 µs a row, `squash` 2 µs, each with so many workers."""
    costs = {"read": 0.75e-6, "shuffle": 0.25e-6, "squash": 2e-6}
    rate = min(workers / 2e-6, 2 / 3e-6, demand or 1e9)
    stages = {
        name: {"workers": workers, "busy": rate * cost, "cpu": rate * cost}
        for name, cost in costs.items()
    }
    columns = [
        {
            "column": "I1",
            "operators": "clip+log",
            "cpu_s": 0.5e-6,
            "bytes_before": 2.0,
            "bytes_after": 4.0,
            "stage": "squash",
        },
        {
            "column": "I2",
            "operators": "log",
            "cpu_s": 1e-6,
            "bytes_before": 4.0,
            "bytes_after": 3.0,
            "stage": "squash",
        },
        *ids,
    ]
    events = [
        {"kind": "operators", "loader": columns, "etl": list(etl), "row_bytes": 50.0},
        {"kind": "verdict", "text": "so", "details": {}},
    ]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"at": 1.0, **e}) + "\n" for e in events)
    )
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps(
            {
                "kind": "loader",
                "at": 1.0,
                "cpu_quota": 2.0,
                "rows_per_s": rate,
                "stall": 0.5,
                "cpu": rate * 3e-6,
                "knobs": {"fused": ["shuffle"]},
                "demand_rows_per_s": demand,
                "stages": stages,
            }
        )
        + "\n"
    )
    return Run.read(tmp_path)


def test_moving_operators_into_the_etl_is_worth_what_they_cost(tmp_path):
    """`squash` bounds the rate at 0.5 M: without I2 it does 1 M, as many as the two cores do for 2 µs a row."""
    both, first, second = moves(_run(tmp_path))
    assert [m.what for m in (both, first, second)] == [
        "all 2 columns' operators",
        "`log I2`",
        "`clip+log I1`",
    ]
    assert first.gain == pytest.approx(1.0)
    assert second.gain == pytest.approx(2 / 1.5 - 1)
    assert both.gain == pytest.approx(1.0)  # reading bounds it then, at 1 M
    assert [m.more_bytes for m in (both, first, second)] == pytest.approx([0.02, -0.02, 0.04])
    assert_names(narrative.tell(_run(tmp_path)), "`clip+log I1`", "+33 % rows/s", "+4.0 % bytes")


def test_operators_that_give_ids_cost_the_stage_that_decodes(tmp_path):
    """Where only the cores bound the rate, 3 µs a row, what `modulus` takes is saved; the stage of the others stays."""
    user = {
        "column": "user",
        "operators": "modulus",
        "stage": "read",
        "cpu_s": 0.5e-6,
        "bytes_before": 8.0,
        "bytes_after": 4.0,
    }
    found = {
        m.what: m
        for m in moves(_run(tmp_path, workers=9, ids=[user], etl=[{**user, "column": "item"}]))
    }
    assert found["`modulus user`"].gain == pytest.approx(3 / 2.5 - 1)
    assert found["`log I2`"].gain == pytest.approx(3 / 2 - 1)
    item = next(m for m in found.values() if not m.to_etl)
    assert (item.what, item.gain) == ("`modulus item`", pytest.approx(3 / 3.5 - 1))


def test_where_the_trainer_is_the_bottleneck_nothing_is_to_be_gained(tmp_path):
    (line,) = placement(_run(tmp_path, demand=4e5))
    assert "would bring nothing" in line


def test_the_reverse_costs_rows(tmp_path):
    found = moves(
        _run(
            tmp_path,
            etl=[{"column": "I5", "operators": "standardise", "stage": "squash", "cpu_s": 2e-6}],
        )
    )
    assert (found[-1].to_etl, found[-1].gain) == (False, pytest.approx(-0.5))
    assert_names(found[-1].sentence, "`standardise I5`", "loader", "−50 % rows/s")


def test_a_run_that_measured_nothing_is_given_no_advice(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert placement(Run.read(tmp_path)) == []


def test_more_than_twice_is_no_percentage():
    move = Move(what="`log I2`", to_etl=True, gain=1.3, more_bytes=0.25)
    assert_names(move.sentence, "`log I2`", "ETL", "2.3 times", "+25 % bytes")


def test_what_operators_cost_is_a_part_of_what_reading_took(tmp_path):
    """The same rows and features, with and without operators in the loader, by processor time and not by the clock."""
    raw, text = clicks_table.raw_rows(20_000), clicks_table.spec_text()
    left = clicks_table.write(tmp_path / "left", raw)
    moved = clicks_table.write(tmp_path / "moved", raw, text=text.replace(", online = true", ""))
    labels, predicted, reverse = {}, 0.0, []
    for name, table in (("left", left), ("moved", moved)):
        with BatchLoader(table, batch_size=4000, reading=Reading(reader="arrow")) as loader:
            labels[name] = sum(float(batch.label.sum()) for batch in loader)
            stages = {s.name: s for s in loader.snapshot().stages}
            if name == "left":
                took = stages["read"].cpu_s / stages["read"].rows
                predicted = sum(c["cpu_s"] for c in loader.operators.costs())
            else:
                reverse = loader.operators.others()
            deque(loader, maxlen=0)
    assert labels["left"] == labels["moved"]
    assert 0 < predicted < took
    assert {c["column"]: c["operators"] for c in reverse}["I2"] == "clip+log"
    assert all(c["cpu_s"] > 0 for c in reverse)
