"""Times since 1970 are recognised by their values, and a column without known values is no time. Where a text has two
readings as a time, other columns, misfits and the order of rows decide, or the spec has both."""

import datetime
from datetime import UTC

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import csv

from sluice.ingest.plain.time_guess import guess_times, unit_of_times
from sluice.tools.guess import main
from tests.product import Spec, facts_of, proposals
from tests.raises import assert_names

UNITS = (1, 10**3, 10**6, 10**9)


@pytest.mark.parametrize("has_statistics", [True, False])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    unit=st.sampled_from(UNITS),
    seconds=st.lists(st.none() | st.integers(1_000_000_000, 2_000_000_000), min_size=2, max_size=9),
)
def test_whole_numbers_are_times_if_they_are_known_to_lie_in_a_unit(
    tmp_path, has_statistics, unit, seconds
):
    values = [None if at is None else at * unit for at in seconds]
    whole, clicks = pa.array(values, pa.int64()), [0, 1] + [0] * (len(values) - 2)
    table = pa.table({"x": whole, "event_time": whole, "click": clicks})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2, write_statistics=has_statistics)
    facts, rows, _, _ = facts_of(str(tmp_path))
    proposed = proposals(facts, rows)
    units = {name: one.guess.reading.unit for name, one in proposed.items() if one.guess}
    times = {name for name, one in proposed.items() if one.role == "time"}
    known = [at for at in seconds if at]
    assert units == dict.fromkeys(times, unit)
    assert proposed["event_time"].role == ("time" if known else "")
    is_known = known and max(known) >= min(known) + 3600
    assert ("x" in times) is bool(is_known)


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_known_from_1990_to_2100_and_not_one_beyond(unit):
    low, high = (
        int(datetime.datetime(year, 1, 1, tzinfo=UTC).timestamp()) * unit for year in (1990, 2100)
    )
    assert {unit_of_times(*ends) for ends in ((low, low), (low, high), (high, high))} == {unit}
    assert unit_of_times(low - 1, high) == unit_of_times(low, high + 1) == 0


@pytest.mark.parametrize(
    ("words", "values", "is_time"),
    [(1, 100, True), (1, 99, False), (2, 200, True), (3, 300, False)],
)
def test_a_hundredth_of_the_values_and_a_fiftieth_of_the_distinct_ones_may_be_no_times(
    words, values, is_time
):
    """Of 100 distinct values, of which some are words."""
    days = [f"2026-{1 + n // 28:02}-{1 + n % 28:02}" for n in range(100 - words)]
    texts = [*(f"word {n}" for n in range(words)), *days * 4][:values]
    assert ("at" in guess_times({"at": pa.array(texts)})) is is_time


NEAR = ("iso", "seconds", "milliseconds", "timestamp", "date")
SILENT = ("birthday", "alike", "none")
DAY, MONTH = "%d/%m/%Y", "%m/%d/%Y"


def columns_of(
    form: str, days: list[datetime.date], evidence: str, clock: str
) -> dict[str, pa.Array]:
    """Columns with dates in `form`, and what shows how they are meant."""
    texts = [f"{day:{form}}{clock}" for day in days]
    seconds = [
        int(datetime.datetime.combine(day, datetime.time(12), UTC).timestamp()) for day in days
    ]
    others = {
        "iso": [f"{day + datetime.timedelta(2)}" for day in days],
        "seconds": seconds,
        "milliseconds": [at * 1000 for at in seconds],
        "timestamp": pa.array(seconds, pa.timestamp("s")),
        "date": pa.array(days),
        "sibling": [f"{datetime.date(2019, 3, 13 + n % 15):{form}}" for n in range(len(days))],
        # Neither says anything: one is far away, and one has the same dates in the same way.
        "birthday": [f"19{50 + n % 49}-0{1 + n % 9}-20" for n in range(len(days))],
        "alike": texts,
    }
    if evidence == "misfit":
        texts = [*texts * 2, "31/02/2026" if form == DAY else "02/31/2026"]
    columns = {"at": pa.array(texts)}
    if evidence in others:
        columns["other"] = pa.array(others[evidence])
    return columns


@settings(max_examples=30, deadline=None)
@given(
    form=st.sampled_from((DAY, MONTH)),
    evidence=st.sampled_from([*NEAR, "sibling", "misfit", "order", *SILENT]),
    clock=st.sampled_from(("", " 10:00", "T10:00:07")),
    month=st.integers(1, 12),
    numbers=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
def test_a_day_is_never_taken_for_a_month_and_other_columns_misfits_and_order_tell_them_apart(
    form, evidence, clock, month, numbers
):
    """A guess is right, or it has both readings."""
    days = [datetime.date(2026, month, number) for number in numbers for _ in range(60)]
    if evidence == "order":
        days = [
            datetime.date(2026, *of) for of in ((4, 10), (4, 11), (4, 12), (5, 1), (5, 2), (5, 3))
        ]
        days = days[::-1] if numbers[0] % 2 else days
    columns = columns_of(form, days, evidence, clock)
    guess = guess_times(columns)["at"]
    both = {f"{DAY}{clock_format(clock)}", f"{MONTH}{clock_format(clock)}"}
    assert guess.other is not None
    assert {*guess.reading.formats, *guess.other.formats} == both
    differ = {day for day in days if day.day != day.month}
    if not guess.is_open:
        assert guess.reading.formats == (f"{form}{clock_format(clock)}",), guess.reason
    else:
        assert evidence in SILENT or (evidence in NEAR and not differ), guess.example
    assert guess.is_open or len({*days}) > 1 or evidence not in SILENT


def clock_format(clock: str) -> str:
    return {"": "", " 10:00": " %H:%M", "T10:00:07": "T%H:%M:%S"}[clock]


@pytest.mark.parametrize("is_text", [True, False])
def test_where_two_readings_remain_the_spec_has_both_and_makes_no_column_of_them(
    tmp_path, capfd, is_text
):
    rows = {"at": ["01/05/2026 10:00"] * 40, "n": [*range(40)], "click": [0, 1] * 20}
    path = tmp_path / ("a.csv" if is_text else "a.parquet")
    (csv.write_csv if is_text else pq.write_table)(pa.table(rows), path)
    out = tmp_path / "a.toml"
    main([str(path), "--out", str(out)])
    text = out.read_text()
    day, month = (f'format = "{form} %H:%M"' for form in (DAY, MONTH))
    shown = '"01/05/2026 10:00" may be 2026-05-01 or 2026-01-05'
    assert_names(text, day, month, shown)
    assert_names(capfd.readouterr().err, "at", shown, "nothing in the sample decides")
    spec = Spec.own(text)
    assert {column.name for column in spec.columns} == {"n", "click"}
    assert not spec.input.times
    if is_text:  # the line from the comment, in place of the column
        line = next(line for line in text.splitlines() if day in line).removeprefix("#   ")
        assert Spec.own(text.replace('"at:text"', line)).input.times["at"].format == f"{DAY} %H:%M"


def test_a_reading_that_was_chosen_is_in_the_spec_with_the_reason(tmp_path, capfd):
    lines = ["01/05/2026 10:00,2026-05-01,0", "01/05/2026 11:00,2026-05-01,1"] * 20
    (tmp_path / "a.csv").write_text("\n".join(["at,day,click", *lines]))
    main([str(tmp_path / "a.csv")])
    printed = capfd.readouterr()
    spec = Spec.own(printed.out)
    assert spec.input.times["at"].format == f"{DAY} %H:%M"
    assert_names(printed.out, "# string, 2026-05-01 10:00 to 2026-05-01 11:00, 2 different")
    for text in (printed.out, printed.err):
        assert_names(text, "01/05/2026", "2026-01-05", f"{MONTH} %H:%M", "column 'day'")


@pytest.mark.parametrize(("other", "form"), [(2009, "%Y%m%d"), (2020, "%y%m%d%H"), (1990, None)])
def test_digits_with_two_readings_are_chosen_by_other_columns_too(other, form):
    digits = [int(f"2009051{n}") for n in range(5)] * 9  # 2009-05-1n, or 2020-09-05 at 1n o'clock
    near = datetime.datetime(other, 7, 1)
    guess = guess_times({"at": pa.array(digits), "other": pa.array([near] * len(digits))})["at"]
    assert guess.is_open is (form is None)
    assert form is None or guess.reading.formats == (form,)
