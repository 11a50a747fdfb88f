"""Times of a side table that are texts: read by their format, and checked before Spark starts."""

import datetime
import json
import random
import sys

import pyarrow as pa
import pytest

from tests.etl.jobs import build_table, rows_of
from tests.etl.tables import column, write_rows, write_spec
from tests.product import (
    Job,
    JobFailure,
    JobProgress,
    Serving,
    SparkEngine,
    Spec,
    SpecError,
    TableStore,
)
from tests.raises import raises

ZONE = 'zone = "Europe/Berlin"'
FIRST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAYS = 40


def spec_of(folder, form: str, their_time: str, kind: str = "float") -> str:
    return write_spec(
        f"click:int user:int at:{kind}",
        f'[[join]]\npath = "{folder}/side.{form}"\nformat = "{form}"\non = "user"\n'
        f'columns = ["plan:int"]\ntime = "at"\ntheir_time = {their_time}\n',
        column("user", "time"),
        column("at", "time"),
        column("plan", "dense", "fill, value = -1"),
    )


def write_side(folder, form: str, rows: list[tuple[int, str | None, int]]) -> None:
    names = ("user", "valid_from", "plan")
    objects = [dict(zip(names, row, strict=True)) for row in rows]
    if form == "parquet":
        write_rows(folder / "side.parquet", pa.Table.from_pylist(objects))
        return
    lines = [json.dumps(row | {"plan": str(row["plan"])}) for row in objects]
    if form == "csv":
        lines = [",".join(names), *(f"{user},{at or ''},{plan}" for user, at, plan in rows)]
    (folder / f"side.{form}").write_text("\n".join(lines) + "\n")


@pytest.mark.spark
@pytest.mark.parametrize(("form", "kind"), [("csv", "int"), ("json", "float"), ("parquet", "int")])
def test_drawn_texts_of_times_join_as_their_seconds_do_and_the_server_agrees(
    spark, tmp_path, form, kind
):
    """In a zone, at midnight: the row counts from the first second of its day on."""
    draw, number = random.Random(form), pa.int64() if kind == "int" else pa.float64()
    changes = [(draw.randrange(3), draw.randrange(DAYS), plan) for plan in range(60)]
    texts = [
        (user, f"{FIRST + datetime.timedelta(day):%d.%m.%Y}", plan) for user, day, plan in changes
    ]
    write_side(tmp_path, form, [*texts, (1, None, 99)])
    begin = int(FIRST.timestamp()) - 3600  # midnight in Berlin
    asked = [
        (user, begin + 86_400 * day + shift)
        for user in range(4)
        for day in range(-1, DAYS)
        for shift in (-1, 0, 1)
    ]
    write_rows(
        tmp_path / "rows.parquet",
        click=[n % 2 for n in range(len(asked))],
        user=[user for user, _ in asked],
        at=pa.array([at for _, at in asked], number),
    )
    text = spec_of(
        tmp_path, form, f'{{name = "valid_from", format = ["%Y-%m-%d", "%d.%m.%Y"], {ZONE}}}', kind
    )
    table = build_table(spark, tmp_path / "t", tmp_path / "rows.parquet", text=text)

    def plan_of(user: int, at: float) -> int:
        valid = [
            (day, plan) for who, day, plan in changes if who == user and begin + 86_400 * day <= at
        ]
        return max(valid, default=(0, -1))[1]

    made = {(int(row["user"]), int(row["at"])): row["plan"] for row in rows_of(table)}
    assert made == {(user, at): plan_of(user, at) for user, at in asked}
    latest = begin + 86_400 * 2 * DAYS
    at = pa.array([latest] * 3, number)
    served = Serving.open(table).complete({"user": pa.array(range(3)), "at": at}, {})
    assert served["plan"].to_pylist() == [plan_of(user, latest) for user in range(3)]


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
@pytest.mark.parametrize(
    ("their_time", "value", "shown"),
    [
        ('"valid_from"', "2026-01-05", ["format", "their_time = {name ="]),
        ('{name = "valid_from", format = "%Y-%m-%d"}', "05.01.2026", ["%Y-%m-%d", "05.01.2026"]),
    ],
)
def test_a_text_that_is_no_such_time_is_refused_by_name_before_spark_starts(
    tmp_path, form, their_time, value, shown
):
    write_side(tmp_path, form, [(1, value, 7)])
    write_rows(tmp_path / "rows.parquet", click=[0, 1], user=[1, 2], at=[1.0, 2.0])
    job = Job(
        spec=Spec.own(spec_of(tmp_path, form, their_time)),
        inputs=(str(tmp_path / "rows.parquet"),),
        store=TableStore(tmp_path / "t"),
    )

    def start():
        pytest.fail("Spark was started")

    engine = SparkEngine(start, job, JobProgress(sys.stderr))
    with raises((JobFailure, SpecError), "side", "valid_from", *shown):
        engine.check()
