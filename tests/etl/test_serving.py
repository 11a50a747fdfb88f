"""What comes from other rows: of earlier moments, in one job and in two, and asked of a server. No label decides which
of the rows of one moment comes first."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sluice import FeatureTable
from sluice.etl.spark.joins import _drop_duplicates
from sluice.etl.spec.row_rules import Dedup
from tests.etl.jobs import build_table, rows_of
from tests.etl.slow_hashes import key_of
from tests.etl.tables import column, section, write_rows, write_spec
from tests.product import Serving

pytestmark = pytest.mark.spark

KINDS = {"click": "int", "user": "text", "item": "int", "at": "int", "row": "int"}
TYPES = {name: {"int": pa.int64(), "text": pa.string()}[kind] for name, kind in KINDS.items()}
FIRST, LAST = tuple(KINDS), tuple(reversed(KINDS))
HISTORIES = (("liked", "item", 2, True), ("clicks", "click", 4, False))
LAGS = (("third", "item", 3, False), ("since", "at", 1, True))
DEDUP = '[dedup]\nby = ["user", "at", "item"]\norder = "at"\nkeep = "first"\n'


def spec(order: tuple[str, ...], rules: str = "") -> str:
    """A spec with `rules`, or else with all lags and histories."""
    kept = column("row", "time")
    text = write_spec([f"{name}:{KINDS[name]}" for name in order], kept, rules, label="click")
    if rules:
        return text + column("item", "dense", "fill")
    for name, source, length, positive in HISTORIES:
        text += section(
            "history", name=name, of=source, by="user", order="at", length=length, positive=positive
        ) + column(name, "id_list", "bucketize, boundaries = [1, 2, 3, 4, 5, 6, 7, 8, 9]")
    for name, source, rows, difference in LAGS:
        text += section(
            "lag", name=name, of=source, by="user", order="at", rows=rows, difference=difference
        ) + column(name, "dense", "fill, value = -1")
    return text


def drawn(rows: int, seed: int) -> list[dict]:
    """Rows of which many share a moment, and some all but the label."""
    draw = np.random.default_rng(seed)
    return [
        {
            "click": int(draw.integers(2)),
            "user": None if draw.random() < 0.1 else f"u{draw.integers(8)}",
            "item": None if draw.random() < 0.1 else int(draw.integers(1, 10)),
            "at": int(draw.integers(12)),
            "row": number // 2,
        }
        for number in range(rows)
    ]


def write(path: Path, rows: list[dict], order: tuple[str, ...]) -> Path:
    return write_rows(path, [{name: row[name] for name in order} for row in rows], TYPES)


def place(row: dict, order: tuple[str, ...]) -> tuple[int, ...]:
    """Where a row lies among those of its user: by its time, then by hashes, first of all but the label."""
    signed = [
        number - (number >> 63 << 64)
        for number in (
            key_of(row, tuple(name for name in order if name != "click")),
            key_of(row, tuple(sorted(name for name in KINDS if name != "click"))),
            key_of(row, tuple(sorted(KINDS))),
        )
    ]
    return (row["at"], *signed)


def twin(rows: list[dict], order: tuple[str, ...], asked: list[dict]) -> list[list]:
    """What each asked row must have, from a plain look at all rows."""
    users = defaultdict(list)
    for row in sorted(rows, key=lambda row: place(row, order)):
        users[row["user"]].append(row)
    answers = []
    for row in asked:
        earlier = [other for other in users[row["user"]] if other["at"] < row["at"] and row["user"]]
        made: list = [
            [
                other[source]
                for other in earlier
                if other[source] is not None and (other["click"] or not positive)
            ][-length:]
            for _, source, length, positive in HISTORIES
        ]
        for _, source, lag, difference in LAGS:
            value = earlier[-lag][source] if len(earlier) >= lag else None
            made.append(row[source] - value if difference and value is not None else value)
        answers.append(made)
    return answers


def must_hold(rows: list[dict], order: tuple[str, ...], asked: list[dict]) -> list[str]:
    """The rows of a table, as `holds` reads them."""
    made = zip(asked, twin(rows, order, asked), strict=True)
    return sorted(
        repr((row["row"], row["click"], *(-1 if value is None else value for value in values)))
        for row, values in made
    )


def holds(table: FeatureTable) -> list[str]:
    rows = []
    for row in rows_of(table):
        bags = [(np.frombuffer(row[name] or b"", "<i4") - 2).tolist() for name, *_ in HISTORIES]
        numbers = [int(row[name]) for name, *_ in LAGS]
        rows.append(repr((int(row["row"]), row["click"], *bags, *numbers)))
    return sorted(rows)


def served(table: FeatureTable, asked: list[dict]) -> list[list]:
    """What a server makes of rows."""
    columns = {
        name: pa.array([row[name] for row in asked], kind)
        for name, kind in TYPES.items()
        if name not in ("click", "row")
    }
    completed = Serving.open(table).complete(columns, {})
    names = [name for name, *_ in HISTORIES + LAGS]
    return [list(row) for row in zip(*(completed[name].to_pylist() for name in names), strict=True)]


def test_lags_and_histories_are_of_earlier_moments_in_one_job_and_in_two(spark, tmp_path):
    """The second job begins within the last moment of the first. A row that comes late sees nothing of what came after
    it. What both leave for whoever comes next is the same."""
    rows = sorted(drawn(240, 3), key=lambda row: row["at"])
    cut = next(number for number, row in enumerate(rows) if row["at"] == 6) + 7
    rows.append({"click": 0, "user": "u2", "item": 4, "at": -5, "row": 900})
    early = build_table(
        spark, tmp_path / "two", write(tmp_path / "early", rows[:cut], FIRST), text=spec(FIRST)
    )
    whole = write(tmp_path / "all.parquet", rows, LAST)
    whole_table = build_table(spark, tmp_path / "one", whole, text=spec(LAST))
    assert holds(whole_table) == must_hold(rows, LAST, rows)
    assert holds(early) == must_hold(rows[:cut], FIRST, rows[:cut])
    later = write(tmp_path / "later", rows[cut:], FIRST)
    two = build_table(spark, tmp_path / "two", later, text=spec(FIRST), mode="append")
    assert holds(two) == sorted(holds(early) + must_hold(rows, FIRST, rows[cut:]))
    users = [*(f"u{number}" for number in range(8)), "nobody", None]
    asked = [{"user": user, "item": 1, "at": 99} for user in users]
    for table, order in ((whole_table, LAST), (two, FIRST)):
        assert served(table, asked) == twin(rows, order, asked)


def test_the_row_that_stays_of_several_is_not_chosen_by_its_label(spark, tmp_path):
    """It lies first by hashes, of which those of the label come last: of rows that differ in the label alone, about
    half are clicked."""
    rows = [row for row in drawn(600, 5) if row["user"] and row["item"]]
    for number, row in enumerate(rows):
        row["row"] = number
    rows += [
        {"click": click, "user": "t", "item": 1, "at": number, "row": 1000 + number}
        for number in range(200)
        for click in (0, 1)
    ]
    path = write(tmp_path / "rows.parquet", rows, FIRST)
    table = build_table(spark, tmp_path / "t", path, text=spec(FIRST, DEDUP))
    stays: dict[tuple, dict] = {}
    for row in sorted(rows, key=lambda row: place(row, FIRST)):
        stays.setdefault((row["user"], row["at"], row["item"]), row)
    kept = sorted((int(row["row"]), row["click"]) for row in rows_of(table))
    assert kept == sorted((row["row"], row["click"]) for row in stays.values())
    assert len([number for number, _ in kept if number < 1000]) < 450
    clicked = sum(click for number, click in kept if number >= 1000)
    assert 60 < clicked < 140  # five standard deviations


def test_a_row_without_a_time_comes_before_all_others_of_its_key(spark):
    """So `keep = "last"` keeps it only if no other row of the key has a time. NaN comes last. Ties decide the rest."""
    rows = spark.sql(
        "select user, at, row, row as _tie_of_key, 0 as _tie_of_row, 0 as _tie_of_label from values "
        "('a', 5D, 1), ('a', null, 9), ('a', 7D, 2), ('b', null, 4), ('b', null, 3), "
        "('c', null, 8), ('c', double('NaN'), 5), ('c', 7D, 6) as t(user, at, row)"
    )
    for keep, want in (("last", [2, 3, 5]), ("first", [9, 3, 8])):
        kept = _drop_duplicates(rows, Dedup(by=("user",), order="at", keep=keep))
        assert [row["row"] for row in kept.orderBy("user").collect()] == want
