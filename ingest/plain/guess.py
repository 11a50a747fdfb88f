"""Guesses what the columns of plain Parquet are, by their names, types and what a few rows hold: `proposals`, one for
each column, from which a loader takes its roles, and `sluice guess` writes a spec."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.timestamps import ParseTime
from sluice.ingest.plain.probe import ColumnFacts
from sluice.ingest.plain.roles import GuessError, ParquetError, label_of

LABELS = ("label", "target", "click", "clicked", "y", "is_click", "conversion")
_POSITIVE = ("1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos")
_SHOWN = 5
_WEIGHTS = ("weight", "sample_weight")
_TIMES = re.compile(r"(^|_)(ts|time|timestamp|datetime|unixtime|epoch)(_?(ms|us|ns|s|utc))?$|_at$", re.IGNORECASE)
_USERS = re.compile(r"(^|[._])(user|uid|member|visitor|customer|account|session)(_?id)?$", re.IGNORECASE)
_YEAR_2001, _YEAR_2100 = 10**9, 4_102_444_800  # in seconds since 1970
_UNIQUE, _MANY = 0.95, 1000
"""The share of values that differ, from which on a column names rows, if so many were seen."""
_SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
_IDS = 2**31
_SWAPPED = ("%m/%d/%Y", "%d/%m/%Y")  # in one column, nobody could tell which of the two a date is
_CLOCKS = (" %H:%M:%S", "T%H:%M:%S", "T%H:%M:%SZ", " %H:%M", "", "T%H:%M:%S%z", "T%H:%M:%S.%fZ", "T%H:%M:%S.%f%z",
           "T%H:%M:%S.%f", " %H:%M:%S.%f", " %H:%M:%S%z", " %H:%M:%S.%f%z", " %H:%M:%S %z", "T%H:%M")
_FORMATS = (*(f"{day}{clock}" for clock in _CLOCKS for day in ("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", *_SWAPPED)),
            "%d/%b/%Y:%H:%M:%S %z")
_MOST_FORMATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one column is taken for."""

    name: str
    facts: ColumnFacts
    role: str = ""
    """Empty: it is left out."""
    hash: int | None = None
    """The number of ids to which its values are hashed; None: they are taken as they are."""
    fill: bool = False
    """Whether numbers are missing."""
    time: str = ""
    """For a time: the type in which a spec reads it."""
    formats: tuple[str, ...] = ()
    """For a time as text: how a spec reads it as seconds."""
    unit: int = 1
    """For a time as a whole number: how many of them a second has."""
    why: str = ""
    """Why it is left out."""
    label: str = ""
    """For the label: the name or the comparison by which it was asked for."""


def proposals(facts: Mapping[str, ColumnFacts], rows: int, label: str | None = None, hashed: Iterable[str] = ()
              ) -> dict[str, Proposal]:
    """A proposal for each column. `rows` is how many there are in all; `label` is the label's name, if known; `hashed`
    are the columns that become ids whatever they hold."""
    by_name = {name.lower(): name for name in reversed(list(facts))}
    label = label or next((by_name[n] for n in LABELS if n in by_name), None)
    if label is None:
        raise GuessError(f"no column is called {', '.join(LABELS[:-1])} or {LABELS[-1]}: say which is the label, "
                         "roles=\"label=NAME\", or `sluice guess --label NAME` (columns: "
                         f"{', '.join(list(facts)[:20])})")
    wanted, made = label_of(label, {name: str(one.type) for name, one in facts.items()})
    if wanted not in facts:
        raise ParquetError(f"there is no column {wanted!r} to be the label (columns: {', '.join(list(facts)[:20])})")
    if not made and (texts := _texts(facts[wanted])):
        positive = next((text for text in texts if text.lower() in _POSITIVE), texts[0])
        raise GuessError(f"the label {wanted!r} holds texts ({', '.join(texts[:_SHOWN])}): say which of them is the "
                         f"positive one, roles=\"label={wanted} == {positive}\", or "
                         f"`sluice guess --label '{wanted} == {positive}'`")
    hashed = set(hashed)
    return {name: Proposal(name=name, facts=one, role="label", label=label) if name == wanted else
            Proposal(name=name, facts=one, role="id_list" if _is_list(one.type) else "sparse") if name in hashed else
            _proposal(name, one, rows) for name, one in facts.items()}


def _proposal(name: str, facts: ColumnFacts, rows: int) -> Proposal:
    kind = facts.type.value_type if pa.types.is_dictionary(facts.type) else facts.type
    if name.lower() in _WEIGHTS:
        return Proposal(name=name, facts=facts, role="weight", fill=bool(facts.nulls))
    unseen = facts.nulls and facts.known and facts.low is None and not (facts.values or facts.unusable)
    if pa.types.is_null(kind) or (unseen and not _is_list(kind)):
        return Proposal(name=name, facts=facts, why="no value was seen")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return Proposal(name=name, facts=facts, time="float", why="a time")
    unit = _unit(facts)
    if pa.types.is_integer(kind) and (_TIMES.search(name) or (kind.bit_width >= 32 and unit)):
        return Proposal(name=name, facts=facts, time="int" if unit else "", unit=unit or 1, why="looks like a time")
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind):
        return Proposal(name=name, facts=facts, role="dense", fill=bool(facts.nulls) or facts.unusable)
    role, inner = ("id_list", kind.value_type) if _is_list(kind) else ("sparse", kind)
    if pa.types.is_integer(inner):
        as_they_are = _fits(facts) and (role == "id_list" or not facts.nulls)
        return Proposal(name=name, facts=facts, role=role, hash=None if as_they_are else _size(facts, rows))
    if _is_text(inner):
        if not facts.values:
            return Proposal(name=name, facts=facts, why="text of which nothing was seen; hash= makes ids of it")
        if role == "sparse" and (found := time_formats(facts.examples)):
            return Proposal(name=name, facts=facts, time="text", formats=found, why="a time as text")
        if role == "sparse" and facts.values >= _MANY and facts.distinct >= _UNIQUE * facts.values:
            return Proposal(name=name, facts=facts, why="text that differs in nearly every row")
        return Proposal(name=name, facts=facts, role=role, hash=_size(facts, rows))
    return Proposal(name=name, facts=facts, why=str(facts.type))


def _texts(facts: ColumnFacts) -> list[str]:
    """Some of the texts that a column holds; none if it holds something else."""
    kind = facts.type.value_type if pa.types.is_dictionary(facts.type) else facts.type
    return sorted(facts.examples.cast(pa.string()).to_pylist()) if facts.examples is not None and _is_text(kind) else []


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def time_formats(examples: pa.Array) -> tuple[str, ...]:
    """The formats, that which reads most first, in which all of these texts are times; none if there are no such."""
    left, found = examples.filter(pc.not_equal(examples, "")), list[str]()
    while len(left) and len(found) < _MOST_FORMATS:
        taken = {day for day in _SWAPPED if any(one.startswith(day) for one in found)}
        read = {one: ParseTime(format=one).apply(left, None) for one in _FORMATS
                if not (one.startswith(_SWAPPED) and taken and not one.startswith(tuple(taken)))}
        best = min(read, key=lambda one: read[one].null_count)
        if read[best].null_count == len(left):
            return ()
        found.append(best)
        left = left.filter(pc.is_null(read[best]))
    return () if len(left) else tuple(found)


def _fits(facts: ColumnFacts) -> bool:
    """Whether whole numbers can be ids as they are."""
    return facts.low is None or 0 <= facts.low <= facts.high < _IDS


def _unit(facts: ColumnFacts) -> int:
    """Of how many a second has all of it lies between the years 2001 and 2100: one, a thousand, a million or a billion;
    0 without such."""
    return next((unit for unit in (1, 10**3, 10**6, 10**9) if isinstance(facts.low, int)
                 and _YEAR_2001 * unit <= facts.low <= facts.high <= _YEAR_2100 * unit), 0)


def _size(facts: ColumnFacts, rows: int) -> int:
    """How many ids to hash to: at least four times as many as there seem to be values."""
    share = facts.distinct / max(1, facts.values)
    values = facts.distinct if share < 0.1 else share * max(rows, facts.values)
    return next((size for size in _SIZES if size >= 4 * values), _SIZES[-1])


def user_of(found: Mapping[str, Proposal]) -> str | None:
    """The column by which rows are best split, if one names users."""
    return next((name for name, one in found.items() if _USERS.search(name) and not one.facts.optional), None)
