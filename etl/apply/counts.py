"""Counts the rows of a job, and the values that its operators learn from.

`CountsOfRows` counts the rows of each batch. The counts are rows of `COUNTS`, and an engine adds them up. `RowCounts`
writes and reads those of rows.

Operators learn only from the training split. The counts of rows, rejects, nulls and the steps of
`table.order` include all splits.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.features import Features, in_training
from sluice.etl.apply.parse import Batches, Parsed
from sluice.etl.apply.row_counts import COUNTS, RowCounts
from sluice.etl.ops.base import Arrays, Columns
from sluice.etl.ops.chain import SHOWN, lacks, lifted, prepare_column, reading
from sluice.etl.ops.lists import flat
from sluice.etl.spec.row_split import Keys, row_keys
from sluice.etl.spec.spec import Learned, Spec

KeyedRows = tuple[Columns, Keys]
"""The columns of some rows, and the rows' keys."""
COUNT_ROWS = 1 << 18
"""The number of rows whose values are counted together. In more rows, more values are equal."""
_MOST_BYTES = 64 << 20
"""The most bytes of rows that are processed together."""


class CountsOfRows:
    """Counts rows, and the values that the operators of one level learn from. With a `level` of None it only counts
    rows. If the features have ranges, it only counts the values in these."""

    def __init__(self, spec: Spec, level: int | None, features: Features) -> None:
        self._spec = spec
        self._level = level
        self._features = features
        self._ranges = features.ranges
        self._wanted = [
            (key, learned)
            for key, learned in enumerate(spec.fitted)
            if (learned.key in self._ranges if self._ranges else learned.level == level)
        ]
        self._read = {
            spec.label,
            *(
                name
                for _, learned in self._wanted
                for column, _ in learned.users
                for name in column.sources
            ),
        }
        """The columns that are counted, and the label."""

    def of(self, parsed: Parsed) -> Batches:
        if not self._level:
            yield from self.count_parsed(parsed)
        yield from self.count_selected(*selected(self._spec, parsed))

    def count_parsed(self, parsed: Parsed) -> Batches:
        """Counts all rows of a batch, before any is left out. Only the first pass does this."""
        missed = list(unread(self._features, parsed.columns))
        counts = replace(
            counts_of_parsed(self._spec, parsed),
            unreadable={name: count for name, count, _ in missed},
            examples={name: example for name, _, example in missed if example is not None},
        )
        yield counts.batch()

    def count_selected(self, columns: Columns, keys: Keys) -> Batches:
        """Counts the rows that `selected` kept."""
        spec = self._spec
        label, negatives = columns[spec.label], spec.rows.negatives
        drawn = negatives.each * (pc.sum(label).as_py() or 0) if negatives else 0
        yield RowCounts(rows=len(label) + int(drawn)).batch()
        if not len(label) or not self._wanted:
            return
        of_rows = self._features.extras(columns, keys)
        for of_all in {learned.op.of_all_splits for _, learned in self._wanted}:
            chosen, extras = {name: columns[name] for name in self._read}, of_rows
            if not of_all:
                there = in_training(columns, keys, spec)
                if not there.all():
                    chosen, extras = (
                        {name: values.filter(pa.array(there)) for name, values in some.items()}
                        for some in (chosen, extras)
                    )
                yield RowCounts(training=int(there.sum())).batch()
            for key, learned in self._wanted:
                if learned.op.of_all_splits == of_all and len(chosen[spec.label]):
                    yield from self._of_state(key, learned, chosen, extras)

    def _of_state(
        self,
        key: int,
        learned: Learned,
        columns: Columns,
        extras: Columns,
    ) -> Batches:
        for column, number in learned.users:
            op = column.ops[number]
            values = self._features.run(column, column.ops[:number], columns, extras)
            if lifted(op, values):
                values, _ = flat(values)
            if op.needs or not pa.types.is_dictionary(values.type):
                values = prepare_column(op, values, extras)
            ranges = self._ranges.get(learned.key)
            count = learned.op.count
            if ranges is not None:
                count = functools.partial(learned.op.count_within, ranges=ranges)
            yield _of_operator(key, *count(values))


def _of_operator(key: int, values: pa.Array, counts: pa.Array) -> pa.RecordBatch:
    keys = pa.array(np.full(len(values), key, np.int32))
    return pa.record_batch([keys, values, counts.cast(pa.int64())], schema=COUNTS)


def counts_of_parsed(spec: Spec, parsed: Parsed) -> RowCounts:
    """Counts good rows, missing values, rejects, and after joins the rows without a side row."""
    unmatched = {}
    for number, join in enumerate(spec.rows.joins):
        added = [parsed.columns[name] for name in join.columns if name in parsed.columns]
        if added:
            values = pc.coalesce(*(pc.if_else(pc.is_valid(column), True, None) for column in added))
            unmatched[str(number)] = values.null_count
    return RowCounts(
        parsed=parsed.rows,
        rejected=dict(Counter(reason for _, reason in parsed.rejected)),
        inspected=parsed.rows,
        missing={name: parsed.columns[name].null_count for name in spec.input.columns},
        unmatched=unmatched,
    )


def selected(spec: Spec, parsed: Parsed) -> KeyedRows:
    """Returns the rows that filters and the sample keep, texts with dictionaries, and their keys."""
    columns = parsed.columns
    rows = spec.rows
    keys = None
    if rows.filters or spec.table.split_column:
        keep = [f.keeps(columns) for f in rows.filters]
        if spec.table.split_column:
            keep.append(
                pc.is_in(
                    columns[spec.table.split_column].cast(pa.string()),
                    pa.array(list(spec.table.split)),
                )
            )
        both = functools.reduce(pc.and_, keep)
        columns = {name: values.filter(both) for name, values in columns.items()}
    if rows.sample:
        keys = row_keys(columns, spec)
        keep = rows.sample.keeps(spec.labels(columns), keys)
        columns = {name: values.filter(keep) for name, values in columns.items()}
        keys = keys[keep.to_numpy(zero_copy_only=False)]
    coded = {
        name: values.dictionary_encode() if pa.types.is_string(values.type) else values
        for name, values in columns.items()
    }
    return coded, row_keys(coded, spec) if keys is None else keys


def with_key_column(columns: Arrays, keys: Keys) -> pa.RecordBatch:
    """Returns rows as one batch, with their keys as its last column."""
    return pa.record_batch([*columns.values(), pa.array(keys)], [*columns, "_key"])


def split_keys(rows: pa.RecordBatch) -> KeyedRows:
    """Returns the columns and the keys of a batch that `with_key_column` made."""
    *columns, keys = rows.columns
    return dict(zip(rows.schema.names, columns, strict=False)), keys.to_numpy()


def join_batches(batches: Batches, rows: int) -> Iterator[pa.RecordBatch]:
    """Joins batches to about that many rows, or fewer if they are wide. In larger batches a worker counts more equal
    values together."""
    collected: list[pa.RecordBatch] = []
    for batch in batches:
        collected.append(batch)
        if is_full(collected, rows):
            yield collected[0] if len(collected) == 1 else pa.concat_batches(collected)
            collected = []
    if collected:
        yield pa.concat_batches(collected)


def is_full(collected: list[pa.RecordBatch], rows: int) -> bool:
    """Returns whether batches have that many rows, or are as wide as is processed together."""
    return bool(
        sum(b.num_rows for b in collected) >= rows
        or sum(b.nbytes for b in collected) >= _MOST_BYTES
    )


def unread(features: Features, columns: Arrays) -> Iterator[tuple[str, int, str | None]]:
    """Yields for each column of a batch whose operators read values the number of rows with an unreadable value, and
    such a value."""
    for column in features.spec.columns:
        if not (upto := reading(column.left_to_spark)):
            continue
        given = columns[column.sources[0]]
        bad = pc.and_(
            pc.invert(lacks(given)), lacks(features.run(column, column.ops[:upto], columns, {}))
        )
        count = pc.sum(bad).as_py() or 0
        example = str(given.filter(bad)[0].as_py())[:SHOWN] if count else None
        yield column.name, count, example
