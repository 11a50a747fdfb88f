"""`write_tails`: writes what serving and the next append must know about a job's rows.

For each history and lag these are the newest values of every key. For each side table they are the newest rows, if it
has times those of as many times as a server can hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sql

from sluice.etl.spark.columns import quoted
from sluice.etl.spark.joins import (
    enters_history,
    last_elements,
    make_entry,
    newest_first_order,
)
from sluice.etl.spark.large import COMMIT_OPTIONS
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spec.row_rules import HistorySpec
from sluice.etl.spec.spec import Spec
from sluice.etl.table.store import TableStore, folder_of_tails, tail_of_join


def write_tails(raw: RawInput, store: TableStore, job: str) -> None:
    """Writes Parquet files to a folder for each history and side table: see `_tail` and `SideTable.known_rows`."""
    spec = raw.spec
    frames = {tail_of_join(number): side.known_rows() for number, side in enumerate(raw.sides)}
    rows = raw.related
    if raw.reject_late and raw.earlier:
        rows = rows.where("_late is null")
    for history in spec.rows.histories:
        frames[history.name] = _tail(rows, history, spec, raw.earlier)
    for name, frame in frames.items():
        frame.write.mode("overwrite").options(compression="zstd", **COMMIT_OPTIONS).parquet(
            store.spark_url(folder_of_tails(job, name))
        )


def _tail(
    rows: DataFrame, history: HistorySpec, spec: Spec, earlier: Mapping[str, str]
) -> DataFrame:
    """Returns the newest values of each key, oldest first, and the entries for the next append.

    A new row may have the same time as the newest entries, and must not see them. So the entries include as many from
    before that time."""
    most, key = history.lag or history.length, sql.col(quoted(history.by))
    rank = sql.rank().over(
        Window.partitionBy(key).orderBy(sql.desc_nulls_last(quoted(history.order)))
    )
    turn = sql.row_number().over(
        Window.partitionBy(key, "_last").orderBy(*newest_first_order(history, spec))
    )
    last = rows.where(key.isNotNull() & enters_history(history, spec)).withColumn(
        "_last", rank == 1
    )
    last = last.withColumn("_turn", turn).where(sql.col("_turn") <= most)
    now = last.groupBy(key.alias("key")).agg(
        sql.sort_array(sql.collect_list(make_entry(history))).alias("entries")
    )
    if history.name in earlier:
        # In this type everything may be null.
        kind = now.schema["entries"].dataType.simpleString()
        before = rows.sparkSession.read.parquet(earlier[history.name]).select(
            "key", sql.col("entries").cast(kind).alias("_earlier")
        )
        parts = [sql.coalesce(name, sql.array().cast(kind)) for name in ("_earlier", "entries")]
        whole = before.join(now, "key", "full").select(
            "key", sql.sort_array(sql.concat(*parts)).alias("entries")
        )
        moment = sql.element_at("entries", -1)["at"]
        older = sql.filter("entries", lambda entry: ~entry["at"].eqNullSafe(moment))
        same = sql.filter("entries", lambda entry: entry["at"].eqNullSafe(moment))
        now = whole.select(
            "key",
            sql.concat(last_elements(older, most), last_elements(same, most)).alias("entries"),
        )
    return now.select(
        "key",
        sql.transform(last_elements(sql.col("entries"), most), lambda entry: entry["value"]).alias(
            "value"
        ),
        "entries",
    )
