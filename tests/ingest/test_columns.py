"""What a column may hold. An error names the column, value, file, row group and row."""

import datetime
import decimal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Errors, Transform
from sluice.ingest.flow.number_types import ValueRefused, numbers
from sluice.ingest.read.parquet_files import ParquetError
from tests.open_loader import open_loader
from tests.product import (
    BatchLoader,
    ColumnError,
    Columns,
    DataFile,
    Field,
    QuarantineError,
    Read,
    RowGroupReader,
    SourceError,
    TransformError,
    WindowPart,
)
from tests.raises import raises

pytestmark = pytest.mark.slow

ROWS, BAD = 320, 201
ROLES = {"label": "label", "dense": "d", "sparse": "s"}


def written(folder: Path, name: str = "part-0.parquet", **columns) -> Path:
    """Row groups of 100; `columns` replace or add to label, d and s."""
    whole = {
        "label": pa.array(np.arange(ROWS) % 2, pa.int8()),
        "d": pa.array(np.ones(ROWS, np.float32)),
        "s": pa.array(np.arange(ROWS), pa.int32()),
        **columns,
    }
    pq.write_table(pa.table(whole), folder / name, row_group_size=100, write_page_checksum=True)
    return folder


def values(usual, bad, kind: pa.DataType) -> pa.Array:
    """One value in row 1 of row group 2 is `bad`."""
    return pa.array([bad if n == BAD else usual for n in range(ROWS)], kind)


def load(folder: Path, roles=None, **options) -> list:
    with open_loader(
        folder, batch_size=80, reader="arrow", roles=roles or ROLES, **options
    ) as loader:
        return [batch.values.clone() for batch in loader]


@pytest.mark.parametrize(
    ("column", "kind", "bad", "facts"),
    [
        ("s", pa.int64(), -(2**31) - 1, ("-2147483649", "int32")),
        ("s", pa.uint64(), 2**63, (2**63, "int32")),
        ("s", pa.uint32(), 2**31, (2**31, "int32")),
        ("d", pa.float64(), -1e39, ("-1e+39", "float32")),
        ("label", pa.float64(), 1e300, ("1e+300",)),
    ],
)
def test_a_value_that_would_become_another_is_named(tmp_path, column, kind, bad, facts):
    with raises(ColumnError, "part-0.parquet", "row group 2, row 1", f"'{column}'", *facts):
        load(written(tmp_path, **{column: values(1, bad, kind)}))


@pytest.mark.parametrize(
    ("role", "kind", "value"),
    [
        ("sparse", pa.float64(), 1.0),
        ("sparse", pa.timestamp("us"), datetime.datetime(2024, 1, 1)),
        ("sparse", pa.string(), "a"),
        ("sparse", pa.decimal128(9, 2), decimal.Decimal(1)),
        ("dense", pa.list_(pa.float32()), [1.0]),
        ("label", pa.string(), "1"),
        ("dense", pa.dictionary(pa.int32(), pa.string()), "a"),
        ("id_list", pa.list_(pa.float32()), [1.5]),
        ("id_list", pa.list_(pa.list_(pa.int32())), [[1]]),
        ("id_list", pa.int32(), 1),
    ],
)
def test_a_type_that_does_not_suit_its_role_is_refused_at_the_start(tmp_path, role, kind, value):
    written(tmp_path, x=values(value, value, kind))
    roles = {**ROLES, role: "x"} if role != "id_list" else {**ROLES, "id_list": "x"}
    with raises(ColumnError, "'x'", f"role {role}"):
        BatchLoader(tmp_path, batch_size=80, roles=roles)


@pytest.mark.parametrize(
    ("array", "at", "facts"),
    [
        (np.array([0.0, 1.5]), 1, (1.5, "whole")),
        (np.array([np.nan]), 0, ("nan", "whole")),
        (np.array([1.0, 2.0**31]), 1, (2.0**31, "int32")),
        (np.array([3, -1], np.int32), 1, (-1, "int32")),
        (np.array(["x"], object), 0, ("'x'", "number")),
    ],
)
def test_floats_are_ids_only_if_they_are_whole(array, at, facts):
    assert numbers(np.array([3.0, 1.0]), np.int32).tolist() == [3, 1]
    with raises(ValueRefused, *facts) as caught:
        numbers(array, np.int32)
    assert caught.value.at == at


@pytest.mark.parametrize(
    ("bad", "named"), [(-1.0, "-1"), (float("nan"), "nan"), (float("inf"), "inf")]
)
def test_a_weight_that_is_none_stops_the_run_or_is_quarantined(tmp_path, bad, named):
    written(tmp_path, w=values(1.0, bad, pa.float32()))
    roles = {**ROLES, "weight": "w"}
    with raises(QuarantineError, "part-0.parquet", "row group 2 row 1", "'w'", named, "weight"):
        load(tmp_path, roles, errors=Errors(quarantine=tmp_path / "aside"))
    with open_loader(
        tmp_path,
        batch_size=80,
        roles=roles,
        errors=Errors(on_error="quarantine", quarantine=tmp_path / "aside"),
        reader="arrow",
    ) as loader:
        assert sum(float(batch.weight.sum()) for batch in loader) == ROWS - 1
        assert loader.quarantined["rows_set_aside"] == 1


def test_a_fill_that_a_column_cannot_hold_is_named(tmp_path):
    written(tmp_path, s=values(1, None, pa.int32()))
    with raises(ColumnError, "part-0.parquet", "row group 2", "'s'", "1 empty", 0.5, "int32"):
        load(tmp_path, fill=0.5)


@pytest.mark.parametrize(
    ("column", "made", "facts"),
    [
        ("d", lambda a: a.astype(np.float64) * 1e300, ("1e+300", "float32")),
        ("s", lambda a: a.astype(np.int64) * 0 + 2**32, (2**32, "int32")),
        ("s", lambda a: a.astype(np.uint32) * 0 + np.uint32(2**31), (2**31, "int32")),
    ],
)
def test_what_a_function_makes_is_not_cut_to_fit(tmp_path, column, made, facts):
    with raises(TransformError, "'mine'", "epoch 0, step 0", f"'{column}'", *facts):
        load(
            written(tmp_path),
            transforms=[("mine", lambda columns: {column: made(columns[column])})],
        )


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
@pytest.mark.parametrize("policy", ["raise", "quarantine"])
def test_a_function_that_ends_the_program_is_an_error_with_its_place(tmp_path, kind, policy):
    def leave(columns):
        if (columns["s"] == BAD).any():
            if kind == "SystemExit":
                sys.exit(3)
            raise KeyboardInterrupt

    with raises(QuarantineError, "part-0.parquet", "row group 2", "'mine'", kind):
        load(
            written(tmp_path),
            transforms=[Transform(leave, "mine")],
            errors=Errors(on_error=policy, quarantine=tmp_path / "aside"),
        )


def test_a_module_that_ends_the_program_as_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with raises(TransformError, "'mine'", "leaves_at_once:f", "SystemExit: 3"):
        load(written(tmp_path), transforms=[Transform("leaves_at_once:f", "mine")])


# ---- files that do not fit together


def test_two_columns_of_one_name_are_refused_where_they_are_used(tmp_path):
    twice = pa.table(
        [
            pa.array(np.arange(ROWS) % 2),
            pa.array(np.ones(ROWS, np.float32)),
            pa.array(np.arange(ROWS)),
            pa.array(np.arange(ROWS)),
        ],
        names=["label", "d", "s", "s"],
    )
    pq.write_table(twice, tmp_path / "part-0.parquet")
    with raises(ParquetError, "part-0.parquet", "several", "'s'"):
        BatchLoader(tmp_path, batch_size=80, roles=ROLES)
    file = DataFile(
        path=str(tmp_path / "part-0.parquet"), rows=ROWS, bytes=0, row_group_rows=(ROWS,)
    )
    with raises(SourceError, "part-0.parquet", "2 columns", "'s'"):
        RowGroupReader([file], ("label", "s"))
    assert len(load(tmp_path, {"label": "label", "dense": "d"})) == ROWS // 80, (
        "what is not used may be there twice"
    )


def test_a_later_file_of_a_table_without_a_column_or_with_another_kind_is_named(tmp_path):
    """Plain files are compared at the start; of a table's files only the first one's footer is read then."""
    written(tmp_path, "good.parquet")
    written(tmp_path, "text.parquet", s=pa.array(["x"] * ROWS))
    written(tmp_path, "wide.parquet", s=pa.array(np.arange(ROWS), pa.int64()))
    less = pq.read_table(tmp_path / "good.parquet").drop_columns("s")
    pq.write_table(less, tmp_path / "less.parquet", row_group_size=100)
    names = ("good", "text", "wide", "less")
    paths = [str(tmp_path / f"{name}.parquet") for name in names]
    how = {"rows": ROWS, "bytes": 0, "row_group_rows": (100, 100, 100, 20)}
    groups = RowGroupReader([DataFile(path=path, **how) for path in paths], ("label", "d", "s"))

    def read(file):
        return groups.read(Read(file, 1, 100, (WindowPart(0, 0, 0, 100),)))

    with raises(
        SourceError, "text.parquet", "row group 1", "'s'", "string", "good.parquet", "int32"
    ):
        read(1)
    with raises(SourceError, "less.parquet", "row group 1", "'s'", "d, label"):
        read(3)
    assert read(0).num_rows == read(2).num_rows == 100
    groups.close()


def test_there_is_one_label():
    fields = [Field(name=name, role="label", type="int8") for name in ("click", "buy")]
    with raises(ColumnError, "click", "buy"):
        Columns.of(fields)
