"""Adds up with Spark what its workers count: `sums_of`, in one pass over the input's rows.

Workers get rows that were parsed (`sluice.etl.spark.workers.parsed_rows`) and run the operators' own code; they give
counts per batch back to Spark, and the driver keeps what is small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from sluice.etl.apply.counts import COUNT_ROWS, CountsOfRows, RowCounts, join_batches
from sluice.etl.apply.parse import Batches, InputParser
from sluice.etl.jobs.engine import Sums
from sluice.etl.jobs.fitting import too_many_values
from sluice.etl.ops.base import MAX_VALUES
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.vocabulary.large import Large, may_be_stored
from sluice.etl.spark.workers.last_features import features_of
from sluice.etl.spark.workers.parsed_rows import counts_of, rows_of, with_keys
from sluice.etl.spark.workers.part_of_input import naming_part
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState, Packed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_COUNTS = "key int, value string, count bigint"


def sums_of(
    raw: RawInput,
    level: int | None,
    state: FittedState,
    wanted: Mapping[int, Learned],
    large: Large,
) -> Sums:
    """What the operators of one level keep of the counts, together with the counts of rows: a table on the driver,
    except for vocabularies that are too large for it, which are written to files."""
    from pyspark import StorageLevel

    may = {
        number: learned for number, learned in wanted.items() if may_be_stored(raw.spec, learned)
    }
    table = _collected(
        _kept(_counted(raw, level, state), wanted), large.values if may else MAX_VALUES
    )
    stored: dict[int, FileBackedState] = {}
    if table is None and may:
        kept = _kept(_counted(raw, level, state), wanted).persist(StorageLevel.DISK_ONLY)
        try:
            ops = {number: learned.op for number, learned in may.items()}
            stored = large.of_level(level or 0).written(kept, ops)
            table = _collected(kept.where(~kept["key"].isin(list(stored))), MAX_VALUES)
        finally:
            kept.unpersist()
    if table is None:
        raise too_many_values(raw.named, MAX_VALUES)
    return Sums(
        table,
        stored,
        None
        if level or not raw.spec.rows.relational
        else RowCounts.of(_summed(raw.parsed.mapInArrow(partial(counts_of), _COUNTS)).toArrow()),
    )


def _kept(counts: DataFrame, wanted: Mapping[int, Learned]) -> DataFrame:
    """The counts without the sums that are too small for their operators. Sums of numbers may be negative: an operator
    that says nothing of a least one is given all."""
    from pyspark.sql import functions as sql

    least = sql.lit(-(2**63))
    for number, learned in wanted.items():
        if learned.op.least > 1:
            least = sql.when(sql.col("key") == number, learned.op.least).otherwise(least)
    return counts.where(sql.col("count") >= least)


def _collected(kept: DataFrame, most: int) -> pa.Table | None:
    """All rows on the driver; None if there are more than `most`."""
    table: pa.Table = kept.limit(most + 1).toArrow().combine_chunks()
    return table if table.num_rows <= most else None


def _counted(raw: RawInput, level: int | None, state: FittedState) -> DataFrame:
    """Returns columns (key, value, count): key is the number of a fitted operator, or what `RowCounts` reads. The first
    level's were counted as the rows were parsed, unless these were to meet other rows first."""
    if not level and not raw.spec.rows.relational:
        return _summed(raw.parsed.select("counts").mapInArrow(partial(counts_of), _COUNTS))
    shipped = raw.spark.sparkContext.broadcast(state.packed())
    return _summed(
        raw.frame.mapInArrow(partial(_count, raw.spec, level, lambda: shipped.value), _COUNTS)
    )


def _summed(counts: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sql

    return counts.groupBy("key", "value").agg(sql.sum("count").alias("count"))


@naming_part
def _count(
    spec: Spec, level: int | None, packed: Callable[[], Packed], batches: Batches
) -> Batches:
    """In a worker: counts the values that this level learns from."""
    counts = CountsOfRows(spec, level, features_of(spec, packed(), ahead=False)[1])
    if spec.rows.relational:
        parser = InputParser(spec)
        for batch in join_batches(batches, COUNT_ROWS):
            yield from counts.of(parser.parse(batch))
        return
    for rows in join_batches(rows_of(batches), COUNT_ROWS):
        yield from counts.count_selected(*with_keys(rows))
