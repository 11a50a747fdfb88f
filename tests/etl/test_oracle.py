"""The oracle finds leaks that are planted, each by column and operator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.apply import counts
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.local.engine import LocalEngine
from sluice.etl.spark import joins
from sluice.etl.spark.engine import SparkEngine
from tests.etl.jobs import Said, build_table
from tests.etl.tables import column, section, write_rows, write_spec
from tests.fuzz import leaks
from tests.fuzz.oracle import find_leaks
from tests.fuzz.seeds import seed_of_code

HEAD = write_spec(
    "click:int user:text item:text at:float price:float",
    table='key = ["user", "item", "at"]\n%s',
)
BY_HASH = "split = {train = 0.7, test = 0.3}"
MOMENT = "labels of the same moment, or later ones"


def rows() -> pa.Table:
    draw, count = np.random.default_rng(0), 400
    return pa.table(
        {
            "click": draw.integers(0, 2, count),
            "user": [f"u{n}" for n in draw.integers(0, 20, count)],
            "item": [f"i{n}" for n in draw.integers(0, 9, count)],
            "at": draw.integers(0, 100, count).astype(float),
            "price": draw.random(count),
        }
    )


def leaks_of(text: str, folder: Path, spark=None) -> set[tuple[str, str, str]]:
    """Makes a table, and returns its leaks: column, operator, and what it holds."""
    file = write_rows(folder / "rows.parquet", rows())
    table = build_table(spark, folder / "table", file, text=text)
    engine = partial(
        LocalEngine if spark is None else partial(SparkEngine, spark), progress=JobProgress(Said())
    )
    found = find_leaks(table, [str(file)], engine, flips=5)
    return {(leak.column, leak.operator, leak.holds) for leak in found}


def test_a_state_that_is_learned_from_test_rows_is_found(tmp_path, monkeypatch):
    def everything(spec, columns, keys):
        return columns, counts.row_keys(columns, spec) if keys is None else keys

    monkeypatch.setattr(counts, "_training", everything)
    seen = leaks_of(
        HEAD % BY_HASH
        + column("price", "dense", "standardise; fill")
        + column("user", "sparse", "categorify"),
        tmp_path,
    )
    assert ("price", "standardise", "rows of split 'test'") in seen
    assert ("user", "categorify", "rows of split 'test'") in seen


@pytest.mark.spark
def test_joins_and_lags_that_see_a_label_or_what_comes_later_are_found(
    spark, tmp_path, monkeypatch
):
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    def lag(rows, history, _spec, _earlier):
        more = ["click"] if history.name == "tied" else []
        window = Window.partitionBy(history.by).orderBy(history.order, *more)
        step = sql.lead if history.name == "ahead" else sql.lag
        return rows.withColumn(history.name, step(sql.col(history.of), 1).over(window))

    def join(rows, one, spec):
        return timely(rows, replace(one, time=None, their_time=None), spec)

    timely, draw = joins._add_side_columns, np.random.default_rng(5)
    monkeypatch.setattr(joins, "_add_history", lag)
    monkeypatch.setattr(joins, "_add_side_columns", join)
    side = tmp_path / "side.parquet"
    write_rows(
        side,
        user=[f"u{n}" for n in draw.integers(0, 20, 200)],
        age=draw.integers(0, 90, 200),
        since=draw.integers(0, 100, 200).astype(float),
    )
    lags = "".join(
        section("lag", name=name, of="price", by="user", order="at") for name in ("tied", "ahead")
    )
    text = (
        HEAD % 'split_time = "at"\nsplit = {train = 0, test = 70}'
        + lags
        + section(
            "join", path=str(side), on=["user"], columns=["age:int"], time="at", their_time="since"
        )
        + "".join(column(name, "dense", "fill") for name in ("tied", "ahead", "age", "price"))
    )
    seen = leaks_of(text, tmp_path, spark)
    later = "rows of later moments"
    assert {
        ("tied", "[[lag]] tied", MOMENT),
        ("ahead", "[[lag]] ahead", later),
        ("age", f"[[join]] {side}", later),
    } <= seen
    assert {name for name, _, holds in seen if holds == later} == {"ahead", "age"}
    assert "price" not in {name for name, _, _ in seen}


@pytest.mark.spark
def test_a_drawn_table_whose_rows_meet_others_has_no_leak(spark, tmp_path):
    seed = leaks.SPARK_EVERY * seed_of_code()
    assert leaks.try_seed(seed, tmp_path) == [], f"replay it with: make fuzz SEED={seed} ONLY=leaks"
