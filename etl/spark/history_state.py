"""What later rows must know about earlier ones, with Spark: `write_tails`, for serving, and for the next append.

That is the newest values of every key for each history and lag, and the row that counts now for each side table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluice.etl.spark.joins import counted, newest, newest_first, newest_of, side_table
from sluice.etl.spec.row_rules import History
from sluice.etl.table.store import TableStore, folder_of_tails, tail_of_join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sluice.etl.spark.read_input import Raw
    from sluice.etl.spec.spec import Spec

_OPTIONS = {"compression": "zstd", "mapreduce.fileoutputcommitter.algorithm.version": "1",
            "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}


def write_tails(raw: Raw, store: TableStore, job: str) -> None:
    """Writes Parquet files of (key, value), or (key, the side table's columns), to a folder for each history and side
    table."""
    spec, frames = raw.spec, {}
    for number, join in enumerate(spec.rows.joins):
        frames[tail_of_join(number)] = newest_of(side_table(raw.spark, join), join)
    for history in spec.rows.histories:
        frames[history.name] = _tail(raw.frame, history, spec, raw.earlier)
    for name, frame in frames.items():
        frame.write.mode("overwrite").options(**_OPTIONS).parquet(store.spark_url(folder_of_tails(job, name)))


def _tail(rows: DataFrame, history: History, spec: Spec, earlier: Mapping[str, str]) -> DataFrame:
    """The newest values of each key, oldest first; those that were the newest before this job come first."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    most, key = history.lag or history.length, sql.col(f"`{history.by}`")
    turn = sql.row_number().over(Window.partitionBy(key).orderBy(*newest_first(history, spec)))
    last = rows.where(key.isNotNull() & counted(history, spec)).withColumn("_turn", turn).where(
        sql.col("_turn") <= most)
    pair = sql.struct((-sql.col("_turn")).alias("turn"), sql.col(f"`{history.of}`").alias("value"))
    now = last.groupBy(key.alias("key")).agg(sql.sort_array(sql.collect_list(pair))["value"].alias("value"))
    if history.name not in earlier:
        return now
    before = rows.sparkSession.read.parquet(earlier[history.name]).withColumnRenamed("value", "_earlier")
    none = sql.array().cast(now.schema["value"].dataType)
    whole = sql.concat(sql.coalesce("_earlier", none), sql.coalesce("value", none))
    return before.join(now, "key", "full").select("key", newest(whole, most).alias("value"))
