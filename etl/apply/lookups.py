"""`Serving`: adds the columns of joins and histories to a server's rows, as of each row's time. Needs no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import Arrays, key_texts
from sluice.etl.ops.hashing import AnyArray, Flags, Lookup, Whole, hash_texts
from sluice.etl.ops.lists import flat, relisted
from sluice.etl.spec.columns import MODEL_ROLES
from sluice.etl.spec.nested_columns import join_chunks
from sluice.etl.spec.row_rules import HistorySpec, Join
from sluice.etl.spec.spec import Spec
from sluice.etl.table.store import TableStore, folder_of_tails, tail_of_join
from sluice.etl.table.table import FeatureTable, TableError, check_values

Problems = dict[int, str]
"""The number of a row → why it cannot be answered."""


def needed_columns(spec: Spec) -> set[str]:
    """Returns the columns that a model's features are made of, and those that joins and histories need for them."""
    return spec.rows.sources_of(
        name for column in spec.columns if column.role in MODEL_ROLES for name in column.sources
    )


@dataclass(frozen=True)
class _Found:
    """What each row sees of the records of its key."""

    has_key: Flags
    times: pa.Array | None
    """The rows' times. None: each row sees all records."""
    begin: Whole
    """The number of the first record of the row's key."""
    stop: Whole
    """The number of the record after the last one that the row sees."""
    lacks: Flags
    """Whether older records of the key are not in the state."""

    @property
    def counts(self) -> Whole:
        return self.stop - self.begin


@dataclass(frozen=True)
class _Records:
    """The records of one history or side table, key after key. Those of a key are in the order of time."""

    lookup: Lookup
    starts: Whole
    """The number of the first record of each key. The last key is that of all unknown keys. It has no record."""
    lacks: Flags
    """Whether a key had older records, which are not in the state."""
    moments: AnyArray
    """The distinct times of all records, in order."""
    places: Whole
    """For each record: the number of its key, times `len(moments) + 1`, plus the number of its time. Times count from
    1. A missing time is 0, because it comes first."""
    at: pa.Array
    columns: Arrays

    @classmethod
    def of(
        cls,
        keys: pa.Array,
        at: pa.Array,
        columns: Arrays,
        *,
        is_first: Flags | None = None,
        most: int = 0,
    ) -> _Records:
        """Takes records in any order. Those of one key and time stay in their order. `is_first` marks the first record
        that a key ever had. Without it, a key lacks older ones if it has `most` before its last moment."""
        texts = keys.dictionary_encode()
        codes, known = np.asarray(texts.indices, np.int64), len(texts.dictionary)
        moments = np.unique(at.drop_null().to_numpy(zero_copy_only=False))
        numbers = np.searchsorted(moments, at.fill_null(0).to_numpy()) + 1
        places = codes * (len(moments) + 1) + np.where(np.asarray(pc.is_null(at)), 0, numbers)
        order = np.argsort(places, kind="stable")
        places, ends = places[order], np.cumsum(np.bincount(codes, minlength=known + 1))
        first, last = np.concatenate([[0], ends])[:known], places[ends[:known] - 1]
        older = np.searchsorted(places, last) - first
        lacks = older >= most if is_first is None else ~is_first[order][first]
        return cls(
            lookup=Lookup.of(texts.dictionary),
            starts=np.concatenate([[0], ends]),
            lacks=np.append(lacks, False),
            moments=moments,
            places=places,
            at=at.take(pa.array(order)),
            columns={name: values.take(pa.array(order)) for name, values in columns.items()},
        )

    def find(self, keys: pa.Array, times: pa.Array | None, *, same_moment: bool = False) -> _Found:
        """Returns what each row sees: the records of its key before its time, with `same_moment` also those of that
        time. Without `times`, a row sees all of them. A row without a time sees none."""
        has_key = np.asarray(pc.is_valid(keys))
        codes = self.lookup.places(hash_texts(keys)).astype(np.int64)
        codes[(codes < 0) | ~has_key] = len(self.lacks) - 1
        begin, stop = self.starts[codes], self.starts[codes + 1]
        if times is not None:
            side: Literal["left", "right"] = "right" if same_moment else "left"
            number = np.searchsorted(self.moments, times.fill_null(0).to_numpy(), side)
            before = np.searchsorted(self.places, codes * (len(self.moments) + 1) + number, "right")
            stop = np.where(np.asarray(pc.is_null(times)), begin, before)
        return _Found(has_key, times, begin, stop, self.lacks[codes])

    def refuse(
        self, found: _Found, time: str | None, most: int, made: Iterable[str], problems: Problems
    ) -> None:
        """Reports rows with a key but without a time, and those that may see `most` records, of which the state no
        longer has all."""
        if found.times is None:
            return
        names = " and ".join(map(repr, made))
        no_time = np.asarray(pc.is_null(found.times))
        for row in np.flatnonzero(no_time & found.has_key).tolist():
            text = f"feature {time!r} is missing, and {names} must be as of it; send it"
            problems.setdefault(row, text)
        for row in np.flatnonzero(~no_time & found.lacks & (found.counts < most)).tolist():
            since = self.at[found.begin[row] + most - 1]
            text = (
                f"feature {time!r} is {found.times[row]}, and the table's state no longer has what {names} of this "
                f"row's key was then; send a time after {since}"
            )
            problems.setdefault(row, text)


@dataclass(frozen=True)
class Serving:
    """The state of one version's joins and histories, as far as a model's features need it."""

    spec: Spec
    records: Mapping[str, _Records]

    @classmethod
    def open(cls, table: FeatureTable) -> Serving:
        """Raises TableError if the state is not there, or does not tell what a row knows at its time."""
        spec, needed = table.spec(), needed_columns(table.spec())
        check_values(table, spec)
        store, job = TableStore(table.uri), table.record.job if spec.rows.looks_back else ""
        records = {
            tail_of_join(number): _read_side(
                store, folder_of_tails(job, tail_of_join(number)), join
            )
            for number, join in enumerate(spec.rows.joins)
            if needed & join.columns.keys()
        }
        for history in spec.rows.histories:
            if history.name in needed:
                folder = folder_of_tails(job, history.name)
                records[history.name] = _read_history(store, folder, history)
        return cls(spec, records)

    def complete(self, columns: Arrays, problems: Problems) -> dict[str, pa.Array]:
        """Adds the columns that joins and histories make to the rows' input columns, as
        `sluice.etl.apply.features.Features` takes them. Adds the rows to `problems` whose values at their time are not
        known."""
        completed = dict(columns)
        for number, join in enumerate(self.spec.rows.joins):
            if (records := self.records.get(tail_of_join(number))) is None:
                continue
            keys = key_texts([completed[name] for name in join.on])
            found = records.find(keys, self._times(join.time, completed), same_moment=True)
            records.refuse(found, join.time, 1, join.columns, problems)
            places = pa.array(found.stop - 1, mask=found.counts < 1)
            completed |= {name: records.columns[name].take(places) for name in join.columns}
        for history in self.spec.rows.histories:
            if (records := self.records.get(history.name)) is None:
                continue
            keys, most = key_texts([completed[history.by]]), history.lag or history.length
            found = records.find(keys, self._times(history.order, completed))
            records.refuse(found, history.order, most, [history.name], problems)
            completed[history.name] = _look_back(records, found, history, completed)
        return completed

    def _times(self, name: str | None, columns: Arrays) -> pa.Array | None:
        """Returns the rows' times in a column. None: a request is later than all rows of the table, as there is no time
        or it is the row's place in the input."""
        return None if name in (None, self.spec.input.place) else columns[name]


def _look_back(records: _Records, found: _Found, history: HistorySpec, columns: Arrays) -> pa.Array:
    values, most = records.columns["value"], history.lag or history.length
    if not history.lag:
        lengths = np.minimum(found.counts, most)
        places = np.repeat(found.stop - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
        return relisted(values.take(pa.array(places)), lengths)
    before = values.take(pa.array(found.stop - most, mask=found.counts < most))
    return _increase(columns[history.of], before) if history.difference else before


def _increase(now: pa.Array, before: pa.Array) -> pa.Array:
    difference = pc.subtract(now, before)
    if not pa.types.is_integer(now.type):
        return difference
    # If a difference needs more than 64 bits, its sign is wrong.
    signs = pc.bit_wise_and(pc.bit_wise_xor(now, before), pc.bit_wise_xor(now, difference))
    return pc.if_else(pc.less(signs, 0), None, difference)


def keys_of_tail(tail: pa.Table) -> pa.Array:
    """Returns the key of each row. Sluice 0.3 wrote `key` for side tables, too, which may be the name of a column."""
    return join_chunks(tail["_key" if "_key" in tail.column_names else "key"])


def _read(store: TableStore, folder: str, wanted: Sequence[str]) -> tuple[pa.Table, pa.Array]:
    """Returns those of the wanted columns that a state has, and the text of each row's key."""
    tables = []
    for path in store.files(folder):
        if path.endswith(".parquet"):
            tables.append(store.read_table(path, ["_key", "key", *wanted]))
    if not tables:
        raise TableError(
            f"{store.url(folder)}: what serving must know of other rows is not there; was this "
            "version removed by vacuum?"
        )
    table = pa.concat_tables(tables).combine_chunks()
    keys = keys_of_tail(table)
    return table, key_texts(keys.flatten() if pa.types.is_struct(keys.type) else [keys])


def _read_side(store: TableStore, folder: str, join: Join) -> _Records:
    table, keys = _read(store, folder, [*join.columns, "_at", "_is_first"])
    columns = {name: join_chunks(table[name]) for name in join.columns}
    if join.time is None:
        return _Records.of(keys, pa.nulls(len(keys), pa.int64()), columns, most=1)
    if "_at" not in table.column_names:
        raise TableError(
            f"{store.uri}: column {next(iter(columns))!r} comes from {join.path!r} as of a row's {join.time!r}, and "
            "Sluice 0.3 kept only the newest row of each key, so a server cannot know the right one; make the table "
            f"anew from all of its input, and train on it: sluice etl --spec … --output {store.uri} --mode overwrite "
            "--update-state --input …"
        )
    is_first = np.asarray(join_chunks(table["_is_first"]))
    return _Records.of(keys, join_chunks(table["_at"]), columns, is_first=is_first)


def _read_history(store: TableStore, folder: str, history: HistorySpec) -> _Records:
    """A state has the newest entries of a key, at least as many as a row may see before the key's last moment."""
    table, keys = _read(store, folder, ["entries"])
    entries, lengths = flat(join_chunks(table["entries"]))
    of_entry = pa.array(np.repeat(np.arange(len(lengths)), lengths))
    return _Records.of(
        keys.take(of_entry),
        entries.field("at"),
        {"value": entries.field("value")},
        most=history.lag or history.length,
    )
