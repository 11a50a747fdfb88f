"""Rows of one moment: none sees another in lags and histories, and no label decides which of them comes first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.table.table import FeatureTable
from tests.etl.jobs import build_table, rows_of
from tests.etl.slow_hashes import key_of
from tests.etl.tables import column, section, write_rows, write_spec

pytestmark = pytest.mark.spark

KINDS = {"click": "int", "user": "text", "item": "int", "at": "int", "row": "int"}
FIRST, LAST = tuple(KINDS), tuple(reversed(KINDS))
HISTORIES = (("liked", "item", 2, True), ("clicks", "click", 4, False))
LAGS = (("third", "click", 3, False), ("since", "at", 1, True))
DEDUP = '[dedup]\nby = ["user", "at", "item"]\norder = "at"\nkeep = "first"\n'


def spec(order: tuple[str, ...], rules: str = "") -> str:
    """A spec with `rules`, or else with all lags and histories."""
    kept = column("row", "time") + column("at", "time") + column("user", "key")
    text = write_spec([f"{name}:{KINDS[name]}" for name in order], kept, rules, label="click")
    if rules:
        return text + column("item", "dense", "fill")
    for name, of, length, positive in HISTORIES:
        text += section(
            "history", name=name, of=of, by="user", order="at", length=length, positive=positive
        ) + column(name, "id_list", "bucketize, boundaries = [1, 2, 3, 4, 5, 6, 7, 8, 9]")
    for name, of, rows, difference in LAGS:
        text += section(
            "lag", name=name, of=of, by="user", order="at", rows=rows, difference=difference
        ) + column(name, "dense", "fill, value = -1")
    return text


def drawn(rows: int, seed: int, users: int = 8, moments: int = 12) -> list[dict]:
    """Rows of which many share a moment, and some all but the label."""
    draw = np.random.default_rng(seed)
    return [
        {
            "click": int(draw.integers(2)),
            "user": None if draw.random() < 0.1 else f"u{draw.integers(users)}",
            "item": int(draw.integers(1, 10)),
            "at": int(draw.integers(moments)),
            "row": number // 2,
        }
        for number in range(rows)
    ]


def write(path: Path, rows: list[dict], order: tuple[str, ...]) -> Path:
    of_type = {"int": pa.int64(), "text": pa.string()}
    kinds = {name: of_type[kind] for name, kind in KINDS.items()}
    return write_rows(path, [{name: row[name] for name in order} for row in rows], kinds)


def place(row: dict) -> tuple[int, ...]:
    """Where a row lies among those of its user: by its time, then by hashes, first of all but the label."""
    signed = [
        number - (number >> 63 << 64)
        for number in (
            key_of(row, tuple(name for name in row["order"] if name != "click")),
            key_of(row, tuple(sorted(name for name in KINDS if name != "click"))),
            key_of(row, tuple(sorted(KINDS))),
        )
    ]
    return (row["at"], *signed)


def twin(rows: list[dict], order: tuple[str, ...], asked: list[dict] | None = None) -> list[tuple]:
    """What each row must have, from a plain look at all rows."""
    found = []
    users: dict[str, list[dict]] = {}
    for row in rows:
        users.setdefault(row["user"], []).append(row)
    for of_user in users.values():
        of_user.sort(key=lambda row: place({**row, "order": order}))
    for row in rows if asked is None else asked:
        earlier = (
            [other for other in users[row["user"]] if other["at"] < row["at"]]
            if row["user"]
            else []
        )
        made = [row["row"], row["click"]]
        for _, of, length, positive in HISTORIES:
            made.append(
                [int(other[of]) for other in earlier if other["click"] or not positive][-length:]
            )
        for _, of, lag, difference in LAGS:
            value = earlier[-lag][of] if len(earlier) >= lag else None
            made.append(-1 if value is None else row[of] - value if difference else value)
        found.append(tuple(made))
    return sorted(found, key=repr)


def holds(table: FeatureTable) -> list[tuple]:
    def number(bucket: int) -> int:
        return bucket - 2

    found = []
    for row in rows_of(table):
        bags = [
            list(map(number, np.frombuffer(row[name] or b"", "<i4").tolist()))
            for name, *_ in HISTORIES
        ]
        found.append((int(row["row"]), row["click"], *bags, *(int(row[name]) for name, *_ in LAGS)))
    return sorted(found, key=repr)


def test_lags_and_histories_are_of_earlier_moments_in_one_job_and_in_two(spark, tmp_path):
    """The second job's rows begin within the last moment of the first, and one comes late: it sees nothing of what
    came after it."""
    rows = sorted(drawn(240, 3), key=lambda row: row["at"])
    cut = next(number for number, row in enumerate(rows) if row["at"] == 6) + 7
    rows.append({"click": 0, "user": "u2", "item": 4, "at": -5, "row": 900})
    assert {row["at"] for row in rows[:cut]} & {row["at"] for row in rows[cut:]} == {6}
    whole = write(tmp_path / "all.parquet", rows, LAST)
    one = build_table(spark, tmp_path / "one", whole, text=spec(LAST))
    assert holds(one) == twin(rows, LAST)
    for part, mode in ((rows[:cut], "create"), (rows[cut:], "append")):
        path = write(tmp_path / f"{mode}.parquet", part, FIRST)
        two = build_table(spark, tmp_path / "two", path, text=spec(FIRST), mode=mode)
    assert holds(two) == sorted(twin(rows[:cut], FIRST) + twin(rows, FIRST, rows[cut:]), key=repr)


def test_the_row_that_stays_of_several_is_not_chosen_by_its_label(spark, tmp_path):
    """With every label flipped, the same rows stay; of rows that differ in the label alone, about half are clicked."""
    rows = drawn(600, 5)
    for number, row in enumerate(rows):
        row["row"] = number
    twins = [
        {"click": click, "user": "t", "item": 1, "at": number, "row": 1000 + number}
        for number in range(200)
        for click in (0, 1)
    ]
    kept = []
    for labels in (0, 1):
        made = [{**row, "click": row["click"] ^ labels} for row in rows] + twins
        path = write(tmp_path / f"{labels}.parquet", made, FIRST)
        table = build_table(spark, tmp_path / f"t{labels}", path, text=spec(FIRST, DEDUP))
        kept.append(sorted((int(row["row"]), row["click"]) for row in rows_of(table)))
    numbers = [[number for number, _ in rows_of_one] for rows_of_one in kept]
    assert numbers[0] == numbers[1]
    assert len([number for number in numbers[0] if number < 1000]) < 500
    clicked = sum(click for number, click in kept[0] if number >= 1000)
    assert 60 < clicked < 140  # five standard deviations
