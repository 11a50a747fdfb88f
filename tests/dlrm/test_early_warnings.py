"""What a job and a run say before training of what is likely not meant: empty splits, too few steps; and the settings
that follow the rows."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from sluice import FeatureTable
from sluice.dlrm.session.check import early_warnings
from sluice.dlrm.session.defaults import LEAST_STEPS, MOST_ROWS, defaults, describe_defaults
from sluice.etl.spec.table_section import empty_splits
from tests.etl.drawn_rows import draw_rows
from tests.etl.jobs import Said, run
from tests.product import Config, RowsPlan, TableSpec
from tests.raises import assert_names

AVAZU = Path(__file__).resolve().parents[2] / "features/avazu.toml"


def test_job_and_run_warn_of_an_hour_of_avazu_that_all_goes_into_train(tmp_path):
    draw_rows(tmp_path / "days.csv", AVAZU.read_text(), rows=1500)
    with open(tmp_path / "days.csv") as days, open(tmp_path / "hour.csv", "w") as hour:
        hour.writelines(islice(days, 41))  # a header, and rows in the order of time
    said = Said()
    run(None, tmp_path / "table", tmp_path / "hour.csv", text=AVAZU.read_text(), said=said)
    texts = [
        f"split {name!r} is empty (40 of 40 rows lie in 'train'): no row's 'hour' is from {bounds}; set "
        "table.split to values that lie within the data, or hand in the rows of that time, too"
        for name, bounds in (("validation", "14102900 to below 14103000"), ("test", "14103000 on"))
    ]
    assert all(f"warning: {text}\n" in said.text for text in texts), said.text
    table = FeatureTable.open(tmp_path / "table")
    plan = RowsPlan(groups=((40,),), batch_size=8, last="pad")
    config = Config(data=table.uri, version=0, batch_size=8)
    warnings = early_warnings(config, table, plan)
    assert warnings[:2] == texts
    assert_names(warnings[2], "'validation'", "'test'")
    assert len(warnings) == 3
    by_spec = replace(config, spec="features/events.toml")
    (refused,) = set(early_warnings(by_spec, table, plan)) - set(warnings)
    assert_names(refused, "`sluice serve`", "--spec", "sluice etl --spec")


BY_TIME = """
[input]
format = "csv"
columns = ["y:int", "at:int", "item:text"]
[table]
split_time = "at"
split = {train = 0, test = %s}
[[column]]
name = "y"
role = "label"
[[column]]
name = "item"
role = "sparse"
ops = [{op = "hash", size = 100}]
"""


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_job_warns_if_no_new_row_is_a_training_row(tmp_path, mode):
    """A spec with fixed bounds puts each later day into the last split. A run that follows the table would train on the
    same rows for ever."""
    for day in range(3):
        rows = [f"{n % 2},{day * 100 + n},i{n % 7}\n" for n in range(60)]
        (tmp_path / f"{day}.csv").write_text("".join(rows))
    first, new = [tmp_path / "0.csv", tmp_path / "1.csv"], [tmp_path / "2.csv"]
    said = Said()
    run(None, tmp_path / "table", *first, text=BY_TIME % 130, said=said)
    assert "training row" not in said.text
    inputs = new if mode == "append" else [*first, *new]
    run(None, tmp_path / "table", *inputs, text=BY_TIME % 130, mode=mode, said=said)
    assert_names(
        said.text, "warning: this version has 60 rows more, and no new training row", "'at'", 130
    )
    later = Said()
    run(None, tmp_path / "table", *inputs, text=BY_TIME % 230, mode=mode, said=later)
    assert "training row" not in later.text


@pytest.mark.parametrize("value", ["never", "yes"])
def test_a_job_warns_if_all_training_rows_have_the_same_label(tmp_path, value):
    """A label that is compared with a value that never occurs is 0 in all rows."""
    rows = [f"{'no' if n % 3 else 'yes'},{n},i{n % 7}\n" for n in range(60)]
    (tmp_path / "rows.csv").write_text("".join(rows))
    text = (BY_TIME % 50).replace('"y:int"', '"y:text"')
    text = text.replace(
        'role = "label"', f'role = "label"\nops = [{{op = "one_hot", values = ["{value}"]}}]'
    )
    said = Said()
    run(None, tmp_path / "table", tmp_path / "rows.csv", text=text, said=said)
    if value == "yes":
        assert "have the label" not in said.text
        return
    assert_names(said.text, "warning: all 50 rows of split 'train' have the label 0")


SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ({}, ["too few rows", 0.1]),
        ({"split_by": ("user", "day")}, ["too few different", "user, day", 0.1]),
        ({"split_column": "fold"}, ["'fold'"]),
    ],
)
def test_the_likely_cause_of_an_empty_split_is_how_splits_are_cut(how, facts):
    (text,) = empty_splits(TableSpec(split=SHARES, **how), {"train": 6, "test": 2})
    assert_names(text, "'validation'", "6 of 8 rows", "'train'", *facts)
    assert (
        empty_splits(TableSpec(split=SHARES, **how), {"train": 6, "validation": 1, "test": 2}) == []
    )


@pytest.mark.parametrize(
    ("rows", "batch", "rate"),
    [
        (5, 8, 0.001),
        (6400, 32, 0.001),
        (39_999, 192, 0.001),
        (40_000, 192, 0.003),
        (10**9, 8192, 0.003),
    ],
)
def test_a_chosen_batch_makes_200_steps_or_more_and_many_rows_allow_longer_steps(rows, batch, rate):
    chosen = defaults(rows)
    assert (chosen["batch_size"], chosen["dense_lr"]) == (batch, rate)
    assert batch == 8 or (rows >= LEAST_STEPS * batch and batch <= MOST_ROWS)


def test_options_that_were_given_are_not_listed_as_chosen():
    text = describe_defaults(6400, {"batch_size": 256})
    assert_names(text, "6,400 training rows", "--dense-lr 0.001")
    assert "--batch-size" not in text
    assert describe_defaults(6400, dict.fromkeys(defaults(6400))) == ""
    assert "--batch-size 32" in describe_defaults(6400, {})
    assert "--batch-size 24" in describe_defaults(6400, {"streams": 12}), (
        "a batch has as many rows of each stream"
    )
