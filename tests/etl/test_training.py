"""What is fitted is fitted on the training split alone, and kept only while that stays so."""

import dataclasses
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import FeatureTable
from sluice.etl.apply.learned_rows import learned_from_another_split, why_not
from tests.etl.jobs import Said, build_table, rows_of, run, words_of
from tests.etl.tables import column, columns_of, write_rows, write_spec
from tests.product import (
    Features,
    FittedState,
    InputError,
    Job,
    Spec,
    StateError,
    TableError,
    TableStore,
    describe_table,
)
from tests.raises import assert_names, raises

SMALL = write_spec(
    "click:int user:text at:float",
    column("user", "sparse", "categorify"),
    column("rate", "dense", "target", "user"),
    table="seed = 3\nsplit = {train = 0.6, test = 0.4}",
)


UNLABELLED = SMALL[: SMALL.index('[[column]]\nname = "rate"')]
"""Nothing is learned from labels."""


def test_a_row_of_the_test_has_the_features_that_a_server_gives_it(elsewhere, tmp_path):
    text = SMALL + column("at", "dense", "fill") + column("seen", "dense", "count; fill", "user")
    table = build_table(None, tmp_path / "t", elsewhere / "rows.parquet", text=text)
    assert (table.state().fitted_on, table.fitted_on) == ("train", "train")
    assert_names(describe_table(table), "learned", "split 'train'")
    columns = columns_of(pq.read_table(elsewhere / "rows.parquet"))
    served = Features(Spec.parse(text), table.state()).inputs(columns)
    every = pa.table(
        {
            name: column.cast(pa.float32()) if pa.types.is_float64(column.type) else column
            for name, column in served.items()  # a server narrows numbers to what a table holds
        }
    ).to_pylist()
    train, test = (
        [{name: row[name] for name in served} for row in rows_of(table, split)]
        for split in ("train", "test")
    )
    assert len(test) > 50
    assert all(row in every for row in test)
    assert not all(row in every for row in train)  # their own labels are left out


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A table whose state was learned from another split than `UNLABELLED` trains on; and rows to append."""
    folder, generator = tmp_path_factory.mktemp("elsewhere"), np.random.default_rng(1)
    for name, count in (("rows", 200), ("more", 50)):
        write_rows(
            folder / f"{name}.parquet",
            click=generator.integers(0, 2, count),
            at=generator.random(count),
            user=[f"u{n}" for n in generator.integers(0, 40, count)],
        )
    run(
        None,
        folder / "t",
        folder / "rows.parquet",
        text=UNLABELLED.replace("{train =", "{first ="),
    )
    return folder


def test_a_state_of_another_split_is_applied_again_and_said_so_but_not_added_to(
    elsewhere, tmp_path
):
    out, store = shutil.copytree(elsewhere / "t", tmp_path / "t"), TableStore(tmp_path / "t")
    assert_names(describe_table(FeatureTable.open(out)), "learned", "split 'first'")

    def job(mode: str, **options: bool) -> Job:
        return Job(
            spec=Spec.parse(UNLABELLED),
            inputs=(str(elsewhere / "more.parquet"),),
            store=store,
            mode=mode,
            split_moved="accept",
            **options,
        )

    for mode in ("append", "overwrite"):
        with pytest.raises(
            StateError,
            match=r"version 0 learned cannot be built on: it was learned from the rows of "
            r"split 'first'.*anew on split 'train': .* --mode overwrite --refit",
        ):
            job(mode, update_state=True)
    for mode, options in (("append", {}), ("overwrite", {"reuse_state": True})):
        with raises(StateError, "--refit", "--mode overwrite"):
            job(mode, refit=True, **options)
    said, before = Said(), FeatureTable.open(out).state()
    run(
        None,
        out,
        elsewhere / "more.parquet",
        text=UNLABELLED,
        mode="append",
        said=said,
        split_moved="accept",
    )
    assert said.text.count("split 'first'") == 1
    after = FeatureTable.open(out)
    assert (after.rows, after.state().hash, after.fitted_on) == (250, before.hash, "first")
    run(
        None,
        out,
        elsewhere / "rows.parquet",
        text=UNLABELLED,
        mode="overwrite",
        update_state=True,
        refit=True,
        split_moved="accept",
    )
    assert FeatureTable.open(out).fitted_on == "train"
    assert job("append", update_state=True).before.fitted_on == "train"  # and now it may


def test_what_is_drawn_for_a_row_lies_in_its_split_and_is_known_to_the_training_split(
    elsewhere, tmp_path
):
    """A row of label 0 with the other values of one of the test would tell a learner of that one's label."""
    text = (
        SMALL + '[negatives]\ncolumn = "user"\neach = 3\n[[column]]\nname = "at"\nrole = "time"\n'
    )
    run(None, tmp_path / "t", elsewhere / "rows.parquet", text=text)
    table, raw = FeatureTable.open(tmp_path / "t"), pq.read_table(elsewhere / "rows.parquet")
    times = {split: {row["at"] for row in rows_of(table, split)} for split in ("train", "test")}
    assert not times["train"] & times["test"]
    assert sum(map(len, times.values())) == raw.num_rows  # each row's own
    known = {
        user
        for user, at in zip(raw["user"].to_pylist(), raw["at"].to_pylist(), strict=True)
        if at in times["train"]
    }
    assert set(words_of(table, "rows/negatives/0")) == known
    assert known < set(raw["user"].to_pylist())


def test_a_training_split_without_rows_is_refused(elsewhere, tmp_path):
    text = SMALL.replace(
        "split = {train = 0.6, test = 0.4}", 'split_time = "at"\nsplit = {past = 0, train = 2}'
    )
    with raises(InputError, "none of 200 rows", "'train'"):
        run(None, tmp_path / "t", elsewhere / "rows.parquet", text=text)
    with pytest.raises(TableError):
        FeatureTable.open(tmp_path / "t")


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("seed = 3", "seed = 4", ("other keys",)),
        (
            "seed = 3",
            'seed = 4\nsplit_column = "user"',
            ("table.split_column", "None", "'user'"),
        ),
        (
            "{train = 0.6, test = 0.4}",
            "{train = 0.5, test = 0.5}",
            ("'train'", "0 to 0.6", "0 to 0.5"),
        ),
        ("{train = 0.6, test = 0.4}", "{test = 0.4, train = 0.6}", ("0.4 to 1",)),
        (
            "{train = 0.6, test = 0.4}",
            '{train = 0, test = 4}\nsplit_time = "at"',
            ("table.split_time", "None", "'at'"),
        ),
        (
            "{train = 0.6, test = 0.4}",
            '{train = 0.6, test = 0.4}\nsplit_by = "user"',
            ("other keys",),
        ),
        (
            "{train = 0.6, test = 0.4}",
            "{train = 0.7, test = 0.3}",
            None,
        ),  # all that were learned from are training rows
        ("{train = 0.6, test = 0.4}", "{train = 0.6, late = 0.2, test = 0.2}", None),
    ],
)
def test_an_overwrite_keeps_a_state_only_while_its_rows_are_training_rows(was, now, why):
    before = FittedState(
        tables={"user/0": pa.table({"value": ["a"], "count": [1]})}, fitted_on="train"
    )
    spec = Spec.parse(SMALL.replace(was, now))
    moved = not spec.rule.is_same(Spec.parse(SMALL).rule)
    reason = why_not(before, SMALL, spec, mode="overwrite", update=False, rows_moved=moved)
    assert (reason is None) == (why is None)
    assert_names(reason or "", *(why or ()))
    assert (
        why_not(before, SMALL, spec, mode="append", update=True, rows_moved=moved) is None
    )  # its rows were not there


def test_a_bound_in_time_may_move_on_but_not_back():
    def spec(border: int) -> str:
        return SMALL.replace(
            "{train = 0.6, test = 0.4}", f'{{train = 0, test = {border}}}\nsplit_time = "at"'
        )

    before = FittedState(
        tables={"user/0": pa.table({"value": ["a"], "count": [1]})}, fitted_on="train"
    )
    assert (
        why_not(
            before, spec(5), Spec.parse(spec(6)), mode="overwrite", update=True, rows_moved=True
        )
        is None
    )
    back = why_not(
        before, spec(5), Spec.parse(spec(4)), mode="overwrite", update=True, rows_moved=False
    )
    assert_names(back, "-inf to 5", "-inf to 4")
    assert learned_from_another_split(
        dataclasses.replace(before, fitted_on="first"), Spec.parse(SMALL)
    )
    assert not learned_from_another_split(
        dataclasses.replace(before, fitted_on="first"),
        Spec.parse(SMALL.replace("{train = 0.6, test = 0.4}", "{all = 1.0}")),
    )
