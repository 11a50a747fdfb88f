"""Guesses the formats in which the columns of a sample write times: `guess_times`.

`01/05/2026` may be in May or in January, and `20010203` in 2001 or in 2020. If both readings explain a column, other
columns, the texts that are no times, and the order of rows decide. If none of them does, the column has both."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.cells import stored_column
from sluice.etl.ops.timestamps import ParseTime
from sluice.etl.spec.nested_columns import is_text
from sluice.ingest.plain.probe import has_text, is_lost

_YEAR_1990 = 631_152_000
_YEAR_2100 = 4_102_444_800
"""In seconds since 1970."""
_CLOCKS = (
    " %H:%M:%S",
    "T%H:%M:%S",
    "T%H:%M:%SZ",
    " %H:%M",
    "",
    "T%H:%M:%S%z",
    "T%H:%M:%S.%fZ",
    "T%H:%M:%S.%f%z",
    "T%H:%M:%S.%f",
    " %H:%M:%S.%f",
    " %H:%M:%S%z",
    " %H:%M:%S.%f%z",
    " %H:%M:%S %z",
    "T%H:%M",
)
_DAY_FIRST, _MONTH_FIRST = "%d/%m/%Y", "%m/%d/%Y"
_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", _DAY_FIRST, _MONTH_FIRST)
_FORMATS = (*(f"{date}{clock}" for clock in _CLOCKS for date in _DATES), "%d/%b/%Y:%H:%M:%S %z")
"""Formats of times that are written as texts."""
_DIGITS = ("%Y%m%d%H%M%S", "%Y%m%d%H%M", "%Y%m%d%H", "%Y%m%d", "%y%m%d%H")
"""Formats of times that are written as one whole number."""
_MONTHS, _DAYS = "(0?[1-9]|1[0-2])", "(1[3-9]|2[0-9]|3[01])"
_EXAMPLES = 1_000
"""The number of distinct values that show the formats of a column."""
_MOST_FORMATS = 3
_FEW, _DISTINCT = 0.01, 50
"""Of a column of times, at most this share of values, and one in so many distinct values, may be no times."""
_CLEAR = 4
"""Of two readings, one is taken if so many times as much speaks against the other."""
_CHANGES = 5
"""The order of rows is only a reason if the time changes so often."""
_QUOTED = 100  # characters of a value to quote


@dataclass(frozen=True, slots=True)
class TimeReading:
    """How the values of a column are read as times."""

    formats: tuple[str, ...] = ()
    """The formats of texts, or of digits such as 14102100. Empty: the values are numbers or have a type of times."""
    unit: int = 1
    """For numbers: how many units a second has."""

    def seconds(self, values: pa.Array) -> pa.Array:
        """Returns the times in seconds since 1970, null where a value is no time."""
        if self.formats:
            return ParseTime(format=self.formats).apply(values.cast(pa.string()), None)
        return pc.divide(stored_column(values, "float")[0], float(self.unit))

    def times(self, values: pa.Array) -> npt.NDArray[np.float64]:
        """Returns the times in seconds since 1970, NaN where a value is no time."""
        return np.asarray(self.seconds(values).fill_null(math.nan))


@dataclass(frozen=True, slots=True)
class TimeGuess:
    """How a column is best read as times."""

    reading: TimeReading
    other: TimeReading | None = None
    """The reading that would also explain the column."""
    reason: str = ""
    """Why the first of two readings is taken. Empty: nothing decides."""
    example: str = ""
    """Describes a value that has two readings."""

    @property
    def is_open(self) -> bool:
        return self.other is not None and not self.reason


def guess_times(columns: Mapping[str, pa.Array]) -> dict[str, TimeGuess]:
    """Returns a guess for each column that holds times as texts or digits. The columns have the same rows, in their
    order."""
    found = {name: two for name, values in columns.items() if (two := _readings(values))}
    clear = {
        name: reading
        for name, values in columns.items()
        if name not in found and (reading := _reading_by_type(values))
    } | {name: one[0] for name, one in found.items() if len(one) == 1}
    known = {name: reading.times(columns[name]) for name, reading in clear.items()}
    return {
        name: TimeGuess(readings[0])
        if len(readings) == 1
        else _choose(columns[name], readings, clear, known)
        for name, readings in found.items()
    }


def unit_of_times(low: object, high: object) -> int:
    """Returns how many units a second has, if whole numbers in this range may be times since 1970. Otherwise 0."""
    units = (
        unit
        for unit in (1, 10**3, 10**6, 10**9)
        if isinstance(low, int)
        and isinstance(high, int)
        and _YEAR_1990 * unit <= low <= high <= _YEAR_2100 * unit
    )
    return next(units, 0)


def share_of_values(count: int, total: int, example: str) -> str:
    """Returns how many sampled values there are of a kind, with an example."""
    quoted = json.dumps(example[:_QUOTED], ensure_ascii=False)
    return f"{count:,} of {total:,} sampled values, such as {quoted}"


def _readings(values: pa.Array) -> list[TimeReading]:
    """Returns the readings that explain texts or digits: one, two, or none if they are no times."""
    is_whole = pa.types.is_integer(values.type)
    if is_whole:
        if len({len(str(end)) for end in pc.min_max(values).as_py().values()}) > 1:
            return []
    elif not is_text(values.type):
        return []
    texts = values.cast(pa.string())
    several = pc.unique(texts.filter(has_text(texts)))
    if not len(several):
        return []
    places = np.linspace(0, len(several) - 1, min(_EXAMPLES, len(several))).astype(int)
    examples = several.take(pa.array(places))
    if is_whole:
        by_digits = [TimeReading((form,)) for form in _DIGITS]
        return [reading for reading in by_digits if _are_recent(reading.seconds(examples))]
    return [
        reading
        for reading in map(TimeReading, dict.fromkeys(_formats(examples)))
        if is_lost(texts, reading.seconds(texts)).sum() <= _FEW * pc.sum(has_text(texts)).as_py()
    ]


def _are_recent(seconds: pa.Array) -> bool:
    """Whether all of these times are known, and lie between 1990 and 2100."""
    ends = pc.min_max(seconds).as_py()
    return not seconds.null_count and _YEAR_1990 <= ends["min"] <= ends["max"] <= _YEAR_2100


def _formats(examples: pa.Array) -> Iterator[tuple[str, ...]]:
    """Yields the time formats that together read nearly all of these texts, the most frequent first. It yields those
    with the day first and those with the month first. Without slashes, they are the same."""
    read = {
        form: np.asarray(TimeReading((form,)).seconds(examples).is_valid()) for form in _FORMATS
    }
    for other in (_MONTH_FIRST, _DAY_FIRST):
        candidates = [form for form in _FORMATS if not form.startswith(other)]
        left, formats = np.ones(len(examples), bool), list[str]()
        while left.any() and len(formats) < _MOST_FORMATS:
            best = max(candidates, key=lambda form: (read[form] & left).sum())
            if not (read[best] & left).any():
                break
            formats.append(best)
            left &= ~read[best]
        if formats and left.sum() <= max(1, len(examples) // _DISTINCT):
            yield tuple(formats)


def _reading_by_type(values: pa.Array) -> TimeReading | None:
    """Returns the reading of a column whose type or range shows that it holds times."""
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return TimeReading()
    if pa.types.is_integer(values.type):
        unit = unit_of_times(*pc.min_max(values).as_py().values())
        return TimeReading(unit=unit) if unit else None
    return None


def _choose(
    values: pa.Array,
    readings: Sequence[TimeReading],
    clear: Mapping[str, TimeReading],
    known: Mapping[str, npt.NDArray[np.float64]],
) -> TimeGuess:
    """Chooses one of two readings, if anything speaks much more against the other one."""
    times = np.stack([reading.times(values) for reading in readings])
    # In texts such as 05/05/2026, both numbers are equal.
    row = int(np.nanargmax(np.abs(times[0] - times[1])))
    days = dict.fromkeys(
        f"{datetime.datetime.fromtimestamp(both[row], datetime.UTC):%Y-%m-%d}" for both in times
    )
    example = f"{json.dumps(str(values[row]))} may be {' or '.join(days)}"
    for against, reason in _evidence(values, times, clear, known):
        for taken, other in ((0, 1), (1, 0)):
            if _CLEAR * against[taken] < against[other]:
                return TimeGuess(readings[taken], readings[other], reason, example)
    return TimeGuess(readings[0], readings[1], "", example)


def _evidence(
    values: pa.Array,
    times: npt.NDArray[np.float64],
    clear: Mapping[str, TimeReading],
    known: Mapping[str, npt.NDArray[np.float64]],
) -> Iterator[tuple[Sequence[float], str]]:
    """Yields what speaks against each of two readings, as two numbers, with the reason to take the better one. What
    says most comes first. `times` has a row for each reading."""
    there = ~np.isnan(times.sum(0))
    differ = there & (times[0] != times[1])
    gaps = {
        name: np.median(np.abs(times - other)[:, rows], axis=1).tolist()
        for name, other in known.items()
        if (rows := differ & ~np.isnan(other)).any()
    }
    if gaps:
        closest = min(gaps, key=lambda name: min(gaps[name]))
        yield gaps[closest], f"its times are then close to those of column {closest!r}"
    texts = values.cast(pa.string())
    numbers = [
        pc.sum(pc.match_substring_regex(texts, f"^{one}/{two}/[0-9]{{4}}")).as_py() or 0
        for one, two in ((_MONTHS, _DAYS), (_DAYS, _MONTHS))
    ]
    yield numbers, "a few texts have numbers above 12 there"
    steps = np.sign(np.diff(times[:, there]))
    if np.count_nonzero(steps, axis=1).min() >= _CHANGES:
        falls, rises = ((steps == sign).sum(1) for sign in (-1, 1))
        yield np.minimum(falls, rises).tolist(), "its rows are then in the order of time"
    if not is_text(values.type):
        return
    yield (
        [
            sum(any(form.startswith(day) for form in reading.formats) for reading in clear.values())
            for day in (_MONTH_FIRST, _DAY_FIRST)
        ],
        "other columns can only be read in this way",
    )
    spans = np.ptp(times[:, there], axis=1).tolist()
    # Figures of whole months are often dated on their first day.
    wide = times[np.argmax(spans), there].astype("datetime64[s]")
    if (wide.astype("datetime64[D]") != wide.astype("datetime64[M]")).any():
        yield spans, "its times are then closest together"
