"""No number is changed to fit a type, and none that is not finite is published: its row is rejected with its reason."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.etl.apply.failure import FeatureError
from sluice.etl.jobs.job_run import Result, TooManyRejects
from sluice.etl.spark.vocabulary.join import VocabularyJoins
from sluice.etl.spec.input_values import converted
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table import FeatureTable
from tests.etl.jobs import build_table, rows_of, run, words_of
from tests.etl.local.test_engines import alike
from tests.etl.tables import column, rejects_of, write_rows, write_spec
from tests.raises import raises

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


def write(path: Path, rows: list[tuple[float | None, float | None, str]], head: str = "") -> None:
    """Lines of label, number of the row, a, b and word."""
    lines = [
        f"{n % 2},{n},{'' if a is None else repr(a)},{'' if b is None else repr(b)},{word}\n"
        for n, (a, b, word) in enumerate(rows)
    ]
    path.write_text(head + "".join(lines))


def settled(result: Result, table: Path, rows: int) -> dict[int, dict[str, float]]:
    """The rows of a table by their numbers; the counts of its job agree, and every number in it is finite."""
    found = {int(row["row"]): row for row in rows_of(table)}
    assert len(found) == result.rows_out
    assert result.rows_in == rows == result.rows_out + sum(result.rejected.values())
    assert all(
        math.isfinite(value)
        for row in found.values()
        for value in row.values()
        if isinstance(value, float)
    )
    return found


# ---- drawn chains against plain arithmetic


ODD = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-300,
    5e-324,
    1e15,
    3.4028234663852886e38,
    3.4028235677973362e38,
    3.4028235677973366e38,
    3.5e38,
    -1e39,
    1e300,
    -1e300,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
]
VALUES = st.none() | st.sampled_from(ODD) | st.floats(allow_nan=False) | st.floats(-1e3, 1e3)


def filled(x: float, value: float) -> float:
    return x if math.isfinite(x) else value


def power_of(x: float, power: float) -> float:
    logs = np.log(np.maximum(x, 1e-6))
    return float(logs if power == 0 else np.expm1(power * logs) / power)


PLAIN = {
    "fill, value = -3": lambda x: filled(x, -3.0),
    "clip, low = -1e38": lambda x: float(np.maximum(x, -1e38)),
    "clip, high = 1e301": lambda x: float(np.minimum(x, 1e301)),
    "scale, by = 1e-30": lambda x: float(np.float64(x) / 1e-30),
    "scale, by = -1e200": lambda x: float(np.float64(x) / -1e200),
    "log": lambda x: float(np.log(np.maximum(x + 1.0, 1e-6))),
    "boxcox, power = 5": lambda x: power_of(x, 5.0),
    "boxcox, power = 0": lambda x: power_of(x, 0.0),
    "logit": lambda x: float(np.log(kept := np.clip(x, 1e-6, 1 - 1e-6)) - np.log1p(-kept)),
    "missing": lambda x: float(not math.isfinite(x)),
}
STANDARD = "standardise"
CHAINS = (
    st.tuples(
        st.lists(st.sampled_from([*PLAIN, STANDARD]), max_size=3),
        st.lists(st.sampled_from([*PLAIN, STANDARD]), max_size=2),
    )
    .map(lambda both: [*both[0], "fill, value = -3", *both[1]])
    .filter(lambda chain: chain.count(STANDARD) <= 3)
)


def standardised(values: list[float]) -> list[float]:
    good = [Fraction(x) for x in values if math.isfinite(x)]
    mean = sum(good, Fraction()) / max(1, len(good))
    variance = sum(((x - mean) ** 2 for x in good), Fraction()) / max(1, len(good))
    # The root of a number beyond any float is that of a smaller one, scaled by a power of two.
    half = (variance.numerator.bit_length() - variance.denominator.bit_length()) // 2
    spread = math.ldexp(math.sqrt(variance / Fraction(4) ** half), half)
    with np.errstate(all="ignore"):
        return [float((np.float64(x) - np.float64(float(mean))) / (spread or 1.0)) for x in values]


def through(chain: list[str], values: list[float]) -> list[float]:
    with np.errstate(all="ignore"):
        for op in chain:
            values = standardised(values) if op == STANDARD else [PLAIN[op](x) for x in values]
    return values


def fits(x: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float32(x)))


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=12), CHAINS, CHAINS)
def test_each_number_is_that_of_float64_rounded_once_or_its_row_is_rejected(
    tmp_path_factory, values, one, other
):
    folder = tmp_path_factory.mktemp("drawn")
    write(folder / "rows.csv", [(a, b, "w") for a, b in values])
    text = (
        HEAD % ("csv", "", "")
        + column("x", "dense", "; ".join(one), "a")
        + column("y", "dense", "; ".join(other), "b")
    )
    numbers = [
        [math.nan if v is None else v for v in column] for column in zip(*values, strict=True)
    ]
    chains = {"x": (one, numbers[0]), "y": (other, numbers[1])}
    # What learns nothing is known when rows are parsed: operators do not learn from these rows.
    kept = list(range(len(values)))
    for chain, numbers_of in chains.values():
        if STANDARD not in chain:
            kept = [
                n
                for n, x in zip(kept, through(chain, [numbers_of[n] for n in kept]), strict=True)
                if fits(x)
            ]
    want: dict[int, dict[str, float]] = {n: {} for n in kept}
    for name, (chain, numbers_of) in chains.items():
        for n, x in zip(kept, through(chain, [numbers_of[n] for n in kept]), strict=True):
            want[n][name] = x
    want = {n: row for n, row in want.items() if all(map(fits, row.values()))}
    if not want:
        with raises(TooManyRejects, f"{len(values)} of {len(values)} rows"):
            run(None, folder / "t", folder / "rows.csv", text=text, max_rejects=1.0)
        return
    result = run(None, folder / "t", folder / "rows.csv", text=text, max_rejects=1.0)
    found = settled(result, folder / "t", len(values))
    assert found.keys() == want.keys()
    for n, row in want.items():
        for name, x in row.items():
            assert np.float32(x).tobytes() == np.float32(found[n][name]).tobytes(), (n, name, x)
    lines = rejects_of(FeatureTable.open(folder / "t"))
    assert sorted(row["line"] - 1 for row in lines) == [
        n for n in range(len(values)) if n not in want
    ]
    for row in lines:
        assert row["reason"] in (
            "x: NaN, or too large for float32",
            "y: NaN, or too large for float32",
        )
        assert row["raw"] == (folder / "rows.csv").read_text().splitlines()[row["line"] - 1]


# ---- both engines


LATE = "".join(
    (
        column("plain", "dense", "fill", "a"),
        column("grown", "dense", "fill; boxcox, power = 2", "a"),
        column("scaled", "dense", "fill_mean; standardise; scale, by = 1e-38", "b"),
        column(
            "left",
            "dense",
            "fill; standardise, online = true; scale, by = 5e-39, online = true",
            "b",
        ),
        column("sums", "dense", 'group, of = "sum"; fill; scale, by = 1e-20', ["word", "a"]),
        column("words", "sparse", "categorify", "word"),
        column("rate", "dense", "target", "word"),
        column("at", "time", source="a"),
        column("much", "weight", "fill, value = 1; clip, low = -0.5", "b"),
    )
)
ROWS = [
    (1.0, 2.0, "w"),
    (1e300, 2.0, "lost"),
    (1e19, 1.0, "sum"),
    (1e19, 3.0, "sum"),
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
@pytest.mark.parametrize("form", ["csv", "parquet", "place"])
def test_both_engines_reject_the_same_rows_for_the_same_reasons(spark, tmp_path, form):
    """Rows that show at once, and rows that show once operators have learned; with their lines where there are any."""
    more = 'header = true\nplace = "place"' if form == "place" else ""
    text = HEAD % ("parquet" if form == "parquet" else "csv", more, "") + LATE
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
        write(tmp_path / "rows", ROWS, "label,row,a,b,word\n" if more else "")
    both = []
    for engine, where in ((spark, "spark"), (None, "local")):
        result = run(engine, tmp_path / where, tmp_path / "rows", text=text, max_rejects=0.2)
        found = settled(result, tmp_path / where, len(ROWS))
        both.append(FeatureTable.open(tmp_path / where))
        assert (
            result.rejected
            == both[-1].record.rejected
            == {
                **{
                    f"{name}: NaN, or too large for float32": 1
                    for name in ("plain", "grown", "scaled", "left")
                },
                "sums: NaN, or too large for float32": 2,
                "at: NaN or infinite": 2,
                "much: NaN, below 0, or too large for float32": 1,
            }
        )
        assert len(found) == len(ROWS) - 9
    alike(*both)


# ---- what operators learn


def test_a_row_that_shows_at_once_takes_no_part_in_what_is_learned_and_one_that_shows_later_has(
    tmp_path,
):
    write(tmp_path / "rows", ROWS)
    text = HEAD % ("csv", "", "") + LATE
    table = build_table(None, tmp_path / "t", tmp_path / "rows", text=text, max_rejects=0.2)
    # Five were set aside when they were parsed; three, once the others' spread was known.
    early, late = {"lost", "grown", "inf", "nan", "weight"}, {"far", "near", "sum"}
    assert set(words_of(table, "words/0")) & (early | late) == late
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
    found = settled(result, tmp_path / "t", 111)
    table = FeatureTable.open(tmp_path / "t")
    assert result.rejected == {
        "grown: NaN, or too large for float32": 1,
        "later: NaN, or too large for float32": 2,
    }
    assert sorted(set(range(111)) - found.keys()) == [5, 10, 15]
    told = sorted(
        (json.loads(row["raw"])["row"], "file" in row, "line" in row) for row in rejects_of(table)
    )
    assert told == [(5, False, False), (10, False, False), (15, False, False)]
    words = words_of(table, "words/0")
    assert "10" not in words, "known before anything was learned"
    assert "5" in words


def test_rows_that_are_drawn_and_appends_keep_the_counts(tmp_path):
    """A drawn row that cannot be published is left out; an append applies what was learned, and rejects by that."""
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
    drawn = HEAD % ("csv", "", '[negatives]\ncolumn = "word"\n') + column(
        "rate", "dense", "target, smoothing = 1; scale, by = 2e-39", "word"
    )
    lines = [
        *(f"1,{n},,,b\n" for n in range(30)),
        *(f"{int(n < 32)},{n},,,a\n" for n in range(30, 60)),
    ]
    (tmp_path / "third").write_text("".join(lines))
    result = run(None, tmp_path / "u", tmp_path / "third", text=drawn, max_rejects=1.0)
    assert (result.rows_in, result.rejected) == (60, {"rate: NaN, or too large for float32": 30})
    rows = rows_of(tmp_path / "u")
    # Those of word b are rejected, and so are rows of word b that are drawn for the two clicks of word a.
    assert sorted(int(row["row"]) for row in rows) == list(range(60))
    assert sum(row["label"] for row in rows) == 2
    assert len(rows) == result.rows_out == 60
    assert all(math.isfinite(row["rate"]) for row in rows)


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
        values, lost = converted(pa.array([value], pa.timestamp(unit)), kind)
        assert (values[0].as_py(), lost) == (seconds, None)


@pytest.mark.spark
def test_spark_reads_texts_of_parquet_as_numbers_and_rejects_those_that_are_too_large(
    spark, tmp_path
):
    texts = ["1e400", "-1.7976931348623159e308", "inf", " -Infinity", "1e300", "2.5", None]
    write_rows(
        tmp_path / "rows",
        label=[n % 2 for n in range(7)],
        row=range(7),
        a=texts,
        b=[0.0] * 7,
        word=["w"] * 7,
    )
    text = HEAD % ("parquet", "", "") + column("x", "dense", "fill, value = -1", "a")
    result = run(spark, tmp_path / "t", tmp_path / "rows", text=text, max_rejects=0.9)
    found = settled(result, tmp_path / "t", 7)
    assert result.rejected == {
        "a: not a number of 64 bits": 2,
        "x: NaN, or too large for float32": 1,
    }
    assert {number: row["x"] for number, row in found.items()} == {
        2: -1.0,
        3: -1.0,
        5: 2.5,
        6: -1.0,
    }


def test_of_a_vocabulary_in_files_such_a_number_is_an_error_that_names_the_column(tmp_path):
    """The pass that lists rejected rows has no such vocabulary."""
    np.save(tmp_path / "v.npy", np.array([[1.0], [1.0], [1e39], [2.0]]))
    vectors = f'lookup, width = 1, file = "{tmp_path}/v.npy"'
    chain = ("categorify", vectors, 'bag, of = "sum"', "fill")
    spec = Spec.parse(HEAD % ("csv", "", "") + column("x", "dense", "; ".join(chain), "word"))
    joins = VocabularyJoins.of(spec, ["x/0"])
    assert joins.names == ["x"]
    joins.check_numbers({"x": pa.array([2.0, 1.0], pa.float32())})
    with raises(FeatureError, "column 'x'"):
        joins.check_numbers({"x": pa.array([2.0, math.inf], pa.float32())})


@pytest.mark.parametrize("whole", [2**53 + 1, 2**63 - 1, -(2**63)])
def test_a_whole_number_that_no_float_holds_exactly_is_stored_as_the_nearest(tmp_path, whole):
    write_rows(tmp_path / "rows.parquet", label=[0, 1], row=[whole, 5])
    text = HEAD.replace(', "a:float", "b:float", "word:text"', "") % ("parquet", "", "")
    run(None, tmp_path / "t", tmp_path / "rows.parquet", text=text)
    assert {row["row"] for row in rows_of(tmp_path / "t")} == {
        float(np.float32(whole)),
        5.0,
    }
