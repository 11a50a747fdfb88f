"""What comes from other rows, where the rows come later: appended to the table, or asked of a server."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.small_table import small_table
from sluice.etl.apply.features import Features
from sluice.etl.apply.lookups import Serving
from sluice.etl.spec.spec import Spec
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable, TableError
from sluice.etl.table.vacuum import vacuum
from tests.etl.jobs import build_table, rows_of, run
from tests.etl.tables import column, section, write_rows, write_spec
from tests.raises import raises

pytestmark = pytest.mark.spark

TEXT = write_spec(
    "click:int user:int item:text at:int price:float",
    section("join", path="%(folder)s/users.parquet", on=["user", "item"], columns=["age:int"]),
    section(
        "join",
        path="%(folder)s/levels.parquet",
        on="item",
        columns=["level:float"],
        time="at",
        their_time="since",
    ),
    section("history", name="seen", of="item", by="user", order="at", length=3),
    section("history", name="liked", of="price", by="user", order="at", length=2, positive=True),
    section("lag", name="third", of="price", by="user", order="at", rows=3),
    section("lag", name="since", of="at", by="user", order="at", difference=True),
    column("seen", "id_list", "hash, size = 1000"),
    column("liked", "id_list", "bucketize, boundaries = [1, 2, 3, 4, 5, 6, 7, 8, 9]"),
    *(
        column(name, "dense", "fill, value = -1")
        for name in ("age", "level", "third", "since", "at")
    ),
)


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A folder with the rows, and their earlier and their later half; the rows themselves, in the order of time."""
    folder, generator = tmp_path_factory.mktemp("halves"), np.random.default_rng(3)
    count = 240
    table = pa.table(
        {
            "click": pa.array(generator.integers(0, 2, count)),
            "user": pa.array(generator.integers(0, 25, count)),
            "item": pa.array(
                [None if v == 3 else f"i{v}" for v in generator.integers(0, 9, count)]
            ),
            "at": pa.array(np.arange(count) * 10),
            "price": pa.array([None if v < 1 else v for v in generator.random(count) * 10]),
        }
    )
    for name, part in (("all", table), ("early", table.slice(0, 120)), ("late", table.slice(120))):
        write_rows(folder / f"{name}.parquet", part)
    write_rows(folder / "users.parquet", user=[1, 1, 2], item=["i1", "i1", "i2"], age=[30, 31, 40])
    write_rows(
        folder / "levels.parquet",
        item=["i1", "i1", "i2"],
        since=[0, 600, 3000],
        level=[1.0, 2.0, 3.0],
    )
    return folder, table.to_pylist()


@pytest.fixture(scope="module")
def early(spark, halves, tmp_path_factory) -> FeatureTable:
    folder = tmp_path_factory.mktemp("made") / "t"
    return build_table(
        spark, folder, halves[0] / "early.parquet", text=TEXT % {"folder": halves[0]}
    )


def test_an_appended_row_sees_what_lies_before_it_in_the_table(spark, halves, early, tmp_path):
    """The same rows in one job and in two, to the last value of each history."""
    text = TEXT % {"folder": halves[0]}
    run(spark, tmp_path / "one", halves[0] / "all.parquet", text=text)
    two = shutil.copytree(early.uri, tmp_path / "two")
    run(spark, two, halves[0] / "late.parquet", text=text, mode="append")
    got = [sorted(map(repr, rows_of(FeatureTable.open(path)))) for path in (tmp_path / "one", two)]
    assert got[0] == got[1]
    # And what they leave for whoever comes next is the same.
    left = [Serving.open(FeatureTable.open(path)) for path in (tmp_path / "one", two)]
    asked = {
        "user": pa.array([*range(25), None, 99]),
        "item": pa.array(["i1"] * 27),
        "at": pa.array([9999] * 27),
    }
    assert [column.to_pylist() for column in left[0].complete(asked).values()] == [
        column.to_pylist() for column in left[1].complete(asked).values()
    ]


def test_serving_knows_what_a_job_would_have_found(halves, early):
    """Of the first later row of each user, held against the rows themselves."""
    rows = halves[1]
    first: dict[int, dict] = {}
    for row in rows[120:]:
        first.setdefault(row["user"], row)
    asked = [
        *first.values(),
        {"user": 99, "item": "i2", "at": 5000, "price": 1.0},
        {"user": None, "at": 1},
    ]
    columns = {
        name: pa.array([row.get(name) for row in asked], kind)
        for name, kind in (
            ("user", pa.int64()),
            ("item", pa.string()),
            ("at", pa.int64()),
            ("price", pa.float64()),
        )
    }
    got = Serving.open(early).complete(columns)
    before = defaultdict(list)
    for row in rows[:120]:
        before[row["user"]].append(row)
    for number, row in enumerate(asked):
        past = before[row["user"]] if row["user"] is not None else []
        assert (
            got["seen"][number].as_py() == [r["item"] for r in past if r["item"] is not None][-3:]
        )
        assert (
            got["liked"][number].as_py()
            == [r["price"] for r in past if r["click"] and r["price"] is not None][-2:]
        )
        assert got["third"][number].as_py() == (past[-3]["price"] if len(past) >= 3 else None)
        assert got["since"][number].as_py() == (row["at"] - past[-1]["at"] if past else None)
        pair = (row["user"], row.get("item"))
        assert got["age"][number].as_py() == {(1, "i1"): 31, (2, "i2"): 40}.get(pair)
        assert got["level"][number].as_py() == {"i1": 2.0, "i2": 3.0}.get(row.get("item"))
    made = Features(Spec.parse(early.record.spec), early.state()).inputs(got)
    assert [len(column) for column in made.values()] == [len(asked)] * 7


def test_vacuum_keeps_what_a_kept_version_is_served_with(early, tmp_path):
    store = TableStore(shutil.copytree(early.uri, tmp_path / "t"))
    assert not [
        p
        for p in vacuum(store, keep=1, now=2e9).files
        if "/serving/" in p and p.endswith(".parquet")
    ]
    assert Serving.open(FeatureTable.open(store.uri)).tails
    small_table(store.uri, rows=50, mode="overwrite")
    assert [p for p in vacuum(store, keep=1, now=2e9, dry_run=True).files if "/serving/" in p]
    store.remove(f"_sluice/serving/{early.record.job}")
    with raises(TableError, "serving"):
        Serving.open(FeatureTable.open(store.uri, 0))
