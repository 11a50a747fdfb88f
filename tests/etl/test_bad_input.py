"""Inputs and places that are not as they should be, as whole jobs meet them: what is said names file, column, value.

Bad lines one by one are in test_parse; other headers, empty files and unsigned numbers in test_jobs; no files, empty
ones and rejects in test_build."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from sluice import FeatureTable
from tests.etl.jobs import build_table, rows_of, run
from tests.etl.tables import column, put, rejects_of, write_rows, write_spec
from tests.product import (
    InputError,
    Job,
    JobFailure,
    Spec,
    StoreError,
    TableError,
    TableStore,
    spark_errors_as_job_failure,
)
from tests.raises import raises

pytestmark = pytest.mark.spark

INPUTS = "click:int item:text price:float"
REST = column("item", "key") + column("price", "dense", "fill, value = -1")
PARQUET = write_spec(INPUTS, REST)


def parts(folder: Path, *tables: pa.Table) -> Path:
    for number, table in enumerate(tables, 1):
        write_rows(folder / f"{number}.parquet", table)
    return folder


def table(*items: str | None, **others: pa.Array) -> pa.Table:
    made = {
        "click": pa.array([1] * len(items), pa.int64()),
        "item": pa.array(items, pa.string()),
        "price": pa.array([2.5] * len(items)),
        **others,
    }
    return pa.table({name: values for name, values in made.items() if values is not None})


def prices(folder: Path) -> list[tuple[str, float]]:
    return sorted((row["item"], row["price"]) for row in rows_of(folder))


def test_a_parquet_file_that_lacks_a_column_is_named_or_filled_if_the_spec_says_so(spark, tmp_path):
    for first, second in (
        (table("a"), table("b", price=None)),
        (table("b", price=None), table("a")),
    ):
        folder = parts(tmp_path / f"in-{first.num_columns}", first, second)
        lacking = 2 if first.num_columns == 3 else 1
        with raises(
            InputError, f"{lacking}.parquet:", "'price'", f"{3 - lacking}.parquet", "input.optional"
        ):
            run(spark, tmp_path / "t", folder, text=PARQUET)
        text = PARQUET.replace('"price:float"]\n', '"price:float"]\noptional = ["price"]\n')
        out = tmp_path / f"t-{first.num_columns}"
        run(spark, out, folder, text=text)
        assert prices(out) == [("a", 2.5), ("b", -1.0)]


def test_a_column_all_null_in_one_parquet_file_is_no_more_than_missing(spark, tmp_path):
    """Its writer could not know its type."""
    files = table("b", price=pa.nulls(1)), table("a")
    run(spark, tmp_path / "t", parts(tmp_path / "in", *files), text=PARQUET)
    assert prices(tmp_path / "t") == [("a", 2.5), ("b", -1.0)]


def test_an_older_file_of_a_delta_table_lacks_what_was_added_later(spark, tmp_path):
    write_deltalake(tmp_path / "in", table("a", price=None))
    write_deltalake(tmp_path / "in", table("b"), mode="append", schema_mode="merge")
    run(spark, tmp_path / "t", tmp_path / "in", text=PARQUET.replace('"parquet"', '"delta"'))
    assert prices(tmp_path / "t") == [("a", -1.0), ("b", 2.5)]


def test_files_that_a_table_has_removed_are_never_read(spark, tmp_path):
    write_deltalake(tmp_path / "in" / "dl", table("a"), partition_by=["item"])
    write_deltalake(tmp_path / "in" / "dl", table("b"), mode="overwrite")
    for path in ("in", "in/dl", "in/dl/item=a", "in/dl/*", "in/*/*/*.parquet"):
        with raises(InputError, f"{tmp_path}/in/dl:", "Delta", 'format = "delta"'):
            run(spark, tmp_path / "t", tmp_path / path, text=PARQUET)
    assert not list((tmp_path / "t").rglob("*.parquet"))
    run(spark, tmp_path / "t", tmp_path / "in" / "dl", text=PARQUET.replace('"parquet"', '"delta"'))
    assert [row["item"] for row in rows_of(tmp_path / "t")] == ["b"]


def test_a_quoted_field_may_contain_line_ends_and_an_open_quote_costs_its_own_line(spark, tmp_path):
    text = write_spec(INPUTS, REST, form="csv", head="multiline = true\n")
    lines = put(
        tmp_path / "in.csv",
        b'1,"a\nb",1\n0,"c\r\n""d""\n",2\n1,f,x\n1,"g\n\n",5\r\n1,"open,3\n0,e,4',
    )
    made = build_table(spark, tmp_path / "t", lines, text=text, max_rejects=1.0)
    assert prices(tmp_path / "t") == [("a\nb", 1), ('c\r\n"d"\n', 2), ("e", 4), ("g\n\n", 5)]
    assert {each["line"]: each["reason"] for each in rejects_of(made)} == {
        3: "price: not a number of 64 bits",
        5: "a quote that does not end",
    }


@contextmanager
def mounted(place: Path, options: str):
    """A file system of its own, where this machine lets us make one."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(
            f"no file system can be mounted here ({done.stderr.strip()}): a real full disk is not tried"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("size", ["16k", "200k"])
def test_a_full_disk_is_said_in_one_line_and_publishes_nothing(spark, tmp_path, size):
    """Too small for the state that is saved, or for the rows that are written."""
    path = tmp_path / "rows.parquet"
    write_rows(path, table(*np.random.default_rng(1).integers(0, 2**63, 20_000).astype(str)))
    text = (
        PARQUET.replace('role = "key"', 'role = "sparse"\nops = [{op = "categorify"}]')
        if size == "16k"
        else PARQUET
    )
    with mounted(tmp_path / "disk", f"size={size}"):
        with (
            pytest.raises(
                JobFailure, match=r"the disk is full: make room .*nothing was published"
            ) as error,
            spark_errors_as_job_failure(),
        ):
            run(spark, tmp_path / "disk" / "t", path, text=text)
        assert "\n" not in str(error.value)
        assert not list((tmp_path / "disk" / "t").rglob("*.parquet"))
        with raises(TableError, tmp_path / "disk" / "t", "no feature table"):
            FeatureTable.open(tmp_path / "disk" / "t")


def test_an_output_that_is_read_only_is_refused_before_spark_starts(tmp_path):
    with (
        mounted(tmp_path / "disk", "ro"),
        raises(StoreError, tmp_path / "disk" / "t", "Read-only file system"),
    ):
        Job(spec=Spec.parse(PARQUET), inputs=("x",), store=TableStore(tmp_path / "disk" / "t"))
