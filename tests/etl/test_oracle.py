"""The oracle finds leaks that are planted, each by column and operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sluice.etl import ops
from sluice.etl.apply import counts
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.local.engine import LocalEngine
from sluice.etl.ops.statistics import Target
from sluice.etl.spark import joins
from sluice.etl.spark.engine import SparkEngine
from sluice.etl.table.table import FeatureTable
from tests.etl.jobs import Said, run
from tests.etl.tables import column, section, write_rows, write_spec
from tests.fuzz import leaks
from tests.fuzz.oracle import CannotJudge, find_leaks
from tests.fuzz.seeds import seed_of_code
from tests.raises import raises

ROWS = 400
HEAD = write_spec(
    "click:int user:text item:text at:float price:float",
    table='key = ["user", "item", "at"]\n%s',
)
BY_HASH = "split = {train = 0.7, test = 0.3}"
BY_TIME = 'split_time = "at"\nsplit = {train = 0, test = 70}'
MOMENT = "labels of the same moment, or later ones"


def rows(seed: int = 0, count: int = ROWS) -> pa.Table:
    draw = np.random.default_rng(seed)
    return pa.table(
        {
            "click": draw.integers(0, 2, count),
            "user": [f"u{n}" for n in draw.integers(0, 20, count)],
            "item": [f"i{n}" for n in draw.integers(0, 9, count)],
            "at": draw.integers(0, 100, count).astype(float),
            "price": draw.random(count),
        }
    )


@pytest.fixture
def file(tmp_path):
    write_rows(tmp_path / "rows.parquet", rows())
    return tmp_path / "rows.parquet"


def leaks_of(text: str, file, spark=None, inputs=()) -> set[tuple[str, str, str]]:
    """Makes a table of a file, and returns its leaks: column, operator, and what it holds."""
    run(spark, file.parent / "table", file, text=text)
    engine = partial(
        LocalEngine if spark is None else partial(SparkEngine, spark), progress=JobProgress(Said())
    )
    table = FeatureTable.open(file.parent / "table")
    found = find_leaks(table, [str(path) for path in inputs or [file]], engine, flips=5)
    return {(leak.column, leak.operator, leak.holds) for leak in found}


def cheating(kind: str, change: Callable[[pa.Array], pa.Array]) -> type[Target]:
    """A target encoding to which the keys of rows, or their moments, are told otherwise."""

    class Cheating(Target):
        name = kind

        def apply(self, column, state):
            value, label, last = column.flatten()
            fields = [value, label, change(last)]
            return super().apply(pa.StructArray.from_arrays(fields, ["value", *self.needs]), state)

    return Cheating


def just_after(times: pa.Array) -> pa.Array:
    later = np.nextafter(times.to_numpy(zero_copy_only=False), np.inf)
    return pc.if_else(times.is_valid(), pa.array(later), None)


@pytest.mark.parametrize(
    ("change", "table", "holds"),
    [
        (lambda keys: pa.nulls(len(keys), keys.type), BY_HASH, {"its own label"}),
        (just_after, BY_TIME, {"its own label", MOMENT}),
        (
            lambda times: pc.add(times, 10.0),
            BY_TIME,
            {"its own label", MOMENT, "rows of later moments"},
        ),
    ],
)
def test_an_encoding_that_sees_what_it_must_not_is_found(change, table, holds, file, monkeypatch):
    monkeypatch.setitem(ops.OPERATORS, "cheat", cheating("cheat", change))
    past = ", past = true" * (table == BY_TIME)
    text = HEAD % table + column("user", "dense", "cheat" + past)
    assert leaks_of(text + column("price", "dense", "fill"), file) == {
        ("user", "cheat", what) for what in holds
    }


def test_a_state_that_is_learned_from_test_rows_is_found(file, monkeypatch):
    def everything(spec, columns, keys):
        return columns, counts.row_keys(columns, spec) if keys is None else keys

    monkeypatch.setattr(counts, "_training", everything)
    seen = leaks_of(
        HEAD % BY_HASH
        + column("price", "dense", "standardise; fill")
        + column("user", "sparse", "categorify"),
        file,
    )
    assert ("price", "standardise", "rows of split 'test'") in seen
    assert ("user", "categorify", "rows of split 'test'") in seen


def test_of_a_table_that_the_files_do_not_make_nothing_is_said(file, tmp_path):
    write_rows(tmp_path / "some.parquet", rows().slice(0, 300))
    for columns, words in (
        (column("user", "dense", "target"), ("target", "'user'")),
        (column("price", "dense", "fill"), ("300 of 400",)),
    ):
        (tmp_path / words[0]).mkdir()
        whole = file.rename(tmp_path / words[0] / "rows.parquet")
        with raises(CannotJudge, *words):
            leaks_of(HEAD % BY_HASH + columns, whole, inputs=[tmp_path / "some.parquet"])
        whole.rename(file)


@pytest.mark.spark
def test_joins_and_lags_that_see_a_label_or_what_comes_later_are_found(
    spark, tmp_path, monkeypatch
):
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    def lag(rows, history, _spec, _earlier):
        more = {"tied": ["click"], "seen": ["item"], "ahead": []}[history.name]
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
    write_rows(tmp_path / "rows.parquet", rows())
    lags = "".join(
        section("lag", name=name, of=of, by="user", order="at")
        for name, of in (("tied", "price"), ("seen", "click"), ("ahead", "price"))
    )
    text = (
        HEAD % BY_TIME
        + lags
        + section(
            "join", path=str(side), on=["user"], columns=["age:int"], time="at", their_time="since"
        )
        + "".join(
            column(name, "dense", "fill") for name in ("tied", "seen", "ahead", "age", "price")
        )
    )
    seen = leaks_of(text, tmp_path / "rows.parquet", spark)
    later = "rows of later moments"
    assert {
        ("tied", "[[lag]] tied", MOMENT),
        ("seen", "[[lag]] seen", MOMENT),
        ("ahead", "[[lag]] ahead", later),
        ("age", f"[[join]] {side}", later),
    } <= seen
    assert {name for name, _, holds in seen if holds == later} == {"ahead", "age"}
    assert "price" not in {name for name, _, _ in seen}


@pytest.mark.spark
def test_a_drawn_table_whose_rows_meet_others_has_no_leak(spark, tmp_path):
    seed = leaks.SPARK_EVERY * seed_of_code()
    assert leaks.try_seed(seed, tmp_path) == [], f"replay it with: make fuzz SEED={seed} ONLY=leaks"
