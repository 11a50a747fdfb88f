"""Delta and Iceberg tables of any program, and folders such as `day=2026-01-01`, as input of both engines."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.etl.jobs import build_table, rows_of, run
from tests.etl.local.test_engines import alike
from tests.lake_tables import KINDS, change_delta_schema, clicks, make, start_threads_of_iceberg
from tests.product import InputError, PartitionError, TableFilesError
from tests.raises import raises

SPEC = """
[input]
format = "{form}"
columns = ["click:int", "price:float", "user:text", "day:text", "hour:int", "at:float"]
[table]
[[column]]
name = "click"
role = "label"
[[column]]
name = "price"
role = "dense"
ops = [{{op = "fill"}}]
[[column]]
name = "hour"
role = "dense"
ops = [{{op = "fill"}}]
[[column]]
name = "clock"
from = "at"
role = "sparse"
ops = [{{op = "hour"}}, {{op = "modulus", size = 24}}]
[[column]]
name = "user"
role = "sparse"
ops = [{{op = "hash", size = 100}}]
[[column]]
name = "day"
role = "sparse"
ops = [{{op = "categorify"}}]
"""


@pytest.fixture(scope="module", autouse=True)
def threads():
    start_threads_of_iceberg()


def text_of(kind: str) -> str:
    return SPEC.format(form={"folders": "parquet"}.get(kind, kind.split()[0]))


@pytest.fixture
def rows():
    return clicks(0), clicks(1)


def by_hand(tmp_path, rows) -> list[dict]:
    """The rows that a job makes of one plain file."""
    (tmp_path / "plain").mkdir()
    pq.write_table(pa.concat_tables(rows), tmp_path / "plain" / "a.parquet")
    made = build_table(None, tmp_path / "by hand", tmp_path / "plain", text=text_of("folders"))
    return sorted(rows_of(made), key=str)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_makes_the_rows_of_a_plain_file(tmp_path, rows, kind):
    source = make(kind, tmp_path / "in", *rows)
    made = build_table(None, tmp_path / "t", source, text=text_of(kind))
    assert sorted(rows_of(made), key=str) == by_hand(tmp_path, rows)


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["delta by name", "iceberg", "folders"])
def test_both_engines_make_the_same_table(spark, tmp_path, rows, kind):
    source = make(kind, tmp_path / "in", *rows)
    both = [
        build_table(engine, tmp_path / name, source, text=text_of(kind))
        for engine, name in ((spark, "spark"), (None, "local"))
    ]
    alike(*both)


def test_names_and_values_are_the_tables(tmp_path, rows):
    """Values of folders with signs that paths escape, and a renamed column."""
    odd = rows[0].set_column(3, "day", pa.array(["a b%20/c", None, "é"] * 100))
    source = make("delta by name", tmp_path / "in", odd)
    first = rows_of(build_table(None, tmp_path / "before", source, text=text_of("delta")))
    change_delta_schema(
        source,
        lambda fields: [
            {**field, "name": {"user": "visitor"}.get(field["name"], field["name"])}
            for field in fields
        ],
    )
    renamed = text_of("delta").replace('"user:text"', '"visitor:text"')
    renamed = renamed.replace('name = "user"', 'name = "user"\nfrom = "visitor"')
    again = rows_of(build_table(None, tmp_path / "after", source, text=renamed))
    names = [sorted(str(sorted(row.items())) for row in some) for some in (first, again)]
    assert names[0] == names[1]


def test_a_column_that_older_files_lack_and_a_version_are_the_tables(tmp_path, rows):
    plain = make("delta", tmp_path / "plain", rows[0])
    later = rows[1].append_column("size", pa.array([2.5] * 300, pa.float32()))
    write_deltalake(plain, later, mode="append", schema_mode="merge")
    text = text_of("delta").replace('"at:float"]', '"at:float", "size:float"]')
    text += '[[column]]\nname = "size"\nrole = "dense"\nops = [{op = "fill", value = -1}]\n'
    sizes = [row["size"] for row in rows_of(build_table(None, tmp_path / "s", plain, text=text))]
    assert sorted(sizes) == [-1.0] * 300 + [2.5] * 300
    made = build_table(None, tmp_path / "v0", f"{plain}@v0", text=text_of("delta"))
    assert made.rows == 300
    assert made.record.inputs == {plain: 0}


def test_a_folder_that_a_spec_does_not_name_is_no_column(tmp_path, rows):
    source = make("folders", tmp_path / "in", *rows)
    text = text_of("folders").replace('"day:text", ', "").partition('[[column]]\nname = "day"')[0]
    assert build_table(None, tmp_path / "t", source, text=text).rows == 600
    (tmp_path / "in" / "old").mkdir()
    shutil.copy(next((tmp_path / "in").rglob("*.parquet")), tmp_path / "in" / "old" / "a.parquet")
    with raises(InputError, "'hour'"):
        run(None, tmp_path / "t2", source, text=text)


def test_a_column_in_a_file_and_in_its_folders_name_is_refused(tmp_path, rows):
    (tmp_path / "in" / "hour=1").mkdir(parents=True)
    pq.write_table(rows[0], tmp_path / "in" / "hour=1" / "a.parquet")
    with raises(PartitionError, "hour=1/a.parquet", "'hour'"):
        run(None, tmp_path / "t", tmp_path / "in", text=text_of("folders"))


def test_marked_rows_are_refused_before_any_is_read(tmp_path, rows, monkeypatch):
    source = make("delta", tmp_path / "in", *rows)
    marked = pa.table({"filepath": DeltaTable(source).file_uris()[:1]})
    monkeypatch.setattr(DeltaTable, "deletion_vectors", lambda _: marked)
    with raises(TableFilesError, source, "deletion vector"):
        run(None, tmp_path / "t", source, text=text_of("delta"))
