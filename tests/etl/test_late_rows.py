"""Rows of an append that are older than rows of the table: counted, or rejected, by any key and order."""

import json

import numpy as np
import pytest

from sluice import FeatureTable
from tests.etl import test_serving as plain
from tests.etl.jobs import Said, job_of, run
from tests.etl.tables import put, rejects_of
from tests.product import InputError, StateError, TableStore, folder_of_tails
from tests.raises import assert_names, raises

pytestmark = pytest.mark.spark
FIRST = plain.FIRST
CHAINED = """
[input]
format = "csv"
columns = ["click:int", "user:text", "item:text", "at:int"]
[table]
split = {all = 1.0}
[[lag]]
name = "prev"
of = "item"
by = "user"
order = "at"
[[lag]]
name = "following"
of = "item"
by = "prev"
order = "at"
[[history]]
name = "items"
of = "item"
by = "user"
order = "at"
length = 2
[[column]]
name = "click"
role = "label"
[[column]]
name = "following"
role = "key"
[[column]]
name = "items"
role = "id_list"
ops = [{op = "hash", size = 9}]
"""


def drawn_days(seed: int) -> tuple[list[dict], list[dict]]:
    """The rows of the table, and those of an append, of which some are late."""
    rows = sorted(plain.drawn(80, seed), key=lambda row: row["at"])
    draw = np.random.default_rng(seed)
    for number, row in enumerate(rows):
        row["row"] = number
    is_early = draw.random(len(rows)) < np.linspace(1.4, -0.4, len(rows))
    early = [row for row, chosen in zip(rows, is_early, strict=True) if chosen]
    return early, [row for row, chosen in zip(rows, is_early, strict=True) if not chosen]


def late_of(table: list[dict], appended: list[dict]) -> list[dict]:
    """The rows that are older than a row of the table with the same user."""
    return [
        row
        for row in appended
        if row["user"]
        and any(old["user"] == row["user"] and old["at"] > row["at"] for old in table)
    ]


def test_rejected_late_rows_are_in_no_history_and_the_others_are_whole(
    spark, tmp_path, monkeypatch
):
    monkeypatch.setattr(plain, "HISTORIES", plain.HISTORIES[:1])
    monkeypatch.setattr(plain, "LAGS", plain.LAGS[1:])
    early, appended = drawn_days(1)
    late = late_of(early, appended)
    on_time = [row for row in appended if row not in late]
    assert 5 < len(late) < len(appended) - 5
    first, later = (
        plain.write(tmp_path / f"{name}.parquet", rows, FIRST)
        for name, rows in (("first", early), ("later", appended))
    )
    text = plain.spec(FIRST)
    assert run(spark, tmp_path / "t", first, text=text).late == 0
    said, given = Said(), {"mode": "append", "late": "reject", "max_rejects": 0.9}
    given["accept_nulls"] = ("user", "item")
    result = run(spark, tmp_path / "t", later, text=text, said=said, **given)
    assert (result.late, result.rows_out) == (len(late), len(on_time))
    assert sum(result.rejected.values()) == len(late)
    [line] = [line for line in said.text.splitlines() if "warning" in line and "late" in line]
    assert_names(line, len(late), "user", "--mode", "overwrite")
    table = FeatureTable.open(tmp_path / "t")
    rejects = rejects_of(table)
    numbers = sorted(json.loads(reject["raw"])["row"] for reject in rejects)
    assert numbers == [row["row"] for row in late]
    assert all("older than values of the same key" in reject["reason"] for reject in rejects)
    # No rejected row is in a history, now or later.
    kept = early + on_time
    held = plain.must_hold(early, FIRST, early) + plain.must_hold(kept, FIRST, on_time)
    assert plain.holds(table) == sorted(held)
    asked = [{"user": f"u{number}", "item": 1, "at": 99} for number in range(8)]
    assert plain.served(table, asked) == plain.twin(kept, FIRST, asked)


def test_late_rows_are_counted_by_each_key_and_an_append_changes_no_history(spark, tmp_path):
    """Also by a key that another lag makes. Rows without a key, and those of the newest moment, are not late."""
    text, out = CHAINED, tmp_path / "t"
    first = put(tmp_path / "first", "0,a,x,1\n0,a,y,10\n0,b,x,5\n0,b,z,30\n")
    # Of the lag `following`, key x has its newest row at 30. The first and the last row are late by that alone.
    later = put(tmp_path / "later", "0,a,q,10\n0,,q,0\n0,c,x,20\n0,c,q,25\n")
    run(spark, out, first, text=text)
    for late, facts in (("reject", ["--late", "'following'"]), ("neither", ["'neither'"])):
        with raises(InputError, *facts):
            job_of(out, later, text=text, mode="append", late=late)
    said = Said()
    result = run(spark, out, later, text=text, said=said, mode="append", accept_nulls=("user",))
    assert (result.late, result.rows_out) == (2, 4)
    [line] = [line for line in said.text.splitlines() if "late" in line]
    assert_names(line, 2, "user", "prev", "following", "--late", "--mode", "overwrite")

    # A history that becomes `positive`, or longer, would lack what the table has dropped.
    for old, new, key in (
        ("length = 2", "length = 2\npositive = true", "positive"),
        ("length = 2", "length = 9", "length"),
        ('by = "prev"\norder = "at"', 'by = "prev"\norder = "at"\nrows = 2', "lag"),
        ("size = 9", "size = 7", "ops"),
    ):
        assert text.count(old) == 1
        with raises(InputError, key, "--mode", "overwrite"):
            job_of(out, later, text=text.replace(old, new), mode="append")
    # Without what the table knows of earlier rows, histories would begin anew.
    record = FeatureTable.open(out).record
    TableStore(out).remove(folder_of_tails(record.job, "following"))
    with raises(StateError, "'following'", "--mode", "overwrite"):
        run(spark, out, later, text=text, mode="append")
