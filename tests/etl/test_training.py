"""What is fitted is fitted on the training split alone: on noise, no learned column says anything of the test."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.common.errors import InputError
from sluice.etl.apply.features import Features
from sluice.etl.apply.learned_rows import saw_others, why_not
from sluice.etl.jobs.job import Job
from sluice.etl.show import describe_table
from sluice.etl.spark.explain import explain
from sluice.etl.spec.row_split import row_keys
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState, StateError
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable, TableError
from tests.etl.jobs import Said, alike, in_one_process, rows_of, run, words_of
from tests.etl.tables import auc, column, write_rows, write_spec
from tests.raises import assert_names, raises

pytestmark = pytest.mark.spark

BORDER = 1000.0
HEAD = write_spec(
    "click:int user:text spent:float noise:float at:float",
    table='split_time = "at"\nsplit = {train = 0, test = 1000}\nrow_group_rows = 4096',
)
CHAINS = {  # each learned operator by itself, so that nothing but it could say anything
    "user_rate": ("user", "target"),
    "user_rate_before": ("user", "target, past = true"),
    "seen": ("user", "count; fill"),
    "seen_before": ("user", "count, past = true, past_step = 50; fill"),
    "share": ("user", "count, share = true; fill"),
    **{
        f"{of}_spent": (["user", "spent"], f'group, of = "{of}"; fill')
        for of in ("mean", "sum", "std", "count", "min", "max")
    },
    "clicks_of_user": (["user", "click"], "group, past = true; fill"),
    "spent_before": (["user", "spent"], "group, past = true; fill"),
    "mean_filled": ("noise", "fill_mean; standardise; min_max"),
    "median_filled": ("noise", "fill_median"),
}
SPARSE = {
    "user_id": ("user", "categorify"),
    "joint_id": ("user", 'categorify, joint = "u"'),
    "frequent_id": ("user", "categorify, min_count = 60, oov = 1"),
    "noise_id": ("noise", "quantiles, buckets = 20"),
}
TEXT = HEAD + "".join(
    column(name, role, ops, source)
    for role, chains in (("dense", CHAINS), ("sparse", SPARSE))
    for name, (source, ops) in chains.items()
)


def noise_by_time() -> dict[str, pa.Array]:
    """Clicks that nobody can foretell from the time before: each user clicks, spends and comes at one rate until the
    border and at another, of which the first says nothing, from then on."""
    generator = np.random.default_rng(7)
    parts = []
    for number in range(320):
        late, early, many = number & 1, number >> 1 & 1, number >> 2 & 1
        for rate, count, first in ((early, (30, 60)[many], 0.0), (late, (45, 105)[late], BORDER)):
            clicks = np.arange(count) < count * (0.2, 0.8)[rate]  # exactly so many
            parts.append(
                {
                    "click": clicks.astype(np.int64),
                    "user": np.full(count, f"u{number:03d}"),
                    "spent": generator.random(count) * (1 + 3 * rate) + 5 * rate,
                    "noise": generator.normal(size=count) * (1 + first),
                    "late": np.full(count, first > 0),
                    "at": first + generator.integers(0, 400, count).astype(float),
                }
            )
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    mixed = generator.permutation(len(whole["at"]))
    assert whole["late"].sum() >= 20_000
    return {
        "click": pa.array(whole["click"][mixed]),
        "user": pa.array(whole["user"][mixed]),
        "spent": pa.array(whole["spent"][mixed]),
        "at": pa.array(whole["at"][mixed]),
        "noise": pa.array(whole["noise"][mixed], mask=generator.random(len(mixed)) < 0.1),
    }


def learned_by_hand(spec: Spec, columns: dict[str, pa.Array]) -> dict[str, pa.Table]:
    """Every fitted table, from these rows, all of them in one batch."""
    found: dict[str, pa.Table] = {}
    for learned in sorted(spec.fitted, key=lambda one: one.level):
        features = Features(spec, FittedState(tables=found), ahead=False)
        extras, counts = features.extras(columns, row_keys(columns, spec)), Counter[str]()
        for user, number in learned.users:
            values = features.run(user, user.ops[:number], columns, extras)
            if learned.op.needs:
                values = pa.StructArray.from_arrays(
                    [values, *(extras[n] for n in learned.op.needs)], ["value", *learned.op.needs]
                )
            for name, count in zip(
                *(part.to_pylist() for part in learned.op.count(values)), strict=True
            ):
                counts[name] += count
        least = (
            learned.op.least if learned.op.least > 1 else -math.inf
        )  # parts of exact sums may be negative
        kept = [(name, count) for name, count in counts.items() if count >= least]
        found[learned.key] = learned.op.learn(
            pa.table(
                {
                    "value": pa.array([n for n, _ in kept], pa.string()),
                    "count": pa.array([c for _, c in kept], pa.int64()),
                }
            )
        )
    return found


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    """The rows, and the table that a job makes of them."""
    folder, columns = tmp_path_factory.mktemp("noise"), noise_by_time()
    columns = {name: columns[name] for name in Spec.parse(TEXT).input.columns}
    write_rows(folder / "rows.parquet", pa.table(columns))
    run(spark, folder / "t", folder / "rows.parquet", text=TEXT)
    return columns, FeatureTable.open(folder / "t")


def test_no_learned_column_says_anything_of_the_test(made):
    _, table = made
    test = pa.Table.from_pylist(rows_of(table, "test"))
    assert test.num_rows >= 20_000
    clicks = test["click"].to_numpy()
    found = {name: auc(test[name].to_numpy(), clicks) for name in (*CHAINS, *SPARSE)}
    assert {name: value for name, value in found.items() if abs(value - 0.5) > 0.02} == {}
    # In the rows that were learned from, they do say much.
    train = pa.Table.from_pylist(rows_of(table, "train"))
    assert (
        min(
            auc(train[name].to_numpy(), train["click"].to_numpy())
            for name in ("user_rate", "mean_spent")
        )
        > 0.7
    )


def test_each_state_is_what_the_training_rows_give_and_rows_meet_it_as_in_one_process(made):
    columns, table = made
    mask = pa.array(columns["at"].to_numpy() < BORDER)
    state, spec = table.state(), Spec.parse(TEXT)
    want = learned_by_hand(spec, {name: values.filter(mask) for name, values in columns.items()})
    assert set(want) == set(state.tables) == {learned.key for learned in spec.fitted}
    assert {key for key, kept in want.items() if not state[key].equals(kept)} == set()
    alike(rows_of(table), in_one_process(TEXT, table, columns))


def test_a_row_of_the_test_has_the_features_that_a_server_gives_it(made):
    columns, table = made
    late = pa.array(columns["at"].to_numpy() >= BORDER)
    served = Features(Spec.parse(TEXT), table.state()).inputs(
        {n: values.filter(late) for n, values in columns.items()}
    )
    # A server narrows numbers to what a table holds.
    held = {
        name: one.cast(pa.float32()) if pa.types.is_float64(one.type) else one
        for name, one in served.items()
    }
    alike(
        [{name: row[name] for name in held} for row in rows_of(table, "test")],
        pa.table(held).to_pylist(),
    )


def test_the_state_says_what_it_was_learned_from_and_show_and_explain_say_it(made):
    table = made[1]
    assert (table.state().fitted_on, table.fitted_on) == ("train", "train")
    assert_names(describe_table(table), "learned", "split 'train'")
    job = Job(
        spec=Spec.parse(TEXT), inputs=("rows",), store=TableStore(table.uri), mode="overwrite"
    )
    assert any("learned" in line and "split 'train'" in line for line in explain(job)[0])


SMALL = write_spec(
    "click:int user:text at:float",
    column("user", "sparse", "categorify"),
    column("rate", "dense", "target", "user"),
    table="seed = 3\nsplit = {train = 0.6, test = 0.4}",
)


UNLABELLED = SMALL[: SMALL.index('[[column]]\nname = "rate"')]
"""Nothing is learned from labels."""


@pytest.fixture(scope="module")
def elsewhere(spark, tmp_path_factory):
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
        spark,
        folder / "t",
        folder / "rows.parquet",
        text=UNLABELLED.replace("{train =", "{first ="),
    )
    return folder


def test_a_state_of_another_split_is_applied_again_and_said_so_but_not_added_to(
    spark, elsewhere, tmp_path
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
        spark,
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
        spark,
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
    spark, elsewhere, tmp_path
):
    """A row of label 0 with the other values of one of the test would tell a learner of that one's label."""
    text = (
        SMALL + '[negatives]\ncolumn = "user"\neach = 3\n[[column]]\nname = "at"\nrole = "time"\n'
    )
    run(spark, tmp_path / "t", elsewhere / "rows.parquet", text=text)
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


def test_a_training_split_without_rows_is_refused(spark, elsewhere, tmp_path):
    text = SMALL.replace(
        "split = {train = 0.6, test = 0.4}", 'split_time = "at"\nsplit = {past = 0, train = 2}'
    )
    with raises(InputError, "none of 200 rows", "'train'"):
        run(spark, tmp_path / "t", elsewhere / "rows.parquet", text=text)
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
    found = why_not(before, SMALL, spec, mode="overwrite", update=False, rows_moved=moved)
    assert (found is None) == (why is None)
    assert_names(found or "", *(why or ()))
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
    assert saw_others(dataclasses.replace(before, fitted_on="first"), Spec.parse(SMALL))
    assert not saw_others(
        dataclasses.replace(before, fitted_on="first"),
        Spec.parse(SMALL.replace("{train = 0.6, test = 0.4}", "{all = 1.0}")),
    )
