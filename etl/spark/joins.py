"""`relate`: drops duplicates, joins side tables and adds histories, in Spark SQL.

The result does not depend on how Spark partitions the rows, because each order ends in all columns of a row. Rows with
the same time do not see each other. No order goes by the label: see `ties` in `sluice.etl.spec.row_split`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sql

from sluice.etl.spark.columns import SPARK_TYPES, quoted
from sluice.etl.spark.side_tables import SideTable
from sluice.etl.spec.row_rules import Dedup, HistorySpec
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec

_SALTS = 4096


def relate(
    rows: DataFrame,
    spec: Spec,
    sides: Iterable[SideTable],
    earlier: Mapping[str, str],
    *,
    reject_late: bool,
) -> DataFrame:
    """Returns the rows after dedup, joins and histories, in this order. `earlier` has the files from which histories
    continue, by the history's name: the rows then have the column `_late`. With `reject_late`, late rows get no
    histories, and are in none."""
    if spec.rows.dedup:
        rows = _drop_duplicates(rows, spec.rows.dedup)
    for side in sides:
        rows = _add_side_columns(rows, side)
    late = None
    if reject_late and earlier:
        marked = _mark_late(rows, spec, earlier)
        rows, late = marked.where("_late is null"), marked.where("_late is not null")
    for history in spec.rows.histories:
        rows = _add_history(rows, history, spec, earlier.get(history.name))
    if late is not None:
        return rows.unionByName(late, allowMissingColumns=True)
    return _mark_late(rows, spec, earlier) if earlier else rows


def _mark_late(rows: DataFrame, spec: Spec, earlier: Mapping[str, str]) -> DataFrame:
    """Adds `_late`: the first history or lag of which the table has a newer value with the row's key. Null: none."""
    rows = rows.withColumn("_late", sql.lit(None).cast("string"))
    for history in spec.rows.histories:
        stored = rows.sparkSession.read.parquet(earlier[history.name])
        newest = sql.element_at("entries", -1)["at"]
        joined = _join_stored(
            spread_missing_keys(rows, [history.by]), stored, history, newest.alias("_newest")
        )
        is_late = sql.col("_late").isNull() & (sql.col(quoted(history.order)) < sql.col("_newest"))
        rows = joined.withColumn(
            "_late", sql.when(is_late, history.name).otherwise(sql.col("_late"))
        ).select(*map(quoted, rows.columns))
    return rows


def _join_stored(
    rows: DataFrame, stored: DataFrame, history: HistorySpec, column: Column
) -> DataFrame:
    """Adds a column of what an earlier job stored for the key of each row. It is null for keys that are not there."""
    stored = stored.select(sql.col("key").alias("_key"), sql.lit(0).alias("_no_salt"), column)
    is_same = sql.col(quoted(history.by)) == sql.col("_key")
    return rows.join(stored, is_same & (sql.col("_salt") == sql.col("_no_salt")), "left")


def _order_of_ties(rows: DataFrame) -> list[Column]:
    """Returns the order of rows with the same time. Rows that are equal in it are equal in all columns."""
    return [sql.asc_nulls_first(quoted(name)) for name in (*TIES, *rows.columns)]


def _drop_duplicates(rows: DataFrame, how: Dedup) -> DataFrame:
    if not how.by:
        return rows.dropDuplicates()
    turn = sql.asc_nulls_first if how.keep == "first" else sql.desc_nulls_last
    order = [turn(quoted(how.order))] if how.order else []
    window = Window.partitionBy(*map(quoted, how.by)).orderBy(*order, *_order_of_ties(rows))
    return rows.withColumn("_turn", sql.row_number().over(window)).where("_turn = 1").drop("_turn")


def unit_of_time(value: float | None) -> str | None:
    """Returns the unit of a time since 1970, for times from 1973 to 2286. None: it may be no such time."""
    units = {"seconds": 1e8, "milliseconds": 1e11, "microseconds": 1e14, "nanoseconds": 1e17}
    fits = (name for name, low in units.items() if value is not None and low <= value < 100 * low)
    return next(fits, None)


def spread_missing_keys(rows: DataFrame, keys: list[str]) -> DataFrame:
    """Adds a column `_salt`: 0 if a row has all keys, otherwise one of many numbers. A join or window by the keys and
    the salt then does not put all rows without a key into one task."""
    missing = " or ".join(f"{quoted(key)} is null" for key in keys)
    return rows.withColumn(
        "_salt",
        sql.when(sql.expr(missing), sql.monotonically_increasing_id() % _SALTS + 1).otherwise(0),
    )


def _add_side_columns(rows: DataFrame, table: SideTable) -> DataFrame:
    """Returns the rows with the columns of a side table. They are null if it has no row for a key."""
    join, side = table.join, table.rows
    keys = [f"_on{i}" for i in range(len(join.on))]
    added = list(join.columns)
    left = spread_missing_keys(
        rows.select(
            "*",
            *[sql.col(quoted(name)).alias(key) for key, name in zip(keys, join.on, strict=True)],
        ),
        keys,
    )
    if join.time is None:
        # If several side rows have the same key, the largest one is taken, so that no row is doubled.
        newest = side.groupBy(*keys).agg(sql.max(table.ordered).alias("_side"))
        newest = newest.select(
            *keys,
            sql.lit(0).alias("_salt"),
            *[sql.col("_side").getField(name).alias(name) for name in added],
        )
        # Spark does not know the size of what workers read.
        newest = sql.broadcast(newest) if table.way == "broadcast" else newest.hint("merge")
        return left.join(newest, [*keys, "_salt"], "left").drop(*keys, "_salt")
    # Both sides are put into one frame, ordered by time. Each row then takes the last side row before it. A join by
    # ranges of time would compare all pairs of a key.
    ours = left.select(
        "*",
        sql.col(quoted(join.time)).alias("_at"),
        sql.lit(1).alias("_side_first"),
        sql.lit(None)
        .cast(side.select(table.ordered.alias("v")).schema["v"].dataType)
        .alias("_side"),
    )
    theirs = side.select(
        *keys,
        sql.lit(0).alias("_salt"),
        "_at",
        sql.lit(0).alias("_side_first"),
        table.ordered.alias("_side"),
    )
    both = ours.unionByName(theirs, allowMissingColumns=True)
    window = (
        Window.partitionBy(*keys, "_salt")
        .orderBy("_at", "_side_first", "_side")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    seen = both.withColumn("_side", sql.last("_side", ignorenulls=True).over(window)).where(
        "_side_first = 1"
    )
    known = sql.col("_at").isNotNull() & sql.expr(
        " and ".join(f"{key} is not null" for key in keys)
    )
    return seen.select(
        *map(quoted, rows.columns),
        *[sql.when(known, sql.col("_side").getField(name)).alias(name) for name in added],
    )


def newest_first_order(history: HistorySpec, spec: Spec) -> list[Column]:
    """Returns the order of a history, newest first."""
    return [
        sql.desc_nulls_last(quoted(name)) for name in (history.order, *TIES, *spec.input.with_place)
    ]


def enters_history(history: HistorySpec, spec: Spec) -> Column:
    """Returns whether a row's value enters the history. For a lag, every value does."""
    if history.lag:
        return sql.lit(True)
    has_value = sql.col(quoted(history.of)).isNotNull()
    return (sql.col(quoted(spec.label)) == 1) & has_value if history.positive else has_value


def make_entry(history: HistorySpec) -> Column:
    """Returns what a later job must know about a row: its value, and what orders it among other rows."""
    return sql.struct(
        sql.col(quoted(history.order)).alias("at"),
        *TIES,
        sql.col(quoted(history.of)).alias("value"),
    )


def last_elements(values: Column, length: int) -> Column:
    """Returns the last `length` elements of a list."""
    return sql.when(sql.size(values) > length, sql.slice(values, -length, length)).otherwise(values)


def _add_history(
    rows: DataFrame, history: HistorySpec, spec: Spec, earlier: str | None
) -> DataFrame:
    """Returns the rows with a history or a lag as a new column. `earlier` is the path of what an earlier job wrote (see
    `sluice.etl.spark.history_state`), from which the history continues.

    All rows with the same time get what the first of them gets, so that they do not see each other."""
    by, at, value = (sql.col(quoted(name)) for name in (history.by, history.order, history.of))
    names, ties = rows.columns, _order_of_ties(rows.select(*map(quoted, spec.input.with_place)))
    length = history.lag or history.length
    rows = spread_missing_keys(rows, [history.by])
    window = Window.partitionBy(by, "_salt").orderBy(
        sql.asc_nulls_first(quoted(history.order)), *ties
    )
    moment = sql.first("_found").over(Window.partitionBy(by, "_salt", at).orderBy(*ties))
    if history.lag and earlier is None:
        made = rows.withColumn("_found", sql.lag(value, length).over(window)).withColumn(
            "_found", moment
        )
    else:
        # `_before` counts the values before a row that enter the history. A range of `length` of these counts has
        # `length` values, and any number of other rows. `collect_list` drops the nulls of these other rows.
        enters, kept = (
            enters_history(history, spec),
            value if earlier is None else make_entry(history),
        )
        count_before = sql.sum(sql.when(enters, 1).otherwise(0)).over(
            window.rowsBetween(Window.unboundedPreceding, -1)
        )
        frame = Window.partitionBy(by, "_salt").orderBy("_before").rangeBetween(-length, -1)
        made = (
            rows.withColumn("_before", sql.coalesce(count_before, sql.lit(0)))
            .withColumn("_found", sql.collect_list(sql.when(enters, kept)).over(frame))
            .withColumn("_found", moment)
        )
        if earlier is not None:
            made = _continue_history(made, history, earlier)
    has_key = by.isNotNull()
    if history.lag:
        values = sql.when(
            has_key, sql.try_subtract(value, "_found") if history.difference else sql.col("_found")
        )
    else:
        kind = f"array<{SPARK_TYPES[spec.types[history.of]]}>"
        values = sql.when(has_key, sql.col("_found")).otherwise(sql.array()).cast(kind)
    return made.withColumn(history.name, values).select(*map(quoted, names), quoted(history.name))


def _continue_history(rows: DataFrame, history: HistorySpec, earlier: str) -> DataFrame:
    """Replaces the entries in `_found` by the values of the history, or of the lag. Adds the entries of the earlier job
    that are older than the row."""
    kind = rows.schema["_found"].dataType.simpleString()  # a type in which everything may be null
    stored = rows.sparkSession.read.parquet(earlier)
    rows = _join_stored(rows, stored, history, sql.col("entries").cast(kind).alias("_earlier"))
    at, length = sql.col(quoted(history.order)), history.lag or history.length
    before = sql.filter("_earlier", lambda entry: sql.coalesce(entry["at"] < at, at.isNotNull()))
    entries = last_elements(
        sql.sort_array(sql.concat(sql.coalesce(before, sql.array().cast(kind)), "_found")), length
    )
    if history.lag:
        return rows.withColumn("_found", sql.get(entries, sql.size(entries) - length)["value"])
    return rows.withColumn("_found", sql.transform(entries, lambda entry: entry["value"]))
