"""An audit finds leaks that are planted, each by column and operator, and none where there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sluice.common.errors import InputError
from sluice.common.program import run as run_program
from sluice.etl import ops
from sluice.etl.__main__ import main
from sluice.etl.apply import counts
from sluice.etl.audit import LABEL, Leak, audit_spec, audit_table
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.local.engine import LocalEngine
from sluice.etl.ops.statistics import Target
from sluice.etl.spark import joins
from sluice.etl.spark.engine import SparkEngine
from sluice.etl.spec.permission import Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table import FeatureTable
from tests.etl.jobs import Said, build_table, run
from tests.etl.tables import column, section, write_rows, write_spec
from tests.fuzz import leaks
from tests.fuzz.seeds import seed_of_code
from tests.raises import assert_names, raises

ROWS = 400
HEAD = write_spec(
    "click:int user:text item:text at:float price:float",
    table='key = ["user", "item", "at"]\n%s',
)
BY_HASH = "split = {train = 0.7, test = 0.3}"
BY_TIME = 'split_time = "at"\nsplit = {train = 0, test = 70}'
MOMENT = "labels of the same moment, or later ones"


def rows(seed: int = 0, count: int = ROWS) -> pa.Table:
    draw = np.random.default_rng(seed)
    return pa.table(
        {
            "click": draw.integers(0, 2, count),
            "user": [f"u{n}" for n in draw.integers(0, 20, count)],
            "item": [f"i{n}" for n in draw.integers(0, 9, count)],
            "at": draw.integers(0, 100, count).astype(float),
            "price": draw.random(count),
        }
    )


@pytest.fixture
def file(tmp_path):
    write_rows(tmp_path / "rows.parquet", rows())
    return str(tmp_path / "rows.parquet")


def engine(spark=None):
    return partial(
        LocalEngine if spark is None else partial(SparkEngine, spark), progress=JobProgress(Said())
    )


def audited(text: str, file: str, spark=None, flips: int = 20):
    spec = Spec.parse(text)
    allowed = replace(spec, permission=Permission(functions=spec.functions))
    return audit_spec(allowed, [file], engine(spark), flips=flips)


def found(audit) -> set[tuple[str, str, str]]:
    return {(leak.column, leak.operator, leak.holds) for leak in audit.leaks}


CLEAN = (
    column("user", "dense", "target")
    + column("price", "dense", "fill_mean; standardise")
    + column("item", "sparse", "categorify")
    + column("mean", "dense", "group; fill", ["user", "price"])
)


@pytest.mark.parametrize("table", [BY_HASH, BY_TIME])
def test_a_table_without_leaks_is_said_to_have_none(table, file):
    past = table == BY_TIME
    text = HEAD % table + CLEAN
    if past:
        text = re.sub('"(target|group)"', r'"\1", past = true', text)
    audit = audited(text, file)
    assert audit.leaks == []
    assert (audit.rows, audit.table_rows) == (ROWS, ROWS)
    assert audit.tried["its own label"] == 20
    assert audit.tried.get(MOMENT, 0) == 3 * past


class Whole(Target):
    """Encodes each row from all rows, itself among them."""

    name = "whole"

    def apply(self, column, state):
        value, label, keys = column.flatten()
        fields = [value, label, pa.nulls(len(keys), keys.type)]
        return super().apply(pa.StructArray.from_arrays(fields, ["value", *self.needs]), state)


class Eager(Target):
    """Takes what was known just after a row's moment, not before it."""

    name = "eager"

    def apply(self, column, state):
        value, label, times = column.flatten()
        later = pa.array(
            np.nextafter(times.to_numpy(zero_copy_only=False), np.inf),
            mask=times.is_null().to_numpy(zero_copy_only=False),
        )
        return super().apply(
            pa.StructArray.from_arrays([value, label, later], ["value", *self.needs]), state
        )


class Prophet(Target):
    """Takes what is known ten moments later."""

    name = "prophet"

    def apply(self, column, state):
        value, label, times = column.flatten()
        return super().apply(
            pa.StructArray.from_arrays([value, label, pc.add(times, 10.0)], ["value", *self.needs]),
            state,
        )


def test_a_rows_own_label_is_found_in_a_target_encoding_without_folds(file, monkeypatch):
    monkeypatch.setitem(ops.OPERATORS, "whole", Whole)
    audit = audited(
        HEAD % BY_HASH + column("user", "dense", "whole") + column("price", "dense", "fill"), file
    )
    assert found(audit) == {("user", "whole", "its own label")}
    leak = audit.leaks[0]
    there = rows().slice(leak.line - 1, 1).to_pylist()[0]
    assert leak.file.endswith("rows.parquet")
    assert (float(leak.before) > float(leak.after)) == there["click"]
    assert "--refit" in leak.text


@pytest.mark.parametrize(
    ("name", "kind", "holds"),
    [
        ("eager", Eager, {"its own label", MOMENT}),
        ("prophet", Prophet, {"its own label", MOMENT, "rows of later moments"}),
    ],
)
def test_an_encoding_that_sees_its_own_moment_or_later_ones_is_found(
    name, kind, holds, file, monkeypatch
):
    monkeypatch.setitem(ops.OPERATORS, name, kind)
    audit = audited(HEAD % BY_TIME + column("user", "dense", f"{name}, past = true"), file)
    assert found(audit) == {("user", name, one) for one in holds}


def test_a_state_that_is_learned_from_test_rows_is_found(file, monkeypatch):
    def everything(spec, columns, keys):
        return columns, counts.row_keys(columns, spec) if keys is None else keys

    monkeypatch.setattr(counts, "_training", everything)
    audit = audited(
        HEAD % BY_HASH
        + column("price", "dense", "standardise; fill")
        + column("user", "sparse", "categorify"),
        file,
    )
    assert ("price", "standardise", "rows of split 'test'") in found(audit)
    assert ("user", "categorify", "rows of split 'test'") in found(audit)


def test_a_column_made_of_the_label_is_found_also_through_a_users_function(file):
    text = (
        HEAD % BY_HASH
        + column("copy", "dense", "fill", ["click"])
        + column("mixed", "dense", MIXED, ["price", "click"])
    )
    assert found(audited(text, file)) == {
        (name, by, holds)
        for name, by in (("copy", LABEL), ("mixed", "tests.etl.test_audit:mixed"))
        for holds in ("its own label", "its own label, with all flipped at once")
    }


MIXED = (
    'python, function = "tests.etl.test_audit:mixed", inputs = ["number", "number"], '
    'output = "number"; fill'
)


def mixed(price: pa.Array, click: pa.Array) -> pa.Array:
    return pc.add(price, click)


@pytest.mark.parametrize(
    ("operator", "advice"),
    [
        ("mine.features:mixed", "this function sees the label"),
        ("[[join]] s3://bucket/users", "order rows by another column"),
        ("[[join]] /data/users", "order rows by another column"),
    ],
)
def test_the_advice_tells_a_rule_from_a_function_although_both_may_have_a_colon(operator, advice):
    assert advice in Leak(column="age", operator=operator, holds="its own label").advice


def test_only_allowed_code_runs_in_an_audit_of_a_table(file, tmp_path):
    text = HEAD % BY_HASH + column("twice", "dense", MIXED, ["price", "at"])
    run(None, tmp_path / "table", file, text=text)
    with raises(
        ops.OperatorError, "'tests.etl.test_audit:mixed'", "--allow-code tests.etl.test_audit"
    ):
        audit_table(FeatureTable.open(tmp_path / "table"), [file], engine())
    table = FeatureTable.open(tmp_path / "table", allow_code=("tests.etl.test_audit",))
    assert audit_table(table, [file], engine()).leaks == []


# ---- tables with a history of versions


def test_sums_that_are_kept_while_folds_are_drawn_anew_are_found_in_the_table(
    tmp_path, monkeypatch
):
    """A fault that is planted: a job keeps the sums of folds, and a key that is named later moves the folds."""
    monkeypatch.setattr(Spec, "learned_from_labels", {}, raising=False)
    text = HEAD % BY_TIME + column("user", "dense", "target")
    first = text.replace('key = ["user", "item", "at"]', "")
    then = text.replace('"price:float"', '"price:float", "more:int"') + column(
        "more", "dense", "fill"
    )
    write_rows(tmp_path / "first.parquet", rows())
    write_rows(
        tmp_path / "then.parquet", rows().append_column("more", pa.array(np.arange(ROWS) % 7))
    )
    out, files = tmp_path / "table", [str(tmp_path / "then.parquet")]
    run(None, out, tmp_path / "first.parquet", text=first)
    run(None, out, *files, text=then, mode="overwrite", update_state=True)
    assert ("user", "target", "its own label") in found(
        audit_table(FeatureTable.open(out), files, engine())
    )
    run(None, out, *files, text=then, mode="overwrite", refit=True)
    assert audit_table(FeatureTable.open(out), files, engine()).leaks == []


def test_a_state_that_equals_an_older_versions_by_chance_is_learned_from_its_own_rows(tmp_path):
    """A new key draws other splits, so that old training rows are test rows now. Everything is learned anew, and the
    bounds of so few prices come out as they were."""
    audits = []
    for seed in range(12):
        drawn = rows(seed, 12)
        prices = pc.floor(pc.multiply(drawn["price"], 3.0))
        path = tmp_path / f"rows-{seed}.parquet"
        write_rows(path, drawn.set_column(4, "price", prices))
        text = (HEAD % BY_HASH) + column("price", "dense", "fill; min_max")
        without_key = text.replace('key = ["user", "item", "at"]\n', "")
        run(None, tmp_path / f"t{seed}", path, text=without_key)
        table = build_table(None, tmp_path / f"t{seed}", path, text=text, mode="overwrite")
        assert table.version == 1
        audits.append(audit_table(table, [str(path)], engine()))
    assert [audit.leaks for audit in audits] == [[]] * len(audits)


def test_each_row_is_held_against_what_its_own_version_learned(tmp_path):
    """Appended rows were not learned from, and a renamed column is known by its older name in an older version."""
    text = HEAD % BY_HASH + CLEAN
    write_rows(tmp_path / "one.parquet", rows(1))
    write_rows(tmp_path / "two.parquet", rows(2))
    out, both = (
        tmp_path / "table",
        [str(tmp_path / name) for name in ("one.parquet", "two.parquet")],
    )
    run(None, out, both[0], text=text)
    run(None, out, both[1], text=text, mode="append", update_state=True)
    audit = audit_table(FeatureTable.open(out), both, engine(), flips=5)
    assert (audit.rows, audit.table_rows, audit.leaks) == (2 * ROWS, 2 * ROWS, [])
    part = audit_table(FeatureTable.open(out, 0), both, engine(), flips=5)
    assert (part.rows, part.table_rows, part.leaks) == (ROWS, ROWS, [])


def test_rows_that_were_learned_from_and_then_rejected_are_learned_from_again(tmp_path):
    huge = rows().to_pylist()
    huge[3]["price"] = 1e18
    write_rows(tmp_path / "rows.parquet", pa.Table.from_pylist(huge, rows().schema))
    text = (
        HEAD % BY_HASH
        + column("user", "dense", "target")
        + column("sum", "dense", 'group, of = "sum"; scale, by = 1e-30; fill', ["user", "price"])
    )
    audit = audited(text, str(tmp_path / "rows.parquet"))
    assert audit.leaks == []
    assert 0 < audit.rows < ROWS - 1


def test_of_a_table_that_the_input_does_not_make_nothing_is_said(file, tmp_path):
    write_rows(tmp_path / "some.parquet", rows().slice(0, 300))
    run(None, tmp_path / "table", file, text=HEAD % BY_HASH + column("user", "dense", "target"))
    with raises(InputError, tmp_path / "table", "target", "'user'", "some.parquet", "--refit"):
        audit_table(
            FeatureTable.open(tmp_path / "table"), [str(tmp_path / "some.parquet")], engine()
        )
    run(None, tmp_path / "plain", file, text=HEAD % BY_HASH + column("price", "dense", "fill"))
    with raises(InputError, tmp_path / "plain", "300 of 400", "some.parquet"):
        audit_table(
            FeatureTable.open(tmp_path / "plain"), [str(tmp_path / "some.parquet")], engine()
        )


# ---- the command


def test_the_command_ends_with_2_where_it_finds_a_leak_and_names_it(
    file, tmp_path, monkeypatch, capsys
):
    def run_audit(name: str, ops: str) -> int:
        (tmp_path / name).write_text(HEAD % BY_HASH + column("user", "dense", ops))
        with pytest.raises(SystemExit) as end:
            run_program(main, argv=["audit", str(tmp_path / name), "--input", file, "--flips", "3"])
        return end.value.code

    monkeypatch.setitem(ops.OPERATORS, "whole", Whole)
    assert run_audit("clean.toml", "target") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["leaks"] == []
    assert "no leaks" in said.err
    assert run_audit("leaky.toml", "whole") == 2
    said = capsys.readouterr()
    assert [(leak["column"], leak["operator"]) for leak in json.loads(said.out)["leaks"]] == [
        ("user", "whole")
    ]
    assert_names(said.err, "leak:", "'user'", "whole", "its own label")


# ---- rows that meet other rows


@pytest.mark.spark
def test_joins_and_lags_that_see_a_label_or_what_comes_later_are_found(
    spark, tmp_path, monkeypatch
):
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    def lag(rows, history, _spec, _earlier):
        more = {"tied": ["click"], "seen": ["item"], "ahead": []}[history.name]
        window = Window.partitionBy(history.by).orderBy(history.order, *more)
        step = sql.lead if history.name == "ahead" else sql.lag
        return rows.withColumn(history.name, step(sql.col(history.of), 1).over(window))

    def join(rows, one, spec):
        return timely(rows, replace(one, time=None, their_time=None), spec)

    timely, draw = joins._add_side_columns, np.random.default_rng(5)
    monkeypatch.setattr(joins, "_add_history", lag)
    monkeypatch.setattr(joins, "_add_side_columns", join)
    side = tmp_path / "side.parquet"
    write_rows(
        side,
        user=[f"u{n}" for n in draw.integers(0, 20, 200)],
        age=draw.integers(0, 90, 200),
        since=draw.integers(0, 100, 200).astype(float),
    )
    write_rows(tmp_path / "rows.parquet", rows())
    lags = "".join(
        section("lag", name=name, of=of, by="user", order="at")
        for name, of in (("tied", "price"), ("seen", "click"), ("ahead", "price"))
    )
    text = (
        HEAD % BY_TIME
        + lags
        + section(
            "join", path=str(side), on=["user"], columns=["age:int"], time="at", their_time="since"
        )
        + "".join(
            column(name, "dense", "fill") for name in ("tied", "seen", "ahead", "age", "price")
        )
    )
    seen = found(audited(text, str(tmp_path / "rows.parquet"), spark, flips=5))
    later = "rows of later moments"
    assert {
        ("tied", "[[lag]] tied", MOMENT),
        ("seen", "[[lag]] seen", MOMENT),
        ("ahead", "[[lag]] ahead", later),
        ("age", f"[[join]] {side}", later),
    } <= seen
    assert {name for name, _, holds in seen if holds == later} == {"ahead", "age"}
    assert "price" not in {name for name, _, _ in seen}


@pytest.mark.spark
def test_a_drawn_table_whose_rows_meet_others_has_no_leak(spark, tmp_path):
    seed = leaks.SPARK_EVERY * seed_of_code()
    assert leaks.try_seed(seed, tmp_path) == [], f"replay it with: make fuzz SEED={seed} ONLY=leaks"
