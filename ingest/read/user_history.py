"""Adds the histories of a decoded row group's rows, the last events of their users before their own times:
`UserHistories`.

A row sees the events of its own split and of the splits before it in the spec. Histories are views of events:
those of the row group, those that its first user had in earlier row groups, and those that its users had in files of
other splits. So memory holds an event once until batches are made (`sluice.ingest.flow.bags.bag_rows`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import plain
from sluice.etl.ops.hashing import Flags
from sluice.etl.schema import DataFile
from sluice.etl.spec.nested_columns import join_chunks
from sluice.ingest.choices import History, history_name
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.flow.number_types import ValueRefused, arrow_array, filled_numbers
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.read.parquet_files import ParquetFiles

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

_VIEW = 8  # bytes of a row: where its history starts, and its length
_SORT = "Sort the rows by {0.by!r} and, within it, by {0.time!r}, and write the files again"
_EMPTY = "empty values. A history needs a user and a time in each row: remove the others"


class HistoryError(ColumnError):
    """Files or rows that cannot have histories. The message names the file, the column and the value."""


@dataclass(frozen=True, slots=True)
class GroupRange:
    """The smallest and the largest user of a row group, by its footer, and the range of times."""

    at: tuple[int, int]
    """Its file, and its number there."""
    where: str
    rows: int
    low: Any
    high: Any
    times: tuple[Any, ...]
    """The smallest and the largest time, if they are known. They decide only between row groups of one user alone."""

    @classmethod
    def of(cls, at: tuple[int, int], where: str, group: Any, names: Sequence[str]) -> GroupRange:
        """Reads a footer's row group. `names` are the file's names of the users and of the times."""
        chunks = {
            chunk.path_in_schema: chunk.statistics
            for chunk in map(group.column, range(group.num_columns))
        }
        users, times = known = [chunks.get(name) for name in names]
        for name, statistics in zip(names, known, strict=True):
            if statistics is not None and statistics.has_null_count and statistics.null_count:
                raise HistoryError(
                    f"{where}: column {name!r} has {statistics.null_count} " + _EMPTY
                )
        if users is None or not users.has_min_max:
            raise HistoryError(
                f"{where}: the footer has no smallest and largest value of column {names[0]!r}. A history "
                "needs them: write the file with statistics"
            )
        ends = (times.min_raw, times.max_raw) if times and times.has_min_max else ()
        return cls(at, where, group.num_rows, users.min, users.max, ends)


def in_order(ranges: Iterable[GroupRange], history: History) -> list[GroupRange]:
    """Returns row groups in the order of their users. Raises HistoryError if users of two row groups overlap."""
    ordered = sorted(ranges, key=lambda group: (group.low, group.high, group.times, group.at))
    for before, here in pairwise(ordered):
        if before.high > here.low:
            raise HistoryError(
                f"{before.where}: column {history.by!r} ends with {before.high!r}, and {here.where} begins "
                f"with {here.low!r}. " + _SORT.format(history)
            )
    return ordered


@dataclass(frozen=True, slots=True)
class SplitEvents:
    """Row groups of a split in the order of their users, and how to read the columns of the history."""

    groups: Sequence[GroupRange]
    read: Callable[[GroupRange], pa.Table]
    is_own: bool = False
    """Whether a row group that has histories is one of this split, and comes after these."""

    def between(self, low: Any, high: Any) -> Sequence[GroupRange]:
        """Returns the row groups that may have these users."""
        first = bisect_left(self.groups, low, key=lambda group: group.high)
        return self.groups[first : bisect_right(self.groups, high, key=lambda group: group.low)]


class UserHistories:
    """Makes the history columns of row groups. Many threads can use it."""

    def __init__(
        self,
        history: History,
        columns: Columns,
        made: MadeColumns | None,
        other_files: Sequence[Sequence[DataFile]],
    ):
        """`columns` are those of a batch, with the histories. `made` makes the columns that have a history from the
        stored ones. None: they are read as they are stored. `other_files` are those of each earlier split with files of
        its own."""
        self.history = history
        self.other_files = other_files
        self._selection = made.selection if made else None
        self.columns = columns
        self.made = made
        self._kinds: dict[str, Any] = {
            name: columns.value_kind(history_name(name)) for name in history.columns
        }
        self.by, self.time = history.by, history.time
        self.sources = tuple(
            dict.fromkeys((history.by, history.time, *(made.sources if made else history.columns)))
        )
        """The stored columns that it needs."""
        self.fields = [
            pa.field(history_name(name), pa.list_view(pa.from_numpy_dtype(kind)))
            for name, kind in self._kinds.items()
        ]

    def check(self, schema: pa.Schema, path: str) -> None:
        """Raises HistoryError if users or times have a type that cannot be compared exactly."""
        t = pa.types
        users = (t.is_integer, t.is_string, t.is_large_string)
        times = (t.is_integer, t.is_floating, t.is_temporal)
        for name, checks, wanted in (
            (self.by, users, "whole numbers or texts"),
            (self.time, times, "numbers, dates or timestamps"),
        ):
            kind = schema.field(name).type
            if not any(check(kind) for check in checks):
                raise HistoryError(
                    f"{path}: column {name!r} holds {kind}. A history takes {wanted} there"
                )

    def row_bytes(self, group_rows: float, other_events: float) -> float:
        """Returns the bytes of a row's view and event, and its share of the events of earlier row groups and of other
        splits."""
        share = 1 + 2 * self.history.last / max(1.0, group_rows) + other_events
        return _VIEW + 4 * len(self.fields) * share

    def share_of_others(self, own: Iterable[GroupRange], others: Sequence[SplitEvents]) -> float:
        """Returns the most events of other splits that a row group keeps for each of its rows."""
        shares = (
            min(
                self.history.last,
                sum(g.rows for g in other.between(group.low, group.high)) / group.rows,
            )
            for other in others
            for group in own
        )
        return len(others) * max(shares, default=0.0)

    def added(
        self,
        stored: pa.Table,
        earlier: SplitEvents,
        others: Sequence[SplitEvents],
        where: str,
    ) -> pa.Table:
        """Returns a whole row group with the histories of its rows. `earlier` has the row groups before it. `others`
        are earlier splits with files of their own."""
        rows = stored.num_rows
        if not rows:
            for field in self.fields:
                stored = stored.append_column(field, pa.nulls(0, field.type))
            return stored
        keys = _Keys.of(stored, self.history, where)
        of_user = _count(pc.equal(keys.users, keys.users[0]))
        first_user = replace(keys, users=keys.users[:of_user], times=keys.times[:of_user])
        pieces = self._events_of(earlier, first_user, where)
        before_time = sum(_count(pc.less(piece.times, keys.times[0])) for piece in pieces)
        is_visible = self._visible(stored, where)
        numbers = np.flatnonzero(is_visible)
        size = sum(len(piece.users) for piece in pieces)
        pieces.append(self._events(stored, keys, numbers, where))
        order: npt.NDArray[np.int64] | slice = slice(None)
        if others:
            pieces[:0] = [
                piece for other in others for piece in self._events_of(other, keys, where)
            ]
            users, times = (
                pa.concat_arrays([getattr(piece, name) for piece in pieces])
                for name in ("users", "times")
            )
            order, starts, ends = _places(users, times, keys, self.history.last)
        else:
            at = (size + np.cumsum(is_visible) - is_visible).astype(np.int32)
            user_starts = np.maximum.accumulate(np.where(keys.is_new_user, at, 0))
            moments = np.where(keys.is_new_moment, at, 0)
            moments[0] = before_time
            ends = np.maximum.accumulate(moments)
            starts = np.maximum(user_starts, ends - np.int32(self.history.last))
        offsets, sizes = arrow_array(starts), arrow_array(ends - starts)
        columns = zip(*(piece.values for piece in pieces), strict=True)
        for field, values in zip(self.fields, columns, strict=True):
            views = pa.ListViewArray.from_arrays(
                offsets, sizes, arrow_array(np.concatenate(values)[order])
            )
            stored = stored.append_column(field, views)
        return stored

    def joined(self, made: pa.Table, stored: pa.Table) -> pa.Table:
        """Returns the made columns with the histories, which the stored ones have. Columns that only show users and
        times are left out."""
        loaded = made if made is not stored else stored.select(self.columns.names)
        for field in self.fields:
            loaded = loaded.append_column(field, stored.column(field.name))
        return loaded

    def _visible(self, stored: pa.Table, where: str) -> Flags:
        """Whether a row's event may be in histories of this split's rows."""
        if self._selection is None:
            return np.ones(stored.num_rows, bool)
        try:
            return self._selection.up_to(stored)
        except ColumnError as error:
            raise HistoryError(f"{where}: {error}") from error

    def _events_of(self, split: SplitEvents, keys: _Keys, where: str) -> list[_Events]:
        """Returns the events of a split that rows with these keys may have in their histories, in order. The keys of
        rows of the own split are those of one user."""
        first, last = keys.users[0], keys.users[-1]
        lacking = np.full(len(keys.users), self.history.last)
        pieces: list[_Events] = []
        for group in reversed(split.between(first.as_py(), last.as_py())):
            may_have = pc.and_(
                pc.greater_equal(keys.users, group.low), pc.less_equal(keys.users, group.high)
            ).to_numpy(zero_copy_only=False)
            if not (lacking[may_have] > 0).any():
                continue
            table = split.read(group)
            there = _Keys.of(table, self.history, group.where)
            begin = _count(pc.less(there.users, first))
            rows = np.arange(begin, table.num_rows - _count(pc.greater(there.users, last)))
            if split.is_own and len(rows):
                if pc.greater(there.times[rows[-1]], keys.times[0]).as_py():
                    raise HistoryError(
                        f"{group.where}: column {self.time!r} of {self.by} {first.as_py()!r} ends with "
                        f"{there.times[rows[-1]].as_py()!r}, and {where} begins with {keys.times[0].as_py()!r}. "
                        + _SORT.format(self.history)
                    )
                rows = rows[self._visible(table.slice(begin, len(rows)), group.where)]
            at = arrow_array(rows)
            _, starts, ends = _places(
                there.users.take(at), there.times.take(at), keys, self.history.last
            )
            lacking -= ends - starts
            begun = np.bincount(starts, minlength=len(rows) + 1)
            ended = np.bincount(ends, minlength=len(rows) + 1)
            if len(kept := np.flatnonzero(np.cumsum(begun - ended))):
                events = self._events(table, there, rows[kept], group.where)
                # Without the memory of other rows.
                events = replace(events, values=[np.array(value) for value in events.values])
                pieces.insert(0, events)
        return pieces

    def _events(
        self, stored: pa.Table, keys: _Keys, numbers: npt.NDArray[np.int64], where: str
    ) -> _Events:
        """Returns the events of the rows with these numbers."""
        if len(numbers) == stored.num_rows:
            return _Events(keys.users, keys.times, self._values(stored, where, numbers))
        some = stored.select(self.sources).take(numbers)
        users, times = keys.users.take(numbers), keys.times.take(numbers)
        return _Events(users, times, self._values(some, where, numbers))

    def _values(
        self, stored: pa.Table, where: str, row_numbers: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[Any]]:
        """Returns the values of some rows in a batch's types, a column each."""
        try:
            table = stored if self.made is None else self.made.table(stored)
        except ColumnError as error:
            raise HistoryError(f"{where}: {error}") from error.__cause__
        values = []
        for name, kind in self._kinds.items():
            try:
                values.append(
                    filled_numbers(name, table.column(name), kind, self.columns.fill.get(name))
                )
            except ValueRefused as refused:
                raise HistoryError(refused.message(where, name, row_numbers)) from None
        return values


def histories_of(
    history: History | None,
    table: FeatureTable | ParquetFiles,
    split: str,
    columns: Columns,
    make: Callable[[Container[str]], MadeColumns | None],
) -> UserHistories | None:
    """Returns what makes the histories of a split's rows. Raises an error if they cannot be made. `make` returns what
    makes the columns of these names."""
    if history is None:
        return None
    with_histories = columns.with_history(history)
    other_files: list[Sequence[DataFile]] = []
    if not isinstance(table, ParquetFiles) and len(table.splits) > 1:
        rules = table.spec().table
        # No other split has this user's rows.
        if rules.split_by != (history.by,) or rules.unlabelled:
            before = takewhile(lambda name: name != split, rules.split)
            other_files = [table.files_of(name) for name in before if name in table.splits]
    return UserHistories(history, with_histories, make(history.columns), other_files)


@dataclass(frozen=True, slots=True)
class _Events:
    """The users, times and values of some rows. `values` has an array for each column."""

    users: pa.Array
    times: pa.Array
    values: list[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The users and times of a row group, which are in order."""

    users: pa.Array
    times: pa.Array
    is_new_user: Flags
    """Whether a row's user is another one than that of the row before it. False for the first row."""
    is_new_moment: Flags
    """The same for the user or the time."""

    @classmethod
    def of(cls, stored: pa.Table, history: History, where: str) -> _Keys:
        """Raises HistoryError for a row without user or time, and for a row that is not in order."""
        users, times = (
            plain(join_chunks(stored.column(name))) for name in (history.by, history.time)
        )
        for name, values in ((history.by, users), (history.time, times)):
            if empty := _count(pc.is_null(values, nan_is_null=True)):
                raise HistoryError(f"{where}: column {name!r} has {empty} " + _EMPTY)
        same = _compared(pc.equal, users)
        earlier = same & _compared(pc.less, times)
        for name, values, wrong in (
            (history.by, users, _compared(pc.less, users)),
            (history.time, times, earlier),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                raise HistoryError(
                    f"{where}, row {at}: column {name!r} holds {values[at].as_py()!r} after "
                    f"{values[at - 1].as_py()!r}. " + _SORT.format(history)
                )
        is_new_user = ~same
        is_new_moment = is_new_user | ~_compared(pc.equal, times)
        if len(same):
            is_new_user[0] = is_new_moment[0] = False
        return cls(users, times, is_new_user, is_new_moment)


def _places(
    users: pa.Array, times: pa.Array, rows: _Keys, last: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns the order of events by user and time, and where each row's history begins and ends in that order."""
    user, time = (
        pc.rank(pa.concat_arrays(pair), tiebreaker="dense").to_numpy().astype(np.int64)
        for pair in ((users, rows.users), (times, rows.times))
    )
    first_of_user = user * (len(time) + 1)
    moments = first_of_user + time
    order = np.argsort(moments[: len(users)], kind="stable")
    ordered = moments[order]
    ends = np.searchsorted(ordered, moments[len(users) :])
    starts = np.maximum(ends - last, np.searchsorted(ordered, first_of_user[len(users) :]))
    return order, starts.astype(np.int32), ends.astype(np.int32)


def _compared(compare: Any, values: pa.Array) -> Flags:
    """Returns the result of comparing each value with the one before it. False for the first."""
    compared = np.zeros(len(values), bool)
    if len(values):
        compared[1:] = compare(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(
            zero_copy_only=False
        )
    return compared


def _count(flags: pa.Array) -> int:
    return int(pc.sum(flags).as_py() or 0)
