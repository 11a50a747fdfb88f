"""A month that is unlike the table is appended with one warning line: numbers far away, and columns without values."""

from contextlib import nullcontext

import numpy as np
import pytest

from tests.etl.jobs import Said, run
from tests.etl.tables import column, put, write_rows, write_spec
from tests.product import DriftError
from tests.raises import assert_names, raises

OPS = {
    "fill": (1e-3, 1e3, 1 / 60),
    "fill; log, shift = 1": (1e-3, 1e3, 1 / 60),
    "fill; clip, low = 1, high = 200000": (1e-3,),
    "fill; log, shift = 1; standardise": (1e-3, 1e3, 1 / 60),
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
        times_drawn = dwell(rng, rows, middle * times)
        gaps = rng.random(rows) < 0.05
        write_rows(
            tmp_path / name,
            click=rng.integers(0, 2, rows),
            dwell_ms=[None if gap else value for gap, value in zip(gaps, times_drawn, strict=True)],
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


def test_a_column_without_any_value_is_named(tmp_path):
    text = write_spec(
        "click:int item:text itm:text",
        *(column(name, "sparse", "hash, size = 9") for name in ("item", "itm")),
        form="json",
    )
    day, said = put(tmp_path / "day.json", '{"click": 1, "item": "a"}\n{"click": 0}\n'), Said()
    run(None, tmp_path / "t", day, text=text, said=said)
    assert "input columns itm have no value in any row" in said.text
