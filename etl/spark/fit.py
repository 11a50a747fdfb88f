"""Learns with Spark: `fit` takes one pass for each level. The workers count, Spark adds up, the driver keeps what is
small.

Workers get lines, or columns, as Arrow batches, parse them and run the operators' own code; they give counts per batch
back to Spark. Operators learn from the training split alone. Counts that only say how many rows there are and where
they are placed (rows, rejects, nulls, partitions, the steps of `table.order`) include all splits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sluice.etl.apply.features import Features, FileAssignment, Keys, in_training, row_keys
from sluice.etl.apply.parse import Batches, InputParser, Parsed
from sluice.etl.apply.unreadable import unread
from sluice.etl.ops.base import MAX_VALUES
from sluice.etl.ops.chain import lifted, shaped
from sluice.etl.ops.lists import flat
from sluice.etl.spark.read_input import InputError, Raw
from sluice.etl.spark.vocabulary.large import Large, extended, may_be_stored
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState, Packed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TRAINING_KEY, _EXAMPLE_KEY, _UNREAD_KEY = -8, -7, -6
_PAIRS_KEY, _PARSED_KEY, _KEPT_KEY, _NULLS_KEY, _REJECT_KEY = -5, -4, -3, -2, -1
_BETWEEN = "\x1f"  # a character that no keyboard types
_COUNT_ROWS = 1 << 18  # the rows that a worker counts before it hands the counts on


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one pass over the input found."""

    parsed: int
    """The number of rows that parse."""
    rows: int
    """The number of rows that filters and samples leave, including those that are drawn."""
    rejected: dict[str, int]
    training: int = 0
    """The number of rows of the training split among those that fitting read, without drawn ones."""
    nulls: dict[str, float] = field(default_factory=dict)
    """The share of missing values in each input column."""
    unread: dict[str, float] = field(default_factory=dict)
    """The share of values that are there but cannot be read, in each column that has operators which read:
    `sluice.etl.apply.unreadable`."""
    examples: dict[str, str] = field(default_factory=dict)
    """An unreadable value of each column that has any."""
    pairs: dict[str, int] = field(default_factory=dict)
    """The number of rows of each split and partition, if the table has these: see
    `sluice.etl.apply.features.FileAssignment`."""

    @classmethod
    def of(cls, table: pa.Table) -> Counted:
        found: dict[int, dict[str, int]] = {}
        for row in table.to_pylist():
            found.setdefault(row["key"], {})[row["value"]] = row["count"]
        parsed = sum(found.get(_PARSED_KEY, {}).values())

        def shares(key: int) -> dict[str, float]:
            return {name: round(count / max(1, parsed), 6) for name, count in sorted(found.get(key, {}).items())}

        examples = sorted((pair.split(_BETWEEN, 1) for pair in found.get(_EXAMPLE_KEY, {})), reverse=True)
        return cls(parsed=parsed, rows=sum(found.get(_KEPT_KEY, {}).values()),
                   rejected=dict(sorted(found.get(_REJECT_KEY, {}).items())),
                   training=sum(found.get(_TRAINING_KEY, {}).values()),
                   nulls=shares(_NULLS_KEY), unread=shares(_UNREAD_KEY), examples=dict(examples),
                   pairs=found.get(_PAIRS_KEY, {}))


def fit(raw: Raw, large: Large | None = None, before: FittedState | None = None) -> tuple[FittedState, Counted]:
    """Takes a pass for each level: returns every fitted operator's state, and the counts of good rows and of rejects by
    reason.

    Vocabularies of more values than `large` says stay in files; without it all are collected. What `before` holds keeps
    its place, and new values follow."""
    spec, counted = raw.spec, None
    tables: dict[str, pa.Table | FileBackedState] = {}
    for level in range(max(1, spec.levels)):
        state = FittedState(spec=spec.fitted_hash, tables=tables)
        wanted = {number: learned for number, learned in enumerate(spec.fitted) if learned.level == level}
        table, stored = _learned_from(raw, partial(_counted, raw, level, state), wanted,
                                      large and large.of_level(level))
        keys = table["key"].to_numpy()
        for number, learned in wanted.items():
            new = stored.get(number)
            if new is None:
                new = learned.op.learn(table.filter(pa.array(keys == number)).drop_columns("key"))
            if before is not None and learned.key in before.tables:
                new = extended(learned.op, before.kept(learned.key), new, large and large.of_level(level), number)
            tables[learned.key] = new
        counted = counted or Counted.of(table.filter(pa.array(keys < 0)))
    assert counted is not None
    state = FittedState(spec=spec.fitted_hash, tables=tables, chains=spec.chains, fitted_on=spec.table.training)
    return state, _with_rejects(raw, counted)


def count(raw: Raw) -> Counted:
    """Only counts good rows and rejects, where nothing is to be fitted."""
    return _with_rejects(raw, Counted.of(_counted(raw, None, FittedState()).toArrow()))


def _with_rejects(raw: Raw, counted: Counted) -> Counted:
    """Adds the rejects: where rows met other rows, those that do not parse were left out before, and are counted
    separately."""
    if not raw.spec.rows.relational:
        return counted
    first = Counted.of(_summed(raw.read().mapInArrow(partial(_parsed_only, raw.spec), _COUNTS)).toArrow())
    return replace(counted, parsed=first.parsed, rejected=first.rejected)


_COUNTS = "key int, value string, count bigint"


def _learned_from(raw: Raw, counted: Callable[[], DataFrame], wanted: Mapping[int, Learned], large: Large | None
                  ) -> tuple[pa.Table, dict[int, FileBackedState]]:
    """What the operators of one level keep of the counts, together with the counts of rows: a table on the driver,
    except for vocabularies that are too large for it, which are written to files."""
    from pyspark import StorageLevel

    may = {number: learned for number, learned in wanted.items() if may_be_stored(raw.spec, learned)}
    most = large.values if large is not None and may else MAX_VALUES
    table = _collected(_kept(counted(), wanted), most)
    stored: dict[int, FileBackedState] = {}
    if table is None and large is not None and may:
        kept = _kept(counted(), wanted).persist(StorageLevel.DISK_ONLY)
        try:
            ops = {number: learned.op for number, learned in may.items()}
            stored = large.written(kept, ops)
            table = _collected(kept.where(~kept["key"].isin(list(stored))), MAX_VALUES)
        finally:
            kept.unpersist()
    if table is None:
        raise InputError(f"{raw.named}: its columns have more than {MAX_VALUES:,} values to keep in all; give the "
                         "largest a min_count or max_size, or hash them; with past = true each moment of a value "
                         "counts: give past_step")
    return table, stored


def _kept(counts: DataFrame, wanted: Mapping[int, Learned]) -> DataFrame:
    """The counts without the sums that are too small for their operators."""
    from pyspark.sql import functions as sql

    least = sql.lit(1)
    for number, learned in wanted.items():
        if learned.op.least > 1:
            least = sql.when(sql.col("key") == number, learned.op.least).otherwise(least)
    return counts.where((sql.col("key") < 0) | (sql.col("count") >= least))


def _collected(kept: DataFrame, most: int) -> pa.Table | None:
    """All rows on the driver; None if there are more than `most`."""
    table: pa.Table = kept.limit(most + 1).toArrow().combine_chunks()
    return table if table.num_rows <= most else None


def _counted(raw: Raw, level: int | None, state: FittedState) -> DataFrame:
    """Returns columns (key, value, count): key is the number of a fitted operator, or what `Counted` reads."""
    shipped = raw.spark.sparkContext.broadcast(state.packed())
    return _summed(raw.frame.mapInArrow(partial(_count, raw.spec, level, lambda: shipped.value), _COUNTS))


def _summed(counts: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sql

    return counts.groupBy("key", "value").agg(sql.sum("count").alias("count"))


def _count(spec: Spec, level: int | None, packed: Callable[[], Packed], batches: Batches) -> Batches:
    """In a worker: counts the values that this level learns from, good rows, and rejects."""
    parser, features = InputParser(spec), Features(spec, FittedState.unpacked(spec.fitted_hash, packed()), ahead=False)
    wanted = [(key, learned) for key, learned in enumerate(spec.fitted) if learned.level == level]
    for batch in gathered(batches, _COUNT_ROWS):
        parsed = parser.parse(batch)
        yield from _of_rows(spec, parsed)
        if not level:
            yield from _of_unread(features, parsed)
        columns, keys = selected(spec, parsed)
        yield _counts(_KEPT_KEY, ["rows"], [_with_drawn(spec, columns)])
        if not len(columns[spec.label]):
            continue
        if spec.table.partition:
            keys = row_keys(columns, spec) if keys is None else keys
            placement = FileAssignment(spec, ())
            pairs = pa.compute.value_counts(placement.paired(placement.split(keys, columns), columns))
            yield _counts(_PAIRS_KEY, pairs.field("values"), pairs.field("counts"))
        for of_all in {learned.op.of_all_splits for _, learned in wanted}:
            chosen, kept = (columns, keys) if of_all else _training(spec, columns, keys)
            if not of_all:
                yield _counts(_TRAINING_KEY, ["rows"], [len(chosen[spec.label])])
            extras = features.extras(chosen, kept)
            for key, learned in wanted:
                if learned.op.of_all_splits == of_all and len(chosen[spec.label]):
                    yield from _of_state(key, learned, lambda column, number: features.run(
                        column, column.ops[:number], chosen, extras), extras)  # noqa: B023  used before the next turn


def _of_state(key: int, learned: Learned, values_of: Callable[..., pa.Array], extras: dict[str, pa.Array]) -> Batches:
    for column, number in learned.users:
        op, values = column.ops[number], values_of(column, number)
        if lifted(op, values):
            values, _ = flat(values)
        names, counts = learned.op.count(shaped(op, values, extras))
        yield _counts(key, names, counts)


def _of_rows(spec: Spec, parsed: Parsed) -> Batches:
    yield _counts(_PARSED_KEY, ["rows"], [parsed.rows])
    nulls = {name: parsed.columns[name].null_count for name in spec.input.columns}
    yield _counts(_NULLS_KEY, list(nulls), list(nulls.values()))
    if parsed.rejected:
        reasons, times = np.unique([reason for _, reason in parsed.rejected], return_counts=True)
        yield _counts(_REJECT_KEY, reasons.tolist(), times)


def _of_unread(features: Features, parsed: Parsed) -> Batches:
    if found := list(unread(features, parsed.columns)):
        yield _counts(_UNREAD_KEY, [name for name, _, _ in found], [count for _, count, _ in found])
        examples = [name + _BETWEEN + example for name, _, example in found if example is not None]
        yield _counts(_EXAMPLE_KEY, examples, [1] * len(examples))


def _parsed_only(spec: Spec, batches: Batches) -> Batches:
    parser = InputParser(spec)
    for batch in batches:
        yield from _of_rows(spec, parser.parse(batch))


def selected(spec: Spec, parsed: Parsed) -> tuple[dict[str, pa.Array], Keys | None]:
    """The rows that filters and the sample leave; also their keys, if the sample had to compute them."""
    columns, rows, keys = parsed.columns, spec.rows, None
    if rows.filters or spec.table.split_column:
        keep = [f.keeps(columns) for f in rows.filters]
        if spec.table.split_column:
            keep.append(pa.compute.is_in(columns[spec.table.split_column].cast(pa.string()),
                                         pa.array(list(spec.table.split))))
        both = functools.reduce(pa.compute.and_, keep)
        columns = {name: values.filter(both) for name, values in columns.items()}
    if rows.sample:
        keys = row_keys(columns, spec)
        keep = rows.sample.keeps(columns[spec.label], keys)
        columns = {name: values.filter(keep) for name, values in columns.items()}
        keys = keys[keep.to_numpy(zero_copy_only=False)]
    return columns, keys


def _training(spec: Spec, columns: dict[str, pa.Array], keys: Keys | None
              ) -> tuple[dict[str, pa.Array], Keys]:
    """The rows of the training split, and their keys."""
    keys = row_keys(columns, spec) if keys is None else keys
    there = in_training(columns, keys, spec)
    if there.all():
        return columns, keys
    mask = pa.array(there)
    return {name: values.filter(mask) for name, values in columns.items()}, keys[there]


def _with_drawn(spec: Spec, columns: dict[str, pa.Array]) -> int:
    label = columns[spec.label]
    drawn = spec.rows.negatives.each * (pa.compute.sum(label).as_py() or 0) if spec.rows.negatives else 0
    return len(label) + int(drawn)


def _counts(key: int, values: pa.Array | list[str], counts: pa.Array | list[int]) -> pa.RecordBatch:
    counts = pa.array(counts) if not isinstance(counts, pa.Array) else counts
    values = pa.array(values, pa.string()) if not isinstance(values, pa.Array) else values
    return pa.record_batch([pa.array(np.full(len(values), key, np.int32)), values, counts.cast(pa.int64())],
                           ["key", "value", "count"])


def gathered(batches: Batches, rows: int) -> Iterator[pa.RecordBatch]:
    """Joins batches to about that many rows: the larger they are, the more equal values a worker counts together."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(b.num_rows for b in held) >= rows:
            yield pa.concat_batches(held)
            held = []
    if held:
        yield pa.concat_batches(held)
