"""No number is changed to fit a type, and none that is not finite is published: its row is rejected with its reason."""

import json
import math
import re
from pathlib import Path

import pyarrow as pa
import pytest

from sluice import FeatureTable
from sluice.etl.jobs.job_run import TooManyRejects
from tests.etl.jobs import Said, build_table, rows_of, run, words_of
from tests.etl.local.test_engines import alike
from tests.etl.tables import column, rejects_of, write_rows, write_spec
from tests.product import Result, stored_column

pytestmark = [
    pytest.mark.slow,
]

HEAD = write_spec(
    "label:int row:int a:float b:float word:text",
    column("row", "dense", "fill"),
    form="%s",
    head="%s\n",
    table="split = {train = 1}\n%s",
)


def write(path: Path, rows: list[tuple[float | None, float | None, str]]) -> None:
    """Lines of label, number of the row, a, b and word."""
    lines = [
        f"{n % 2},{n},{'' if a is None else repr(a)},{'' if b is None else repr(b)},{word}\n"
        for n, (a, b, word) in enumerate(rows)
    ]
    path.write_text("".join(lines))


def settled(result: Result, table: Path, rows: int) -> dict[int, dict[str, float]]:
    """The rows of a table by their numbers; the counts of its job agree, and every number in it is finite."""
    kept = {int(row["row"]): row for row in rows_of(table)}
    assert len(kept) == result.rows_out
    assert result.rows_in == rows == result.rows_out + sum(result.rejected.values())
    assert all(
        math.isfinite(value)
        for row in kept.values()
        for value in row.values()
        if isinstance(value, float)
    )
    return kept


# ---- both engines


LATE = "".join(
    (
        column("plain", "dense", "fill", "a"),
        column("grown", "dense", "fill; scale, by = 5e-20", "a"),
        column("scaled", "dense", "fill_mean; standardise; scale, by = 1e-38", "b"),
        column(
            "left",
            "dense",
            "fill; standardise, online = true; scale, by = 5e-39, online = true",
            "b",
        ),
        column("words", "sparse", "categorify", "word"),
        column("rate", "dense", "target", "word"),
        column("at", "time", source="a"),
        column("much", "weight", "fill, value = 1; clip, low = -0.5", "b"),
    )
)
ROWS = [
    (1.0, 2.0, "w"),
    (1e300, 2.0, "lost"),
    (1.0, 1.0, "w"),
    (1.0, 3.0, "w"),
    (3.0, 50.0, "far"),
    (3.0, 11.0, "near"),
    (3e19, 1.0, "grown"),
    (math.inf, 1.0, "inf"),
    (math.nan, 1.0, "nan"),
    (None, None, "none"),
    (4.0, -0.2, "weight"),
    *((float(n % 7), 1.0 + n % 2 / 8, "w") for n in range(10, 200)),
]


@pytest.mark.spark
@pytest.mark.parametrize("form", ["parquet", "place"])
def test_both_engines_reject_the_same_rows_for_the_same_reasons(spark, tmp_path, form):
    """Rows that show at once, and rows that show once operators have learned; with their lines where there are any."""
    keys = ("parquet", "", "") if form == "parquet" else ("csv", 'place = "place"', "")
    text = HEAD % keys + LATE
    if form == "parquet":
        columns = list(zip(*ROWS, strict=True))
        write_rows(
            tmp_path / "rows",
            label=[n % 2 for n in range(len(ROWS))],
            row=range(len(ROWS)),
            a=pa.array(columns[0], pa.float64()),
            b=pa.array(columns[1], pa.float64()),
            word=columns[2],
        )
    else:
        write(tmp_path / "rows", ROWS)
    both = []
    for engine, where in ((spark, "spark"), (None, "local")):
        result = run(engine, tmp_path / where, tmp_path / "rows", text=text, max_rejects=0.2)
        kept = settled(result, tmp_path / where, len(ROWS))
        both.append(FeatureTable.open(tmp_path / where))
        assert (
            result.rejected
            == both[-1].record.rejected
            == {
                **{
                    f"{name}: NaN, or too large for float32": 1
                    for name in ("plain", "grown", "scaled", "left")
                },
                "at: NaN or infinite": 2,
                "much: NaN, below 0, or too large for float32": 1,
            }
        )
        assert len(kept) == len(ROWS) - 7
    alike(*both)


# ---- what operators learn


def test_a_row_that_shows_at_once_takes_no_part_in_what_is_learned_and_one_that_shows_later_has(
    tmp_path,
):
    write(tmp_path / "rows", ROWS)
    text = HEAD % ("csv", "", "") + LATE
    said = Said()
    table = build_table(
        None, tmp_path / "t", tmp_path / "rows", text=text, max_rejects=0.2, said=said
    )
    more = said.text.partition("writing 2 more rejected rows")[2]
    assert sum(map(int, re.findall(r"(\d+) rejected: ", more))) == 2, said.text
    # Five were set aside when they were parsed; two, once the others' spread was known.
    early, late = {"lost", "grown", "inf", "nan", "weight"}, {"far", "near"}
    assert set(words_of(table, "words/0")) & (early | late) == late
    told = sorted(row["raw"].rpartition(",")[2] for row in rejects_of(table))
    assert told == sorted([*early, *late]), "each with its own line"
    assert 0 < table.state()["left/1"]["mean"][0].as_py() < 2


def test_rows_that_show_once_all_have_learned_count_for_max_rejects(tmp_path):
    write(tmp_path / "rows", [(1.0, float(n % 2) if n else 1e6, "w") for n in range(400)])
    text = HEAD % ("csv", "", "") + column(
        "x", "dense", "fill; standardise; scale, by = 2e-38", "b"
    )
    assert run(None, tmp_path / "t", tmp_path / "rows", text=text).rejected == {
        "x: NaN, or too large for float32": 1
    }
    with pytest.raises(
        TooManyRejects,
        match=r"1 of 400 rows are rejected, more than --max-rejects 0.002 allows \(most "
        r"often: x: NaN, or too large for float32; for instance in file:.*/rows, "
        r"line 1: '0,0,1.0,1000000.0,w'\); nothing was published",
    ) as refused:
        run(None, tmp_path / "u", tmp_path / "rows", text=text, max_rejects=0.002)
    folder = Path(str(refused.value).partition("rows and reasons are in ")[2])
    assert json.loads((folder / "part-00000.json").read_text())["line"] == 1


# ---- rows that meet others


@pytest.mark.spark
def test_a_number_that_other_rows_make_too_large_rejects_its_row(spark, tmp_path):
    """A lag's difference shows before operators learn, what is made of it by their spread afterwards. Such rows have
    no file or line; what they hold is told."""
    write(
        tmp_path / "rows",
        [({5: 3e38, 10: -3e38}.get(n, n % 7 / 2), float(n), f"u{n % 5}") for n in range(111)],
    )
    text = (
        HEAD
        % (
            "csv",
            "",
            '[[lag]]\nname = "grown"\nof = "a"\nby = "word"\norder = "b"\ndifference = true\n',
        )
        + column("grown", "dense", "fill")
        + column("later", "dense", "fill; standardise; scale, by = 1e-38", "grown")
        + column("words", "sparse", "categorify", "row")
    )
    result = run(spark, tmp_path / "t", tmp_path / "rows", text=text, max_rejects=0.1)
    kept = settled(result, tmp_path / "t", 111)
    table = FeatureTable.open(tmp_path / "t")
    assert result.rejected == {
        "grown: NaN, or too large for float32": 1,
        "later: NaN, or too large for float32": 2,
    }
    assert sorted(set(range(111)) - kept.keys()) == [5, 10, 15]
    told = sorted(
        (json.loads(row["raw"])["row"], "file" in row, "line" in row) for row in rejects_of(table)
    )
    assert told == [(5, False, False), (10, False, False), (15, False, False)]
    words = words_of(table, "words/0")
    assert "10" not in words, "known before anything was learned"
    assert "5" in words


def test_an_append_applies_what_was_learned_and_rejects_by_that(tmp_path):
    write(tmp_path / "first", [(1.0, float(n % 3), "abc"[n % 3]) for n in range(300)])
    write(tmp_path / "second", [(1.0, 1e30 if n == 7 else 1.0, "a") for n in range(300)])
    late = column("x", "dense", "fill; standardise; scale, by = 1e-20", "b")
    text = HEAD % ("csv", "", "") + late
    run(None, tmp_path / "t", tmp_path / "first", text=text)
    added = run(None, tmp_path / "t", tmp_path / "second", text=text, mode="append")
    assert (added.rows_in, added.rows_out, added.rejected) == (
        300,
        299,
        {"x: NaN, or too large for float32": 1},
    )


@pytest.mark.parametrize(
    ("unit", "value", "seconds"),
    [
        ("ms", 10**17, 10**14),
        ("s", 2**60, 2**60),
        ("s", -(2**62), -(2**62)),
        ("us", 10**18, 10**12),
        ("ns", 10**18 + 1, 10**9),
    ],
)
def test_a_time_is_never_wrapped_around(unit, value, seconds):
    for kind in ("int", "float"):
        values, lost = stored_column(pa.array([value], pa.timestamp(unit)), kind)
        assert (values[0].as_py(), lost) == (seconds, None)
