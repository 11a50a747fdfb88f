"""`relate`: drops duplicates, joins side tables and adds histories, in Spark SQL.

The result does not depend on how Spark partitions the rows, because each order ends in all columns of a row. Rows with
the same time do not see each other. No order goes by the label: see `ties` in `sluice.etl.spec.row_split`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from sluice.common.errors import InputError
from sluice.etl.spark.columns import (
    NANOSECONDS,
    SPARK_TYPES,
    cast_column,
    may_lose,
    quoted,
    read_types,
)
from sluice.etl.spark.located_files import FILE, ROW, read_tables
from sluice.etl.spark.table_folders import refuse_tables
from sluice.etl.spec.input_section import TABLES
from sluice.etl.spec.row_rules import Dedup, HistorySpec, Join
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.job_record import MORE
from sluice.etl.table.table_files import TableFiles

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_BROADCAST_BYTES = 32 * 2**20
_SALTS = 4096
_WHOLE = ("tinyint", "smallint", "int", "bigint")


def relate(rows: DataFrame, spec: Spec, earlier: Mapping[str, str]) -> DataFrame:
    """Returns the rows after dedup, joins and histories, in this order. `earlier` has the files from which histories
    continue, by the history's name."""
    if spec.rows.dedup:
        rows = _drop_duplicates(rows, spec.rows.dedup)
    for join in spec.rows.joins:
        rows = _add_side_columns(rows, join, spec)
    for history in spec.rows.histories:
        rows = _add_history(rows, history, spec, earlier.get(history.name))
    return rows


def _order_of_ties(rows: DataFrame) -> list[Column]:
    """Returns the order of rows with the same time. Rows that are equal in it are equal in all columns."""
    from pyspark.sql import functions as sql

    return [sql.asc_nulls_first(quoted(name)) for name in (*TIES, *rows.columns)]


def _drop_duplicates(rows: DataFrame, how: Dedup) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    if not how.by:
        return rows.dropDuplicates()
    turn = sql.asc_nulls_first if how.keep == "first" else sql.desc_nulls_last
    order = [turn(quoted(how.order))] if how.order else []
    window = Window.partitionBy(*map(quoted, how.by)).orderBy(*order, *_order_of_ties(rows))
    return rows.withColumn("_turn", sql.row_number().over(window)).where("_turn = 1").drop("_turn")


def select_side_columns(spark: SparkSession, join: Join, spec: Spec) -> DataFrame:
    """Returns the columns of a side table that a join uses. Its keys `_on0`, `_on1`, and so on have the types of the
    columns that they are compared with."""
    side, stored = read_side(spark, join)
    typed = _cast_side(side, stored, join, spec)
    return side.select(*[column.alias(name) for name, column in typed.items()]).where(
        " and ".join(f"_on{i} is not null" for i in range(len(join.on)))
    )


def _cast_side(
    side: DataFrame, stored: Mapping[str, str], join: Join, spec: Spec
) -> dict[str, Column]:
    """Returns the columns of a side table in the types of the spec, by their new names. `_since` is its time."""
    from pyspark.errors import AnalysisException

    keys = zip(join.their_on or join.on, join.on, strict=True)
    wanted = {f"_on{i}": (name, spec.types[ours]) for i, (name, ours) in enumerate(keys)}
    wanted |= {name: (name, kind) for name, kind in join.columns.items()}
    if join.time and join.their_time:
        # Whole seconds would make a side row valid before its time.
        is_whole = spec.types[join.time] == "int" and stored[join.their_time] in _WHOLE
        wanted["_since"] = (join.their_time, "int" if is_whole else "float")
    typed = {}
    for new, (name, kind) in wanted.items():
        typed[new] = cast_column(_named(join), name, stored[name], kind, join.decimal)
        try:
            side.select(typed[new])
        except AnalysisException:
            raise SpecError(
                f"{_named(join)}: column {name!r} holds {stored[name]}, which is not read as {kind}; write "
                "the column in another type"
            ) from None
    return typed


def check_side_table(spark: SparkSession, join: Join, spec: Spec, accepted: Container[str]) -> None:
    """Raises an InputError if a time of a side table cannot be read, or if too many values of a column do not fit its
    type. These values would be null in all joined rows. `accepted` are columns that are not checked."""
    from pyspark.sql import functions as sql

    side, stored = read_side(spark, join)
    names = {name: name for name in join.columns} | (
        {"_since": join.their_time or ""} if join.time else {}
    )
    typed = _cast_side(side, stored, join, spec)
    kinds = {**join.columns, "_since": "float"}
    lost = {
        name: side[quoted(name)].isNotNull() & typed[new].isNull()
        for new, name in names.items()
        if name not in accepted and may_lose(stored[name], kinds[new])
    }
    if not lost:
        return
    counts = [sql.count_if(flag).alias(f"{name}/lost") for name, flag in lost.items()]
    examples = [
        sql.min(sql.when(flag, side[quoted(name)].cast("string"))).alias(name)
        for name, flag in lost.items()
    ]
    row = side.agg(sql.count("*").alias("_rows"), *counts, *examples).collect()[0]
    for name in lost:
        share = row[f"{name}/lost"] / max(1, row["_rows"])
        if row[f"{name}/lost"] and (share >= MORE or name == join.their_time):
            kind = SPARK_TYPES[join.columns.get(name, "float")]
            raise InputError(
                f"{_named(join)}: column {name!r}: {share:.1%} of its values are not of its "
                f"type, {kind}, for instance {row[name][:100]!r}; nothing was published; "
                f"correct them, or accept that they are null with --accept-nulls {name}"
            )


def _named(join: Join) -> str:
    return f"join.path = {join.path!r}"


def read_side(spark: SparkSession, join: Join) -> tuple[DataFrame, dict[str, str]]:
    """Returns a side table as it is stored, and the types of its columns. Raises a SpecError if a column of the join is
    missing."""
    from pyspark.errors import AnalysisException, IllegalArgumentException

    wanted = {*(join.their_on or join.on), *join.columns, join.their_time} - {None}
    nanoseconds: set[str] = set()
    try:
        if join.format in TABLES:
            table = TableFiles.open(join.path)
            side = read_tables(spark, [table], table.schema.names).drop(FILE, ROW)
        elif join.format == "csv":
            options = {
                "header": str(not join.fields).lower(),
                "sep": join.delimiter,
                "encoding": join.encoding,
            }
            side = spark.read.options(**options).csv(join.path)
        else:
            spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
            side = spark.read.format(join.format).load(join.path)
            files = side.inputFiles()
            refuse_tables(spark, files)
            if join.format == "parquet":
                [types] = read_types(spark, files[:1], {str(name) for name in wanted}).values()
                nanoseconds = {name for name, kind in types.items() if kind == NANOSECONDS}
    except (AnalysisException, IllegalArgumentException, OSError) as error:
        raise SpecError(f"{_named(join)}: cannot be read ({str(error).splitlines()[0]})") from None
    if join.fields:
        if len(side.columns) != len(join.fields):
            raise SpecError(
                f"{_named(join)}: has {len(side.columns)} columns, and join.fields names "
                f"{len(join.fields)}; name all of them, in order"
            )
        side = side.toDF(*join.fields)
    missing = sorted(str(name) for name in wanted if name not in side.columns)
    if missing:
        raise SpecError(
            f"{_named(join)}: there is no column {missing[0]!r} (there are: "
            f"{', '.join(side.columns)})"
        )
    return side, {**dict(side.dtypes), **dict.fromkeys(nanoseconds, NANOSECONDS)}


def unit_of_time(value: float | None) -> str | None:
    """Returns the unit of a time since 1970, for times from 1973 to 2286. None: it may be no such time."""
    units = {"seconds": 1e8, "milliseconds": 1e11, "microseconds": 1e14, "nanoseconds": 1e17}
    fits = (name for name, low in units.items() if value is not None and low <= value < 100 * low)
    return next(fits, None)


def spread_missing_keys(rows: DataFrame, keys: list[str]) -> DataFrame:
    """Adds a column `_salt`: 0 if a row has all keys, otherwise one of many numbers. A join or window by the keys and
    the salt then does not put all rows without a key into one task."""
    from pyspark.sql import functions as sql

    missing = " or ".join(f"{quoted(key)} is null" for key in keys)
    return rows.withColumn(
        "_salt",
        sql.when(sql.expr(missing), sql.monotonically_increasing_id() % _SALTS + 1).otherwise(0),
    )


def _add_side_columns(rows: DataFrame, join: Join, spec: Spec) -> DataFrame:
    """Returns the rows with the columns of a side table. They are null if it has no row for a key."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    side = select_side_columns(rows.sparkSession, join, spec)
    keys = [f"_on{i}" for i in range(len(join.on))]
    added = list(join.columns)
    whole = sql.struct(*map(quoted, added))
    left = spread_missing_keys(
        rows.select(
            "*",
            *[sql.col(quoted(name)).alias(key) for key, name in zip(keys, join.on, strict=True)],
        ),
        keys,
    )
    if join.time is None:
        # If several side rows have the same key, the largest one is taken, so that no row is doubled.
        one = side.groupBy(*keys).agg(sql.max(whole).alias("_side"))
        one = one.select(
            *keys,
            sql.lit(0).alias("_salt"),
            *[sql.col("_side").getField(name).alias(name) for name in added],
        )
        one = sql.broadcast(one) if choose_join(join, side) == "broadcast" else one
        return left.join(one, [*keys, "_salt"], "left").drop(*keys, "_salt")
    # Both sides are put into one frame, ordered by time. Each row then takes the last side row before it. A join by
    # ranges of time would compare all pairs of a key.
    ours = left.select(
        "*",
        sql.col(quoted(join.time)).cast(side.schema["_since"].dataType).alias("_at"),
        sql.lit(1).alias("_side_first"),
        sql.lit(None).cast(side.select(whole.alias("v")).schema["v"].dataType).alias("_side"),
    )
    theirs = side.select(
        *keys,
        sql.lit(0).alias("_salt"),
        sql.col("_since").alias("_at"),
        sql.lit(0).alias("_side_first"),
        whole.alias("_side"),
    )
    both = ours.unionByName(theirs.where("_at is not null"), allowMissingColumns=True)
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


def newest_side_rows(side: DataFrame, join: Join) -> DataFrame:
    """Returns the side row of each key that later rows get, with the columns `key` and those of the side table."""
    from pyspark.sql import functions as sql

    values = sql.struct(*map(quoted, join.columns))
    if join.time is not None:
        side = side.where("_since is not null")
        values = sql.struct("_since", values.alias("_values"))
    parts = [sql.col(f"_on{i}") for i in range(len(join.on))]
    key = parts[0] if len(parts) == 1 else sql.struct(*parts)
    one = side.groupBy(key.alias("key")).agg(sql.max(values).alias("_side"))
    path = "_side._values" if join.time is not None else "_side"
    return one.select(
        "key", *[sql.col(f"{path}.{quoted(name)}").alias(name) for name in join.columns]
    )


def choose_join(join: Join, side: DataFrame) -> str:
    """Returns how a side table is joined: `window` if by time, `broadcast` if it is small, otherwise `shuffle`. The
    size is Spark's estimate."""
    if join.time is not None:
        return "window"
    plan: Any = side._jdf.queryExecution().optimizedPlan()
    return "broadcast" if int(str(plan.stats().sizeInBytes())) <= _BROADCAST_BYTES else "shuffle"


def newest_first_order(history: HistorySpec, spec: Spec) -> list[Column]:
    """Returns the order of a history, newest first."""
    from pyspark.sql import functions as sql

    return [
        sql.desc_nulls_last(quoted(name)) for name in (history.order, *TIES, *spec.input.with_place)
    ]


def enters_history(history: HistorySpec, spec: Spec) -> Column:
    """Returns whether a row's value enters the history. For a lag, every value does."""
    from pyspark.sql import functions as sql

    if history.lag:
        return sql.lit(True)
    has_value = sql.col(quoted(history.of)).isNotNull()
    return (sql.col(quoted(spec.label)) == 1) & has_value if history.positive else has_value


def make_entry(history: HistorySpec) -> Column:
    """Returns what a later job must know about a row: its value, and what orders it among other rows."""
    from pyspark.sql import functions as sql

    return sql.struct(
        sql.col(quoted(history.order)).alias("at"),
        *TIES,
        sql.col(quoted(history.of)).alias("value"),
    )


def last_elements(values: Column, length: int) -> Column:
    """Returns the last `length` elements of a list."""
    from pyspark.sql import functions as sql

    return sql.when(sql.size(values) > length, sql.slice(values, -length, length)).otherwise(values)


def _add_history(
    rows: DataFrame, history: HistorySpec, spec: Spec, earlier: str | None
) -> DataFrame:
    """Returns the rows with a history or a lag as a new column. `earlier` is the path of what an earlier job wrote (see
    `sluice.etl.spark.history_state`), from which the history continues.

    All rows with the same time get what the first of them gets, so that they do not see each other."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

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
        found = sql.when(
            has_key, sql.try_subtract(value, "_found") if history.difference else sql.col("_found")
        )
    else:
        kind = f"array<{SPARK_TYPES[spec.types[history.of]]}>"
        found = sql.when(has_key, sql.col("_found")).otherwise(sql.array()).cast(kind)
    return made.withColumn(history.name, found).select(*map(quoted, names), quoted(history.name))


def _continue_history(rows: DataFrame, history: HistorySpec, earlier: str) -> DataFrame:
    """Replaces the entries in `_found` by the values of the history, or of the lag. Adds the entries of the earlier job
    that are older than the row."""
    from pyspark.sql import functions as sql

    kind = rows.schema["_found"].dataType.simpleString()  # a type in which everything may be null
    stored = rows.sparkSession.read.parquet(earlier).select(
        sql.col("key").alias("_key"),
        sql.lit(0).alias("_no_salt"),
        sql.col("entries").cast(kind).alias("_earlier"),
    )
    rows = rows.join(
        stored,
        (sql.col(quoted(history.by)) == sql.col("_key"))
        & (sql.col("_salt") == sql.col("_no_salt")),
        "left",
    )
    at, length = sql.col(quoted(history.order)), history.lag or history.length
    before = sql.filter("_earlier", lambda one: sql.coalesce(one["at"] < at, at.isNotNull()))
    entries = last_elements(
        sql.sort_array(sql.concat(sql.coalesce(before, sql.array().cast(kind)), "_found")), length
    )
    if history.lag:
        return rows.withColumn("_found", sql.get(entries, sql.size(entries) - length)["value"])
    return rows.withColumn("_found", sql.transform(entries, lambda one: one["value"]))
