"""Operators on time: parse_time (text to seconds since 1970, UTC), hour and weekday, each in a zone."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import Limit, Operator, as_number, as_text, values_of


def _is_known(zone: str) -> bool:
    try:
        zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


Zone = Annotated[str, Limit(_is_known, "no such time zone; write for instance Europe/Berlin")]


@dataclass(frozen=True, kw_only=True)
class ParseTime(Operator):
    """Reads a text such as `14102100` with `format = "%y%m%d%H"`, a time in `zone`, as seconds since 1970; null if it
    is no such time. If there are several formats, the first that fits counts. An hour that the zone's clocks skip or
    repeat is taken as the earlier one. `%S.%f` also reads parts of a second; a format that ends in `%z` reads times
    that say themselves how far they are from UTC."""

    name = "parse_time"
    takes = ("text",)
    reads = True
    format: str | tuple[str, ...] = "%Y-%m-%d %H:%M:%S"
    zone: Zone = "UTC"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._formats or len(set(self._formats)) < len(self._formats):
            raise OperatorError(
                f"format = {list(self._formats)}: must be one format, or several different ones"
            )
        for form in self._formats:
            if "%" not in form:
                raise OperatorError(f"format = {form!r}: must hold directives such as %Y-%m-%d")
            if "%z" in form[:-2] or "%f" in re.sub("%S[.,]%f", "", form):
                raise OperatorError(
                    f"format = {form!r}: %f must follow %S, as in %S.%f, and %z must come last"
                )

    @property
    def _formats(self) -> tuple[str, ...]:
        return (self.format,) if isinstance(self.format, str) else self.format

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return pc.coalesce(*(self._seconds(column, form) for form in self._formats))

    def _seconds(self, column: pa.Array, how: str) -> pa.Array:
        part = 0.0
        if "%f" in how:
            sign = how[how.index("%f") - 1]
            parts = pc.extract_regex(
                column, rf"^(?P<a>.*[0-9]{{2}})[{sign}](?P<part>[0-9]{{1,9}})(?P<b>[^0-9].*)?$"
            )
            part = pc.binary_join_element_wise("0", pc.struct_field(parts, "part"), ".").cast(
                pa.float64()
            )
            column = pc.binary_join_element_wise(
                pc.struct_field(parts, "a"), pc.struct_field(parts, "b"), ""
            )
            how = how.replace(f"{sign}%f", "")
        if how.endswith("%z"):
            local = _parsed(
                pc.replace_substring_regex(column, r"(Z|[+-](0[0-9]|1[0-4])(:?[0-9]{2})?)$", ""),
                how[:-2],
            )
            aware = pc.strptime(column, format=how, unit="s", error_is_null=True)
            aware = pc.if_else(pc.is_valid(local), aware, None)
        else:
            aware = pc.assume_timezone(
                _parsed(column, how), self.zone, ambiguous="earliest", nonexistent="earliest"
            )
        return pc.add(aware.cast(pa.int64()).cast(pa.float64()), part)


_DIGITS = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "y": 2, "j": 3}
_SHORT = {"F": "%Y-%m-%d", "D": "%m/%d/%y", "T": "%H:%M:%S", "R": "%H:%M"}
# The parts in which two texts of the same time may differ: zeros, spaces, and names of days and months.
_WRITTEN = r"\b0+(\d)|\s+|(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*|([a-z]{3})[a-z]*"
_FIRST_YEAR = -30_610_224_000  # the year 1000: a year of fewer digits belongs to another format


def _parsed(column: pa.Array, how: str) -> pa.Array:
    """Returns local times. A text that does not match the format exactly becomes null.

    Arrow alone accepts more. It reads the 31st of February as the 2nd of March, and 24 as a year of four digits. It
    also accepts too few digits for a format without separators."""
    how = re.sub("%([FDTR])", lambda match: _SHORT[match[1]], how)
    local = pc.strptime(column, format=how, unit="s", error_is_null=True)
    wrong = pc.and_(pc.less(local.cast(pa.int64()), _FIRST_YEAR), "%Y" in how)
    directives = re.findall("%(.)", how)
    if set(directives) <= _DIGITS.keys() and not re.sub("%.", "", how):
        wrong = pc.or_(
            wrong, pc.not_equal(pc.utf8_length(column), sum(_DIGITS[d] for d in directives))
        )
    if {"d", "j"} & set(directives) and set(directives) <= {*_DIGITS, *"bBaAIp"}:
        # Arrow makes a day that its month does not have one of the first three of the next month.
        maybe = (
            pc.is_valid(local)
            if "j" in directives
            else pc.fill_null(pc.less_equal(pc.day(local), 3), False)
        )
        early = np.flatnonzero(np.asarray(maybe))
        if len(early):
            text, back = (
                column.take(pa.array(early)),
                pc.strftime(local.take(pa.array(early)), format=how),
            )
            differs = pc.not_equal(
                *(
                    pc.replace_substring_regex(pc.utf8_lower(side), _WRITTEN, r"\1\2")
                    for side in (text, back)
                )
            )
            mask = np.zeros(len(column), bool)
            mask[early] = np.asarray(differs)
            wrong = pc.or_(wrong, pa.array(mask))
    return pc.if_else(wrong, pa.scalar(None, local.type), local)


@dataclass(frozen=True, kw_only=True)
class _LocalPart(Operator):
    """What a clock on the wall shows at a time given as seconds since 1970."""

    takes = ("number", "row")
    reads = True
    part: ClassVar[Callable[..., pa.Array]]
    zone: Zone = "UTC"

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        if pa.types.is_struct(column.type):
            return _row_by_zone(column, self.part)
        return self.part(_local(column, self.zone)).cast(pa.float64())


@dataclass(frozen=True, kw_only=True)
class Hour(_LocalPart):
    """Hour of the day, 0 to 23, of seconds since 1970: in `zone`, or, over two columns, in the zone that the second
    names row by row (UTC if it names none; null if there is no such zone). Nulls stay. Summer time is known up to the
    year 2037."""

    name = "hour"
    part: ClassVar[Callable[..., pa.Array]] = staticmethod(pc.hour)


@dataclass(frozen=True, kw_only=True)
class Weekday(_LocalPart):
    """Day of the week, Monday 0 to Sunday 6, of seconds since 1970 in `zone`. Nulls stay."""

    name = "weekday"
    part: ClassVar[Callable[..., pa.Array]] = staticmethod(pc.day_of_week)


_LATEST = 253_402_300_799.0  # the last second of the year 9999


def _local(column: pa.Array, zone: str) -> pa.Array:
    values, nulls = values_of(column)
    wrong = ~(np.abs(values) <= _LATEST)
    seconds = np.floor(np.where(wrong, 0.0, values)).astype(np.int64)
    mask = wrong if nulls is None else wrong | nulls
    return pa.array(seconds, mask=mask).cast(pa.timestamp("s", "UTC")).cast(pa.timestamp("s", zone))


def _row_by_zone(column: pa.Array, take: Any) -> pa.Array:
    seconds, zones = column.flatten()
    seconds, zones = as_number(seconds), pc.fill_null(as_text(zones), "UTC")
    result = np.zeros(len(column))
    missing = np.asarray(pc.is_null(seconds)).copy()
    for zone in pc.unique(zones).to_pylist():
        there = np.flatnonzero(np.asarray(pc.equal(zones, zone)))
        got = pa.nulls(len(there), pa.int64())
        if _is_known(zone):
            got = take(_local(seconds.take(pa.array(there)), zone))
        missing[there] |= np.asarray(pc.is_null(got))
        result[there] = np.asarray(pc.fill_null(got, 0))
    return pa.array(result, mask=missing)
