"""Values that turn to null: what is counted, and which versions are refused for it."""

from pathlib import Path

import pyarrow as pa
import pytest

from sluice import FeatureTable
from sluice.etl.apply.counts import unread
from sluice.etl.apply.unreadable import lost
from tests.etl.jobs import rows_of, run
from tests.etl.tables import column, write_rows, write_spec
from tests.product import (
    DriftError,
    Features,
    FittedState,
    InputError,
    Job,
    JobFailure,
    Spec,
    SpecError,
    TableStore,
    between,
    spark_errors_as_job_failure,
)
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

TEXT = write_spec(
    "click:int at:text price:float",
    column("hour", "dense", 'parse_time, format = "%Y-%m-%d %H:%M"; hour; fill', "at"),
    column("price", "dense", "fill"),
)


def test_a_share_is_refused_that_has_more_than_doubled_and_risen_by_five_points():
    before = {"a": 0.0, "b": 0.1, "c": 0.1, "d": 0.04, "gone": 0.1}
    for now, names in (
        ({"a": 0.05}, ["a"]),
        ({"a": 0.0499}, []),
        ({"b": 0.2}, []),
        ({"b": 0.2001}, ["b"]),
        ({"d": 0.089}, []),
        ({"d": 0.0901}, ["d"]),
        ({"new": 0.9}, []),
        ({"c": 0.05}, []),
        ({"a": 0.2, "b": 0.9}, ["b", "a"]),
    ):
        assert lost(before, now) == names


def test_only_values_that_are_there_and_cannot_be_read_are_counted():
    spec = Spec.parse(TEXT)
    at = pa.array(["2024-01-31 10:00", None, "31.01.2024", "2024-02-31 10:00", ""], pa.string())
    columns = {"click": pa.array([0] * 5), "at": at, "price": pa.array([None] * 5, pa.float64())}
    assert list(unread(Features(spec, FittedState()), columns)) == [("hour", 3, "31.01.2024")]
    lists = Spec.parse(
        TEXT.replace('"at:text"', '"at:texts"')
        .replace(
            'role = "dense"\nops = [{op = "parse_time"',
            'role = "id_list"\nops = [{op = "parse_time"',
            1,
        )
        .replace('{op = "hour"}, {op = "fill"}', '{op = "bucketize", boundaries = [1]}', 1)
    )
    columns["at"] = pa.array(
        [["2024-01-31 10:00"], None, [None], ["2024-01-31 10:00", "x"], []], pa.list_(pa.string())
    )
    assert [
        (name, count) for name, count, _ in unread(Features(lists, FittedState()), columns)
    ] == [("hour", 1)]


def test_rows_are_ordered_by_numbers_only(tmp_path):
    lag = '[[lag]]\nname = "x"\nof = "price"\nby = "at"\norder = "%s"\n[table]'
    text = TEXT.replace('"price:float"]', '"price:float", "tags:texts"]')
    with raises(SpecError, "lag[0].order = 'tags'", "texts"):
        Spec.parse(text.replace("[table]", lag % "tags"))
    with raises(InputError, "ordered by the text 'at'", '{name = "at:float", format = '):
        run(None, tmp_path / "t", text=text.replace("[table]", lag % "at"))


def rows(path: Path, how: str, *, prices: int = 400, form: int = 400) -> Path:
    """Rows with a time each, of which the first `form` are written so; and so many prices."""
    day = [f"{n % 28 + 1:02}" for n in range(400)]
    at = [how.replace("DD", d) if n < form else f"2024-01-{d} 10:00" for n, d in enumerate(day)]
    return write_rows(
        path,
        click=[n % 2 for n in range(400)],
        at=at,
        price=pa.array([1.0 if n < prices else None for n in range(400)]),
    )


@pytest.mark.spark
def test_a_version_whose_values_turn_to_null_is_refused_unless_the_user_accepts_it(spark, tmp_path):
    usual, german = (
        rows(tmp_path / "a", "2024-01-DD 10:00"),
        rows(tmp_path / "b", "DD.01.2024 10:00", form=60),
    )
    table = tmp_path / "t"
    run(None, table, usual, text=TEXT)
    assert FeatureTable.open(table).record.unread == {"hour": 0.0}
    with pytest.raises(
        DriftError,
        match=r"column 'hour': 15\.0% of its values cannot be read, for instance "
        r"'\d\d\.01\.2024 10:00'; in the version before it was 0\.0%; nothing was "
        r"published; .*--accept-nulls hour$",
    ):
        run(None, table, german, text=TEXT, mode="overwrite")
    assert FeatureTable.open(table).version == 0
    assert not [
        p for p in (table / "data").iterdir() if FeatureTable.open(table).record.job != p.name
    ]
    with raises(DriftError, "'price'", "10.0%", "missing"):
        run(
            None,
            table,
            rows(tmp_path / "c", "2024-01-DD 10:00", prices=360),
            text=TEXT,
            mode="append",
        )
    both = TEXT.replace('"%Y-%m-%d %H:%M"', '["%Y-%m-%d %H:%M", "%d.%m.%Y %H:%M"]')
    run(None, table, german, text=both, mode="append")
    assert {row["hour"] for row in rows_of(table)} == {10.0}
    run(None, table, german, text=TEXT, mode="append", accept_nulls=("hour",))
    changes = between(FeatureTable.open(table, 1), FeatureTable.open(table, 2))
    assert changes.lost == {"hour": (0.0, 0.15)}
    assert "the same columns" not in changes.text
    assert_names(changes.text, "'hour'", "15.0%", "0.0%")
    with raises(InputError, "--accept-nulls huor", "'hour'"):
        Job(
            spec=Spec.parse(TEXT),
            inputs=(),
            store=TableStore(table),
            mode="append",
            accept_nulls=("huor",),
        )
    # Nor are a side table's values taken for null that are not of their type.
    side = tmp_path / "side.csv"
    side.write_text("price,age,since\n0,12,1\n1,twelve,2024-01-05\n")
    join = (
        TEXT
        + f"""[[join]]
path = "{side}"
format = "csv"
on = "price"
columns = ["age:int"]
time = "price"
their_time = "since"
"""
    )
    for accepted, name, value in (((), "age", "twelve"), (("age",), "since", "2024-01-05")):
        facts = ("join.path", f"'{name}'", value, f"--accept-nulls {name}")
        with raises(JobFailure, *facts), spark_errors_as_job_failure():
            run(spark, table, usual, text=join, mode="overwrite", accept_nulls=accepted)
