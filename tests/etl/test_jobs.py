"""What jobs do with rows, splits and fitted states; each against a slow twin or a count by hand.

What both engines do alike (local/test_engines.py) is tried on the local one."""

import json
import shutil
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.schema import Field as DeltaField
from deltalake.schema import PrimitiveType

from sluice import FeatureTable
from sluice.etl.apply.features import in_training
from sluice.etl.apply.row_placement import WritePlan
from sluice.etl.jobs.engine import fit
from sluice.etl.table.new_files import CommitError
from tests.etl.jobs import Said, alike, build_table, in_one_process, job_of, rows_of, run, words_of
from tests.etl.tables import column, columns_of, put, write_rows, write_spec
from tests.product import (
    DriftError,
    FittedState,
    InputError,
    JobProgress,
    SparkEngine,
    Spec,
    StateError,
    row_keys,
)
from tests.raises import assert_names, raises

COLUMNS = {
    "click": pa.int64(),
    "user": pa.string(),
    "item": pa.string(),
    "at": pa.float64(),
    "price": pa.float64(),
}
HEAD = write_spec("click:int user:text item:text at:float price:float", table="")
ITEM = column("item", "sparse", "categorify, oov = 2")
KEPT = column("user", "key") + column("at", "time")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Rows as Parquet, and as columns."""
    generator = np.random.default_rng(5)
    count = 900
    columns = {
        "click": generator.integers(0, 2, count),
        "user": [f"u{v}" for v in generator.integers(0, 60, count)],
        "item": [f"i{v}" for v in np.minimum(generator.geometric(0.05, count), 90)],
        "at": np.arange(count) * 60.0 + 1e6,
        "price": [None if v < 0.1 else v for v in generator.random(count) * 10],
    }
    path = write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet", None, COLUMNS, **columns)
    return path, columns_of(pq.read_table(path))


@pytest.mark.spark
def test_chains_of_three_levels_target_and_count(spark, raw, tmp_path):
    text = (
        HEAD
        + ITEM
        + KEPT
        + column(
            "price",
            "dense",
            "fill_median, indicator = true; standardise; clip, low = 0, high = 1; log, online = true",
        )
        + column("price_bucket", "sparse", "fill_mean; quantiles, buckets = 8; categorify", "price")
        + column(
            "price_left", "sparse", "fill_mean; quantiles, buckets = 8, online = true", "price"
        )
        + column(
            "user_left",
            "sparse",
            'replace, pattern = "u", to = ""; modulus, size = 5, online = true',
            "user",
        )
        + column("clicks_of_item", "dense", "target, folds = 3, smoothing = 5", "item")
        + column("clicks_of_pair", "dense", "concat; target", ["user", "item"])
        + column("seen", "dense", "count; fill; log", "item")
    )
    spec = Spec.parse(text)
    jobs = _spark_jobs(spark)
    table = build_table(spark, tmp_path / "t", raw[0], text=text)
    alike(rows_of(table), in_one_process(text, table, raw[1]))
    assert spec.levels == 3
    # Three fits, one write, one look at the files; Spark may split what it adapts to, but not by the column.
    assert 5 <= _spark_jobs(spark) - jobs <= 3 * 5 + 5
    price = next(f for f in table.fields if f.name == "price")
    assert [o["op"] for o in price.online] == ["log"]
    assert (
        max(row["price"] for row in rows_of(table)) == 1.0
    )  # Spark did not apply what is left to the loader
    assert {f.name: f.type for f in table.fields if f.name.endswith("_left")} == {
        "price_left": "double",
        "user_left": "int64",
    }
    assert {row["user_left"] for row in rows_of(table)} == set(range(60))
    training = in_training(raw[1], row_keys(raw[1], spec), spec)
    assert 0.75 < training.mean() < 0.85
    counts = Counter(raw[1]["item"].filter(pa.array(training)).to_pylist())
    state = table.state()
    assert {row["value"]: row["count"] for row in state["seen/0"].to_pylist()} == counts


@pytest.mark.spark
def test_what_was_read_and_parsed_is_kept_for_the_passes_after_the_first(spark, raw, tmp_path):
    """The input is gone by then."""
    shutil.copy(raw[0], tmp_path / "rows.parquet")
    text = HEAD + ITEM + COUNTED + column("known", "dense", "count; fill; standardise", "item")
    job = job_of(tmp_path / "t", tmp_path / "rows.parquet", text=text)
    engine = SparkEngine(lambda: spark, job, JobProgress(Said()))
    engine.check()
    sums = engine.sums(0, FittedState(), {})
    (tmp_path / "rows.parquet").unlink()
    state, counted = fit(engine)
    assert (counted.rows, counted.parsed) == (sums.counted.rows, sums.counted.parsed) == (900, 900)
    assert job.spec.levels == 2
    engine.write(state, WritePlan.of(job.spec, counted, None))
    written = (tmp_path / "t").rglob("*.parquet")
    assert sum(pq.read_metadata(path).num_rows for path in written) == 900
    held = spark.sparkContext._jsc.getPersistentRDDs
    before = len(held())
    engine.close()
    assert len(held()) < before


@pytest.mark.spark
def test_fitting_takes_as_many_jobs_for_12_columns_as_for_one(spark, raw, tmp_path, monkeypatch):
    """And the driver collects no more than it says, with nothing taken from it in another way."""
    from pyspark.sql.classic.dataframe import DataFrame

    taken: list[int] = []
    real = DataFrame.toArrow
    monkeypatch.setattr(DataFrame, "toArrow", lambda frame: _noted_rows(taken, real(frame)))
    monkeypatch.setattr(DataFrame, "collect", lambda _: pytest.fail("rows are collected"))
    monkeypatch.setattr(DataFrame, "toPandas", lambda _: pytest.fail("rows are collected"))
    jobs = []
    for columns in (1, 12):
        text = HEAD + "".join(
            column(f"item{n}", "sparse", "categorify, oov = 2", "item") for n in range(columns)
        )
        text += "".join(
            column(f"p{n}", "dense", "fill_mean; standardise", "price") for n in range(columns)
        )
        before = _spark_jobs(spark)
        state, _ = fitted(spark, tmp_path, raw[0], text)
        jobs.append(_spark_jobs(spark) - before)
        learned = sum(state[f"item{n}/0"].num_rows for n in range(columns))
        assert (
            len(taken) == 2 * 2
        )  # for each level, the number of values of each key, and the values
        assert sum(taken) <= learned + 40 * columns + 10
        taken.clear()
    assert jobs[0] == jobs[1] <= 2 * 6


COUNTED = column("seen", "dense", "count; fill", "item")


def fitted(spark, tmp_path, path, text):
    job = job_of(tmp_path / "fitted", path, text=text)
    engine = SparkEngine(lambda: spark, job, JobProgress(Said()))
    engine.check()
    try:
        return fit(engine)
    finally:
        engine.close()


def _noted_rows(taken: list[int], table: pa.Table) -> pa.Table:
    taken.append(table.num_rows)
    return table


@pytest.mark.spark
def test_no_more_is_collected_than_a_stated_number_of_rows(spark, raw, tmp_path, monkeypatch):
    monkeypatch.setattr("sluice.etl.spark.fit.MAX_VALUES", 50)
    with raises(InputError, "rows.parquet:", "50 values", "min_count"):
        fitted(spark, tmp_path, raw[0], HEAD + COUNTED)


def _spark_jobs(spark) -> int:
    """Return how many jobs the scheduler has numbered so far.

    The status tracker forgets old jobs (`spark.ui.retainedJobs`), so that its count may fall.
    """
    return spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs()


def test_rows_are_filtered_sampled_and_weighted(raw, tmp_path):
    text = (
        HEAD
        + ITEM
        + KEPT
        + """
[[filter]]
column = "price"
op = ">="
value = 2.5
[[filter]]
column = "item"
op = "not in"
value = ["i1", "i2"]
[sample]
negatives = 0.25
weight = "w"
[table]
seed = 3
split_by = "user"
split = {a = 0.5, b = 0.5}
"""
    )
    rows = [
        {**row, "item": row["item"] if number % 9 else None}
        for number, row in enumerate(pa.table(raw[1]).to_pylist())
    ]
    path = write_rows(tmp_path / "rows.parquet", rows, COLUMNS)
    result = run(None, tmp_path / "t", path, text=text)
    table = FeatureTable.open(tmp_path / "t")
    got = rows_of(table)
    left = [r for r in rows if (r["price"] or 0) >= 2.5 and r["item"] not in (None, "i1", "i2")]
    assert result.rows_in == len(rows)
    assert sum(r["click"] for r in got) == sum(r["click"] for r in left)
    negatives = [r for r in got if not r["click"]]
    assert len(negatives) / sum(not r["click"] for r in left) == pytest.approx(0.25, abs=0.08)
    assert {(r["click"], r["w"]) for r in got} == {(1, 1.0), (0, 4.0)}
    users = [{r["user"] for r in rows_of(table, split)} for split in ("a", "b")]
    assert not users[0] & users[1]


def test_splits_by_a_column(raw, tmp_path):
    text = HEAD + KEPT + ITEM + '[table]\nsplit_column = "user"\nsplit = {u1 = 0.5, u2 = 0.5}\n'
    result = run(None, tmp_path / "t", raw[0], text=text)
    table = FeatureTable.open(tmp_path / "t")
    users = raw[1]["user"].to_pylist()
    assert result.splits == {
        name: users.count(name) for name in ("u1", "u2")
    }  # rows with another name are left out
    assert all(r["user"] == split for split in table.splits for r in rows_of(table, split))


def test_drawn_negatives_and_time_order(raw, tmp_path):
    text = (
        HEAD
        + KEPT
        + ITEM
        + """
[negatives]
column = "item"
each = 2
[table]
order = "at"
order_step = 600
file_rows = 400
row_group_rows = 100
split = {all = 1.0}
"""
    )
    result = run(None, tmp_path / "t", raw[0], text=text)
    table = FeatureTable.open(tmp_path / "t")
    positive = sum(raw[1]["click"].to_pylist())
    assert (result.rows_in, result.rows_out) == (900, 900 + 2 * positive)
    ats = [row["at"] for row in rows_of(table)]
    assert ats == sorted(ats)  # over files, and within them
    assert len(table.files) > 3
    by_row = defaultdict(list)
    for row in rows_of(table):
        by_row[row["at"], row["user"]].append(row)
    for rows in by_row.values():
        liked = [r for r in rows if r["click"]]
        assert (len(rows), len(liked)) in ((1, 0), (3, 1))
        assert not liked or all(r["item"] != liked[0]["item"] for r in rows if not r["click"])


def test_a_table_with_partitions_of_release_0_2_is_read_and_not_continued(raw, tmp_path):
    out, text = tmp_path / "t", HEAD + KEPT + COUNTED
    run(None, out, raw[0], text=text)
    (record,) = (out / "_sluice" / "jobs").glob("*.json")
    about = json.loads(record.read_text())
    for file in about["files"]:
        file["partition"] = "plain"
    record.write_text(json.dumps(about))
    DeltaTable(out).alter.add_columns([DeltaField("partition", PrimitiveType("string"))])
    assert FeatureTable.open(out).check() == []
    for mode in ("append", "overwrite"):
        with raises(CommitError, out, "partitions", "--output"):
            run(None, out, raw[0], text=text, mode=mode)


def write(path, *items):
    """Rows of these items, each clicked on every other time."""
    count = len(items)
    return write_rows(
        path,
        click=pa.array([i % 2 for i in range(count)], pa.int64()),
        user=["u"] * count,
        item=pa.array(items, pa.string()),
        at=np.arange(count, dtype=float),
        price=np.ones(count),
    )


def test_a_state_is_kept_added_to_and_never_mixed(tmp_path):
    text = (
        HEAD + "[table]\nsplit = {all = 1.0}\n[drift]\nunseen = {warn = 0.2, refuse = 0.9}\n" + ITEM
    )
    first = write(tmp_path / "1.parquet", *"aaabbc")
    more = write(tmp_path / "2.parquet", *"dddadccb")
    strangers = write(tmp_path / "3.parquet", *"xyzxyzxyzxyz")
    out = tmp_path / "t"
    run(None, out, first, text=text)

    def ids():
        return {word: n for n, word in enumerate(words_of(out, "item/0"), 4)}

    assert ids() == {"a": 4, "b": 5, "c": 6}
    said = Said()
    run(None, out, more, text=text, mode="append", said=said)
    assert ids() == {"a": 4, "b": 5, "c": 6}
    assert_names(said.text, "warning:", "drift:", "unseen", "'item'", 0.5)
    with pytest.raises(
        DriftError, match=r"unseen of column 'item' is 1 .*drift\.unseen\.refuse = 0\.9; nothing"
    ):
        run(None, out, strangers, text=text, mode="append")
    table = build_table(None, out, more, text=text, mode="append", update_state=True)
    assert ids() == {"a": 4, "b": 5, "c": 6, "d": 7}
    assert (table.version, table.rows) == (2, 6 + 8 + 8)
    assert {f.name: f.cardinality for f in table.fields}["item"] == 8
    assert table.check() == []  # ids of older files are within the newer cardinality
    run(
        None,
        out,
        strangers,
        text=text.replace("refuse = 0.9", "refuse = 2"),
        mode="overwrite",
        reuse_state=True,
    )
    assert ids() == {"a": 4, "b": 5, "c": 6, "d": 7}
    assert {r["item"] for r in rows_of(out)} <= {
        2,
        3,
    }  # all are out of the vocabulary
    # The same values under another version's state keep their ids.
    old = Counter(r["item"] for r in rows_of(FeatureTable.open(out, 0)))
    assert old == {4: 3, 5: 2, 6: 1}
    with raises(StateError, "item/0", "'min_count': 1", "'min_count': 2"):
        run(None, out, more, text=text.replace("oov = 2", "oov = 2, min_count = 2"), mode="append")
    with raises(StateError, "in this spec", "--update-state"):
        run(
            None,
            out,
            more,
            text=text.replace('"item"', '"what"\nfrom = "item"'),
            mode="overwrite",
            reuse_state=True,
        )


# Bad input. The rest of the rows are in test_parse (lines) and test_build (files).


@pytest.mark.spark
def test_a_column_that_is_missing_or_does_not_fit_is_named(spark, raw, tmp_path):
    text = HEAD + ITEM
    table = pq.read_table(raw[0])
    write_rows(tmp_path / "less.parquet", table.drop_columns("item"))
    with raises(InputError, "less.parquet:", "'item'", "click, user"):
        run(spark, tmp_path / "t", tmp_path / "less.parquet", text=text)
    clicks = pa.array([2**64 - 1, *[1] * 899], pa.uint64())
    users = pa.array([2**63 + i for i in range(900)], pa.uint64())
    wide = (
        table.set_column(0, "click", clicks)
        .set_column(1, "user", users)
        .append_column("new", clicks)
    )
    write_rows(tmp_path / "unsigned.parquet", wide)
    result = run(spark, tmp_path / "t", tmp_path / "unsigned.parquet", text=text + KEPT)
    assert (result.rows_out, result.rejected) == (899, {"click: not a whole number of 64 bits": 1})
    got = {row["user"] for row in rows_of(tmp_path / "t")}
    assert got == {str(2**63 + i) for i in range(1, 900)}  # read as text they stay whole


CSV = write_spec("click:int item:text", ITEM, form="csv", head="header = true\n")


@pytest.mark.spark
def test_files_with_other_headers_are_named_and_empty_ones_are_not_in_the_way(spark, tmp_path):
    for name, content in {
        "1.csv": b"click,item\r\n1,a\r\n0,\xe6\x97\xa5\r\n1,\xff\r\n1,1e5",
        "2.csv": "",
        "3.csv": "click,item\n" + "0,007\n" * 400,
        "4.csv": "click,item\n0,\n0,\n",  # a column all null here
    }.items():
        put(tmp_path / "in" / name, content)
    result = run(spark, tmp_path / "t", tmp_path / "in", text=CSV)
    assert (result.rows_in, result.rejected) == (406, {"item: not UTF-8 text": 1})
    words = words_of(tmp_path / "t", "item/0")
    assert words == ["007", "1e5", "a", "日"]
    put(tmp_path / "in" / "5.csv", "click,thing\n1,a\n")
    with raises(InputError, "5.csv:", "'thing'", "column 2", "'item'"):
        run(spark, tmp_path / "t", tmp_path / "in", text=CSV, mode="overwrite")


@pytest.mark.spark
def test_what_the_worker_says_reaches_the_user_in_one_line(spark, raw, tmp_path):
    from sluice.etl.jobs.engine import JobFailure
    from sluice.etl.spark.errors import spark_errors_as_job_failure

    text = (
        HEAD
        + ITEM
        + column(
            "price",
            "dense",
            'python, function = "tests.etl.test_jobs:broken", inputs = "number", output = "number"; fill',
        )
    )
    for name, words in (
        ("broken", "broken returned 899 values, not an Arrow array for 900 rows"),
        ("refusing", f"refusing fails at '{dear(raw)}': ValueError: too dear, by far"),
    ):
        said = rf"^\S*/rows\.parquet: column 'price': tests\.etl\.test_jobs:{words}; nothing was published$"
        with pytest.raises(JobFailure, match=said), spark_errors_as_job_failure():
            run(spark, tmp_path / "t", raw[0], text=text.replace("broken", name))
        assert not (tmp_path / "t" / "data").exists() or not list(
            (tmp_path / "t" / "data").rglob("*.parquet")
        )


def broken(values: pa.Array) -> pa.Array:
    return values.slice(1)


def dear(raw) -> float:
    return next(price for price in raw[1]["price"].to_pylist() if price is not None and price > 9)


def refusing(values: pa.Array) -> pa.Array:
    if any(value is not None and value > 9 for value in values.to_pylist()):
        raise ValueError("too dear,\nby far")
    return values


def test_a_full_disk_is_one_line():
    from sluice.etl.spark.errors import find_cause

    trace = (
        "An error occurred while calling o82.parquet.\n: org.apache.spark.SparkException: Job died.\n\tat a(B)\n"
        "Caused by: java.io.IOException: No space left on device\n\tat java.base/x\n"
    )
    assert find_cause(trace).startswith("the disk is full")
    other = find_cause(trace.replace("No space left on device", "strange"))
    assert_names(other, "java.io.IOException: strange", "nothing was published")
    assert "\n" not in other
    assert json.dumps(find_cause("")) == '"Spark failed; nothing was published"'
