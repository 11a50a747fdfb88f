"""`sum_counts`: counts with Spark what operators learn from, in one pass over the input's rows.

Workers read parsed rows (`sluice.etl.spark.workers.parsed_rows`) and run the operators' own code. They return counts
per batch. Spark adds them up once, and keeps the sums. The driver collects those of the vocabularies that are small
enough. The others are written to files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from sluice.etl.apply.counts import COUNT_ROWS, CountsOfRows, RowCounts, join_batches
from sluice.etl.apply.parse import Batches, InputParser
from sluice.etl.jobs.engine import Sums
from sluice.etl.jobs.fitting import too_many_values
from sluice.etl.ops.base import MAX_VALUES
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.vocabulary.large import Large, may_be_stored
from sluice.etl.spark.workers.last_features import load_features
from sluice.etl.spark.workers.parsed_rows import read_counts, read_rows, with_keys
from sluice.etl.spark.workers.part_of_input import name_part
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import FittedState, Packed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_COUNTS = "key int, value string, count bigint"


def sum_counts(
    raw: RawInput,
    level: int | None,
    state: FittedState,
    wanted: Mapping[int, Learned],
    large: Large,
) -> Sums:
    """Returns the counts that the operators of one level learn from, and the counts of rows. The driver collects them.
    Vocabularies that are too large for the driver are written to files."""
    from pyspark import StorageLevel

    counts = _drop_small_sums(_count_rows(raw, level, state), wanted).persist(
        StorageLevel.DISK_ONLY
    )
    try:
        of_keys = counts.groupBy("key").count().toArrow()
        sizes = dict(zip(of_keys["key"].to_pylist(), of_keys["count"].to_pylist(), strict=True))
        chosen = large.choose(
            sizes, [key for key, learned in wanted.items() if may_be_stored(raw.spec, learned)]
        )
        if sum(size for key, size in sizes.items() if key not in chosen) > MAX_VALUES:
            raise too_many_values(raw.named, MAX_VALUES)
        stored = large.of_level(level or 0).write(
            counts, {key: wanted[key].op for key in chosen}, sum(sizes[key] for key in chosen)
        )
        table = counts.where(~counts["key"].isin(chosen)).toArrow().combine_chunks()
    finally:
        counts.unpersist(blocking=True)
    return Sums(
        table,
        stored,
        None
        if level or not raw.spec.rows.relational
        else RowCounts.of(_add_up(raw.parsed.mapInArrow(partial(read_counts), _COUNTS)).toArrow()),
    )


def _drop_small_sums(counts: DataFrame, wanted: Mapping[int, Learned]) -> DataFrame:
    """Returns the counts without those below their operator's `least`. Operators without one get all, because sums of
    numbers may be negative."""
    from pyspark.sql import functions as sql

    least = sql.lit(-(2**63))
    for number, learned in wanted.items():
        if learned.op.least > 1:
            least = sql.when(sql.col("key") == number, learned.op.least).otherwise(least)
    return counts.where(sql.col("count") >= least)


def _count_rows(raw: RawInput, level: int | None, state: FittedState) -> DataFrame:
    """Returns columns (key, value, count), as `sluice.etl.apply.counts` describes them. Parsing has counted those of
    the first level already, unless the spec has joins or histories."""
    if not level and not raw.spec.rows.relational:
        return _add_up(raw.parsed.select("counts").mapInArrow(partial(read_counts), _COUNTS))
    shipped = raw.spark.sparkContext.broadcast(state.packed())
    return _add_up(
        raw.frame.mapInArrow(
            partial(_count_in_worker, raw.spec, level, lambda: shipped.value), _COUNTS
        )
    )


def _add_up(counts: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sql

    return counts.groupBy("key", "value").agg(sql.sum("count").alias("count"))


@name_part
def _count_in_worker(
    spec: Spec, level: int | None, packed: Callable[[], Packed], batches: Batches
) -> Batches:
    """Counts the values that this level learns from. Runs in a worker."""
    counts = CountsOfRows(spec, level, load_features(spec, packed(), ahead=False)[1])
    if spec.rows.relational:
        parser = InputParser(spec)
        for batch in join_batches(batches, COUNT_ROWS):
            yield from counts.of(parser.parse(batch))
        return
    for rows in join_batches(read_rows(batches), COUNT_ROWS):
        yield from counts.count_selected(*with_keys(rows))
