"""Operators on time: parse_time (text to seconds since 1970, UTC), hour and weekday, each in a zone."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.ops.base import Operator, OperatorError, as_number, as_text, values_of


@dataclass(frozen=True, kw_only=True)
class ParseTime(Operator):
    """Seconds since 1970 of a text such as `14102100` with `format = "%y%m%d%H"`, which is in `zone`; null if it is no
    such time. An hour that the zone's clocks skip or repeat is taken as the earlier one."""

    name: ClassVar[str] = "parse_time"
    takes: ClassVar[tuple[str, ...]] = ("text",)
    gives: ClassVar[str] = "number"
    format: str = "%Y-%m-%d %H:%M:%S"
    zone: str = "UTC"

    def __post_init__(self) -> None:
        if "%" not in self.format:
            raise OperatorError(f"format = {self.format!r}: must hold directives such as %Y-%m-%d")
        _known(self.zone)

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        local = pc.strptime(column, format=self.format, unit="s", error_is_null=True)
        aware = pc.assume_timezone(local, self.zone, ambiguous="earliest", nonexistent="earliest")
        return aware.cast(pa.int64()).cast(pa.float64())


@dataclass(frozen=True, kw_only=True)
class _LocalPart(Operator):
    """What a clock on the wall shows, of seconds since 1970."""

    takes: ClassVar[tuple[str, ...]] = ("number", "row")
    gives: ClassVar[str] = "number"
    part: ClassVar[Callable[..., pa.Array]]
    zone: str = "UTC"

    def __post_init__(self) -> None:
        _known(self.zone)

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        if pa.types.is_struct(column.type):
            return _row_by_zone(column, self.part)
        return self.part(_local(column, self.zone)).cast(pa.float64())


@dataclass(frozen=True, kw_only=True)
class Hour(_LocalPart):
    """Hour of the day, 0 to 23, of seconds since 1970: in `zone`, or, over two columns, in the zone that the second
    names row by row (UTC where it names none). Nulls stay. Summer time is known up to the year 2037."""

    name: ClassVar[str] = "hour"
    part: ClassVar[Callable[..., pa.Array]] = staticmethod(pc.hour)


@dataclass(frozen=True, kw_only=True)
class Weekday(_LocalPart):
    """Day of the week, Monday 0 to Sunday 6, of seconds since 1970 in `zone`. Nulls stay."""

    name: ClassVar[str] = "weekday"
    part: ClassVar[Callable[..., pa.Array]] = staticmethod(pc.day_of_week)


def _known(zone: str) -> None:
    try:
        zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise OperatorError(f"zone = {zone!r}: no such time zone; write for instance Europe/Berlin") from None


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
    missing = pc.is_null(seconds).to_numpy(zero_copy_only=False).copy()
    for zone in pc.unique(zones).to_pylist():
        try:
            zoneinfo.ZoneInfo(zone)
            there = np.flatnonzero(pc.equal(zones, zone).to_numpy(zero_copy_only=False))
            got = take(_local(seconds.take(pa.array(there)), zone))
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            there = np.flatnonzero(pc.equal(zones, zone).to_numpy(zero_copy_only=False))
            got = take(_local(seconds.take(pa.array(there)), "UTC"))
        missing[there] |= pc.is_null(got).to_numpy(zero_copy_only=False)
        result[there] = pc.fill_null(got, 0).to_numpy(zero_copy_only=False)
    return pa.array(result, mask=missing)
