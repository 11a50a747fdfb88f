"""Files as other programs write them: both engines make the same rows of them, and name what they cannot read."""

import datetime
import json

import pyarrow as pa
import pytest

from tests.etl.jobs import rows_of, run
from tests.etl.tables import column, write_rows, write_spec
from tests.product import InputError
from tests.raises import raises

ENGINES = pytest.mark.parametrize(
    "engine", ["local", pytest.param("spark", marks=pytest.mark.spark)]
)
TRAIN = "split = {train = 1}"
FIRST = datetime.datetime(2026, 1, 1, 5, 30, 7, 123_456)


@pytest.fixture
def made(engine, tmp_path, request):
    """Runs a job, and returns its table's rows."""

    def go(text: str, *inputs: object) -> tuple[dict, list[dict]]:
        session = request.getfixturevalue("spark") if engine == "spark" else None
        result = run(session, tmp_path / "made", *inputs, text=text, max_rejects=0.5)
        return result.rejected, rows_of(tmp_path / "made")

    return go


def odd(start: int, whole: pa.DataType) -> pa.Table:
    """Columns of every type that only some programs read; those that a spec needs, and others."""
    n = range(start, start + 20)
    return pa.table(
        {
            "y": pa.array([i % 2 for i in n], whole),
            "user": pa.array([2**64 - 1 - i for i in n], pa.uint64()),
            "City": [f"A{i % 3}" for i in n],
            "city": [f"b{i % 5}" for i in n],
            "size": pa.array(n, whole),
            "code": pa.array(n).cast(pa.string() if whole == pa.int64() else whole),
            "at": pa.array([FIRST + datetime.timedelta(hours=i) for i in n], pa.timestamp("ns")),
            "vector": pa.array([[i, i + 0.5] for i in n], pa.list_(pa.float32(), 2)),
            "unused": pa.array([1.0] * 20, pa.float16()),
            "UNUSED": pa.array([1] * 20, pa.time32("ms")),
        }
    )


@ENGINES
def test_only_the_columns_that_a_spec_names_are_read(made, tmp_path):
    """Others may be of types that an engine does not know. Of those that are read, whole numbers have one size in one
    file and another in the next, or are texts there, ids are unsigned, names differ by case alone, times have
    nanoseconds, vectors have a fixed size, floats have 16 bits."""
    for part, kind in enumerate((pa.int32(), pa.int64())):
        write_rows(tmp_path / f"{part}.parquet", odd(20 * part, kind))
    rejected, rows = made(
        write_spec(
            "y:int user:text City:text city:text code:text size:int at:float vector:floats unused:float",
            column("user", "key"),
            column("City", "key"),
            column("code", "key"),
            column("town", "key", source="city"),
            column("size", "dense", "fill"),
            column("at", "time"),
            column("vector", "dense", 'bag, of = "sum"; fill'),
            column("half", "dense", "fill", source="unused"),
            table=TRAIN,
        ),
        tmp_path,
    )
    assert rejected == {}
    first = FIRST.replace(tzinfo=datetime.UTC).timestamp()
    assert sorted(rows, key=lambda row: row["size"]) == [
        {
            "y": i % 2,
            "user": str(2**64 - 1 - i),
            "City": f"A{i % 3}",
            "town": f"b{i % 5}",
            "code": str(i),
            "size": i,
            "at": pytest.approx(first + 3600 * i, abs=1e-6),
            "vector": 2 * i + 0.5,
            "half": 1.0,
        }
        for i in range(40)
    ]


@ENGINES
def test_a_column_that_cannot_be_read_is_named_with_what_to_do(made, tmp_path):
    write_rows(tmp_path / "a.parquet", odd(0, pa.int32()))
    with raises(InputError, "a.parquet:", "'UNUSED'", "time32", "input.columns"):
        made(
            write_spec("y:int UNUSED:float", column("UNUSED", "dense", "fill"), table=TRAIN),
            tmp_path / "a.parquet",
        )


@ENGINES
@pytest.mark.parametrize("form", ["csv", "json"])
def test_empty_lines_are_no_rows(made, tmp_path, form):
    lines = [
        json.dumps({"y": n % 2, "x": n}) if form == "json" else f"{n % 2},{n}" for n in range(6)
    ]
    head = [] if form == "json" else ["y,x", ""]
    lines = [*head, *lines[:3], "", "", *lines[3:], "", "bad", ""]
    (tmp_path / "a.txt").write_bytes("\r\n".join(lines).encode() + b"\n\n")
    keys = "" if form == "json" else "header = true\n"
    text = write_spec(
        "y:int x:int", column("x", "dense", "fill"), form=form, head=keys, table=TRAIN
    )
    rejected, rows = made(text, tmp_path / "a.txt")
    assert rejected == {"not a JSON object" if form == "json" else "wrong number of fields": 1}
    assert sorted(row["x"] for row in rows) == list(range(6))
