"""What the first rows show is refused before Spark starts; what they cannot show is left to it."""

from __future__ import annotations

import gzip

import pyarrow as pa
import pytest

from sluice.common.errors import InputError
from sluice.etl.first_rows import ROWS, refuse_by_first_rows
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.jobs.job import Job
from sluice.etl.spec.spec import Spec
from sluice.etl.table.store import TableStore
from tests.etl.tables import column, write_rows, write_spec
from tests.raises import raises

POSITIVE = "tests.etl.test_first_rows:positive"
TEXT = write_spec(
    "click:int price:float",
    column(
        "price",
        "dense",
        f'python, function = "{POSITIVE}", inputs = "number", output = "number"; fill_mean',
    ),
    form="%s",
    head="%s\n",
    table="",
)


def positive(values: pa.Array) -> pa.Array:
    if any(value is not None and value < 0 for value in values.to_pylist()):
        raise ArithmeticError("no price")
    return values


def refuse(tmp_path, form: str = "tsv", head: str = "", environment=None, **options):
    job = Job(
        spec=Spec.own(TEXT % (form, head), "clicks.toml"),
        inputs=(str(tmp_path / "in"),),
        store=TableStore(tmp_path / "t"),
        **options,
    )
    refuse_by_first_rows(job, environment or {})


@pytest.fixture
def first(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tsv").touch()  # without rows it shows nothing
    return tmp_path / "in" / "b.tsv"


def test_a_function_that_fails_on_them_is_named_with_file_column_and_value(tmp_path, first):
    rows = [f"1\t{n}" for n in range(ROWS - 1)]
    first.write_text("\n".join([*rows, "0\t-2.5"]) + "\n")
    said = r"/in/b\.tsv: column 'price': .*:positive fails at '-2.5': ArithmeticError: no price; nothing was published"
    with pytest.raises(JobFailure, match=said):
        refuse(tmp_path)
    refuse(
        tmp_path, environment={"HADOOP_CONF_DIR": "/etc/hadoop"}
    )  # the path may be another store's
    first.write_text("\n".join([*rows, "0\t2", "0\t-2.5"]) + "\n")  # one row later
    refuse(tmp_path)
    first.unlink()
    write_rows(
        first, price=pa.array([1, None, -2], pa.int32()), click=pa.array([0, 1, 0], pa.int8())
    )
    (tmp_path / "in" / "a.tsv").unlink()
    with raises(JobFailure, "fails at '-2.0'"):
        refuse(tmp_path, "parquet")
    write_rows(first, price=pa.array([3, -5], pa.timestamp("ms")), click=pa.array([0, 1]))
    with raises(JobFailure, "fails at '-0.005'"):  # a time is seconds, as in the job
        refuse(tmp_path, "parquet")


def test_rows_of_which_none_parses_are_refused_if_they_are_too_many_in_any_case(tmp_path, first):
    first.write_text("\n".join(f"{n},1.5" for n in range(3000)) + "\n")
    with raises(
        InputError,
        "/in/b.tsv:",
        "first 3,000 rows",
        "--max-rejects 0.01",
        "row 1",
        "'0,1.5'",
        "clicks.toml",
    ):
        refuse(tmp_path)
    refuse(tmp_path, max_rejects=1.0)
    later = first.with_name("c.tsv")
    later.write_text("1\t2\n" * 3000 * 300)  # with these, it may be less than a hundredth of all
    refuse(tmp_path)
    later.unlink()
    first.write_text("\n".join([*(f"{n},1.5" for n in range(3000)), "1\t2"]) + "\n")
    refuse(tmp_path)
    first.with_suffix(".gz").write_bytes(gzip.compress(b"9\t1\n" * 10))
    first.unlink()
    with raises(InputError, "/in/b.gz:", "first 10 rows", "row 1", "click"):
        refuse(tmp_path)


def test_a_header_of_another_order_is_refused_and_other_forms_are_left_to_spark(tmp_path, first):
    for content, *facts in (
        ("price,click\n1,0\n", "'price'", "column 1", "'click'"),
        ('"click, or not",price\n1,0\n', "'click, or not'", "column 1", "'click'", "2 columns"),
        ("PAR1\x15\x04\x15\x10\n", "/in/b.tsv:", "Parquet", "input.format = 'csv'", "sluice guess"),
        ("click,Größe\n1,0\n", "/in/b.tsv:", "UTF-8", "input.encoding", "cp1252"),
    ):
        first.write_bytes(content.encode("cp1252"))
        with raises(InputError, *facts):
            refuse(tmp_path, "csv", "header = true")
    refuse(tmp_path, "csv", "header = true\nmultiline = true")
    first.with_suffix(".lz4").write_bytes(bytes(range(10, 99)))
    first.unlink()
    refuse(tmp_path)
