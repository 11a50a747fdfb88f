"""A month that is unlike the table is appended with one warning line: numbers far away, and unknown JSON members."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest

from sluice.etl import job
from sluice.etl.first_rows import ROWS, warn_of_unknown_members
from sluice.etl.table.profile import DriftError
from tests.etl.jobs import Said, job_of, run
from tests.etl.tables import column, write_rows, write_spec
from tests.raises import assert_names, raises

OPS = {
    "fill": (1e-3, 1e3, 1 / 60),
    "fill; log, shift = 1": (1e-3, 1e3, 1 / 60),
    "fill; clip, low = 1, high = 200000": (1e-3,),
    "fill; log, shift = 1; standardise": (1e-3, 1e3, 1 / 60),
    "fill_mean; min_max": (1e3,),
}
"""Operators, and factors of the input that change most of what they make."""


def dwell(rng, rows: int, middle: float) -> np.ndarray:
    """Times around a middle value. 90 % of them differ by up to a factor of two from it."""
    return middle * np.exp(rng.normal(0, 0.4, rows))


@pytest.mark.parametrize("seed", range(5))
def test_a_column_that_moved_by_orders_of_magnitude_is_named_once_and_an_ordinary_month_is_not(
    tmp_path, seed
):
    rng = np.random.default_rng(seed)
    ops, rows = list(OPS)[seed % len(OPS)], int(rng.integers(200, 600))
    text = write_spec("click:int dwell_ms:float", column("dwell_ms", "dense", ops))
    middle = 10 ** rng.uniform(2.5, 4)

    def append(name: str, times: float, **options: object) -> str:
        found = dwell(rng, rows, middle * times)
        gaps = rng.random(rows) < 0.05
        write_rows(
            tmp_path / name,
            click=rng.integers(0, 2, rows),
            dwell_ms=[None if gap else value for gap, value in zip(gaps, found, strict=True)],
        )
        said = Said()
        run(None, tmp_path / "t", tmp_path / name, text=text, said=said, **options)
        return said.text

    assert "drift" not in append("first", 1.0)
    assert "drift" not in append("usual", rng.uniform(0.7, 1.4), mode="append")
    said = append("moved", rng.choice(OPS[ops]), mode="append")
    assert said.count("warning: drift") == 1
    assert_names(said, "'dwell_ms'", "unit", "--mode overwrite", "drift.psi")


def test_a_spec_that_limits_drift_decides_alone_and_few_rows_say_nothing(tmp_path):
    text = write_spec("click:int x:float", column("x", "dense", "fill"))
    for name, rows, value in (("1", 100, 1.0), ("2", 100, 1000.0), ("3", 20, 1.0)):
        write_rows(tmp_path / name, click=[0, 1] * (rows // 2), x=[value] * rows)
    run(None, tmp_path / "t", tmp_path / "1", text=text)
    for name, more, warned in (
        ("3", "", 0),
        ("2", "[drift]\npsi = {refuse = 99}\n", 0),
        ("1", "", 1),
    ):
        said = Said()
        run(None, tmp_path / "t", tmp_path / name, text=text + more, mode="append", said=said)
        assert said.text.count("warning: drift") == warned, name


def test_missing_values_that_become_fewer_are_drift_too(tmp_path):
    limit = "[drift]\nnulls = {refuse = 0.3}\n"
    text = write_spec("click:int x:float", column("x", "dense", "fill"), limit)
    for value, mode in ((None, "create"), (1.0, "append")):
        path = write_rows(tmp_path / mode, click=[0, 1] * 50, x=[1.0, value] * 50)
        with raises(DriftError, "nulls", "'x'", -0.5) if value else nullcontext():
            run(None, tmp_path / "t", path, text=text, mode=mode)


def test_members_that_no_column_reads_are_named_in_one_line(tmp_path):
    text = write_spec(
        "click:int user.id:text user.geo.city:text",
        *(column(name, "sparse", "hash, size = 9") for name in ("user.id", "user.geo.city")),
        form="json",
    )
    logs = tmp_path / "day.json"
    row = {"click": 1, "user": {"id": "a", "geo": {"city": "b"}}}

    def warned(*lines: str) -> str:
        logs.write_text("".join(f"{line}\n" for line in lines))
        said = Said()
        warn_of_unknown_members(job_of(tmp_path / "t", logs, text=text), said.write, {})
        return said.text

    assert warned(json.dumps(row), "no object", "[1]", "") == ""
    more = {**row, "device": {"os": 1}, "user": {"id": "a", "geo": {"zip": 1}, "age": None}}
    said = warned(json.dumps(row), json.dumps(more))
    assert_names(
        said, "warning:", logs, 3, "'device'", "'user.geo.zip'", "'user.age'", "input.columns"
    )
    assert said.count("warning") == 1
    assert "'device'" not in warned(*[json.dumps(row)] * ROWS, json.dumps(more))
    many = warned(json.dumps({f"m{number}": 0 for number in range(9)}))
    assert_names(many, "9 JSON members", "'m4';")
    assert "m5" not in many


def test_the_program_names_unknown_members_when_a_month_is_appended(tmp_path, capsys):
    spec, logs = tmp_path / "clicks.toml", tmp_path / "clicks.json"
    spec.write_text(
        write_spec("click:int item:text", column("item", "sparse", "hash, size = 9"), form="json")
    )
    words = ["--spec", spec, "--input", logs, "--output", tmp_path / "t", "--mode"]
    for mode, more in (("create", {}), ("append", {"campaign": 1})):
        logs.write_text(
            "".join(
                json.dumps({"click": number % 2, "item": f"{mode}{number}", **more}) + "\n"
                for number in range(40)
            )
        )
        job.main([str(word) for word in (*words, mode)])
        assert ("'campaign'" in capsys.readouterr().err) == bool(more)
