"""The logs of docs/features.md, made into tables by the specs beside them; both engines run this."""

import re

import pytest

from sluice import FeatureTable
from tests.etl.jobs import Said, rows_of, run, words_of
from tests.product import SpecError
from tests.raises import assert_names, raises

pytestmark = pytest.mark.spark


@pytest.fixture
def page(repo, tmp_path):
    """The page's specs on a log, on its rows among others, and on the order of rows; the log lies in the folder."""
    text = (repo / "docs" / "features.md").read_text()
    part = text[text.index("## A log as it comes") : text.index("## Values that turn to null")]
    (raw,) = re.findall(r"```csv\n(.*?)```", part, re.DOTALL)
    (tmp_path / "log.csv").write_bytes(raw.encode("cp1252"))
    (tmp_path / "users.csv").write_bytes("ann|Köln|31\nben|Bern|\n".encode("latin-1"))
    own, others, by_order = re.findall(r"```toml\n(.*?)```", part, re.DOTALL)
    return own, own + others.replace("users.csv", str(tmp_path / "users.csv")), by_order


def splits_of(path):
    table = FeatureTable.open(path)
    return {split: rows_of(table, split) for split in table.splits}


def test_a_log_is_read_as_it_comes(spark, page, tmp_path):
    said = Said()
    result = run(
        spark, tmp_path / "t", tmp_path / "log.csv", text=page[0], said=said, max_rejects=0.2
    )
    assert result.rejected == {"at: not a time as its format says": 1}
    assert_names(said.text, "input columns user, note")
    table = FeatureTable.open(tmp_path / "t")
    assert sorted(words_of(table, "words/4")) == [
        "again",
        "café",
        "der",
        "müller",
        "noir",
    ]
    assert {
        split: sorted((row["label"], row["hour"]) for row in rows)
        for split, rows in splits_of(tmp_path / "t").items()
    } == {
        "train": [(0, 18.0), (1, 18.0), (1, 18.0)],
        "test": [(0, 9.0)],
        "ask": [(0, 9.0)],
    }
    # Rows that wait for their labels may come alone, however many they are.
    head = (tmp_path / "log.csv").read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "more.csv").write_bytes(head + b"7;cem;;2024-01-05 10:00;new;z\n")
    run(spark, tmp_path / "t", tmp_path / "more.csv", text=page[0], mode="append")
    assert sorted((row["label"], row["hour"]) for row in splits_of(tmp_path / "t")["ask"]) == [
        (0, 9.0),
        (0, 10.0),
    ]


def test_what_needs_other_rows_is_added_by_spark(spark, page, tmp_path):
    run(spark, tmp_path / "t", tmp_path / "log.csv", text=page[1], max_rejects=0.2)
    names = ("town", "age", "since", "mean_rating")
    assert {
        split: sorted(tuple(row[name] for name in names) for row in rows)
        for split, rows in splits_of(tmp_path / "t").items()
    } == {
        "train": [
            ("Bern", 0.0, -1.0, 0.0),
            ("Köln", 31.0, -1.0, 0.0),
            ("Köln", 31.0, 1200.0, 5.0),
        ],
        "test": [("Köln", 31.0, 51000.0, 4.5)],
        "ask": [("Bern", 0.0, 53700.0, 2.0)],
    }
    with raises(SpecError, "users.csv'", "3 columns", "join.fields", 2):
        run(
            spark,
            tmp_path / "t",
            tmp_path / "log.csv",
            mode="overwrite",
            text=page[1]
            .replace('"town", "age"]', '"age"]')
            .replace('"town:text", ', "")
            .replace('[[column]]\nname = "town"\nrole = "key"\n', ""),
        )
