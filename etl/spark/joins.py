"""Relates rows to other rows, in Spark SQL: `relate` drops duplicates, joins side tables, and adds histories.

Each window has a partition, each order ends in all columns of a row, so that the result does not depend on how rows
were spread. Rows of one moment do not see each other, and no order goes by a label: see `ties` in
`sluice.etl.spec.row_split`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sluice.common.errors import InputError
from sluice.etl.spark.table_folders import refuse_tables
from sluice.etl.spec.row_rules import BETWEEN, ESCAPED, Dedup, History, Join
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.job_record import MORE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_BROADCAST_BYTES, _SALTS = 32 * 2**20, 4096
SPARK_TYPES = {
    "int": "bigint",
    "float": "double",
    "text": "string",
    "texts": "array<string>",
    "floats": "array<double>",
}


def relate(rows: DataFrame, spec: Spec, earlier: Mapping[str, str]) -> DataFrame:
    """Returns the rows after dedup, joins and histories, in this order; `earlier` says by name where a history
    continues from."""
    if spec.rows.dedup:
        rows = _dedup(rows, spec.rows.dedup)
    for join in spec.rows.joins:
        rows = _join(rows, join, spec)
    for history in spec.rows.histories:
        rows = _history(rows, history, spec, earlier.get(history.name))
    return rows


def _tied(rows: DataFrame) -> list[Column]:
    """What decides between rows of one moment: rows that agree in all of it are the same row."""
    from pyspark.sql import functions as sql

    return [sql.asc_nulls_first(f"`{name}`") for name in (*TIES, *rows.columns)]


def _dedup(rows: DataFrame, how: Dedup) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    if not how.by:
        return rows.dropDuplicates()
    turn = sql.asc_nulls_first if how.keep == "first" else sql.desc_nulls_last
    order = [turn(f"`{how.order}`")] if how.order else []
    window = Window.partitionBy(*[f"`{name}`" for name in how.by]).orderBy(*order, *_tied(rows))
    return rows.withColumn("_turn", sql.row_number().over(window)).where("_turn = 1").drop("_turn")


def side_table(spark: SparkSession, join: Join) -> DataFrame:
    """The columns of a side table that a join uses, with its keys as text."""
    side = read_side(spark, join)
    return side.select(
        *[side[name].cast("string").alias(f"_on{i}") for i, name in enumerate(join.on)],
        *[
            side[name].try_cast(SPARK_TYPES[kind]).alias(name)
            for name, kind in join.columns.items()
        ],
        *([side[join.their_time].try_cast("double").alias("_since")] if join.their_time else []),
    ).where(" and ".join(f"_on{i} is not null" for i in range(len(join.on))))


def refuse_unread(spark: SparkSession, join: Join, accepted: Container[str]) -> None:
    """Refuses a side table whose times cannot be read, or one with a column in which too many values do not fit its
    type: they would be null in every row that is joined to them."""
    from pyspark.sql import functions as sql

    side, kinds = (
        read_side(spark, join),
        {name: SPARK_TYPES[kind] for name, kind in join.columns.items()},
    )
    kinds |= {join.their_time: "double"} if join.their_time else {}
    lost = {
        name: side[name].isNotNull() & side[name].try_cast(kind).isNull()
        for name, kind in kinds.items()
        if name not in accepted
        and dict(side.dtypes)[name] == "string"
        and kind in ("bigint", "double")
    }
    if not lost:
        return
    counts = [sql.count_if(flag).alias(f"{name}/lost") for name, flag in lost.items()]
    examples = [sql.min(sql.when(flag, side[name])).alias(name) for name, flag in lost.items()]
    row = side.agg(sql.count("*").alias("_rows"), *counts, *examples).collect()[0]
    for name in lost:
        share = row[f"{name}/lost"] / max(1, row["_rows"])
        if row[f"{name}/lost"] and (share >= MORE or name == join.their_time):
            raise InputError(
                f"join.path = {join.path!r}: column {name!r}: {share:.1%} of its values are not of its "
                f"type, {kinds[name]}, for instance {row[name][:100]!r}; nothing was published; mend "
                f"them, or accept that they are null with --accept-nulls {name}"
            )


def read_side(spark: SparkSession, join: Join) -> DataFrame:
    """Reads a side table as it is stored, with all columns that a join uses."""
    from pyspark.errors import AnalysisException, IllegalArgumentException

    try:
        if join.format == "delta":
            from deltalake import DeltaTable

            side = spark.read.option("basePath", join.path).parquet(
                *DeltaTable(join.path).file_uris()
            )
        elif join.format == "csv":
            options = {
                "header": str(not join.fields).lower(),
                "sep": join.delimiter,
                "encoding": join.encoding,
            }
            side = spark.read.options(**options).csv(join.path)
        else:
            side = spark.read.format(join.format).load(join.path)
            refuse_tables(spark, side.inputFiles())
    except (AnalysisException, IllegalArgumentException, OSError) as error:
        raise SpecError(
            f"join.path = {join.path!r}: cannot be read ({str(error).splitlines()[0]})"
        ) from None
    if join.fields:
        if len(side.columns) != len(join.fields):
            raise SpecError(
                f"join.path = {join.path!r}: has {len(side.columns)} columns, and join.fields names "
                f"{len(join.fields)}; name all of them, in order"
            )
        side = side.toDF(*join.fields)
    wanted = [*join.on, *join.columns, *([join.their_time] if join.their_time else [])]
    missing = [name for name in wanted if name not in side.columns]
    if missing:
        raise SpecError(
            f"join.path = {join.path!r}: there is no column {missing[0]!r} (there are: "
            f"{', '.join(side.columns)})"
        )
    return side


def write_until(join: Join, ends: Sequence[float | None], number: str, path: str) -> None:
    """Writes the rows of a join's side table once for each end, as Parquet: those that are not later, with the end's
    number in a column of that name. An end of None leaves out no row."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sql

    spark = SparkSession.active()
    ended = spark.createDataFrame(list(enumerate(ends)), f"{number} bigint, _end double")
    side = read_side(spark, join).crossJoin(ended)
    if join.their_time:
        side = side.where(
            ~sql.coalesce(side[join.their_time].try_cast("double") > side["_end"], sql.lit(False))
        )
    side.drop("_end").write.parquet(path)


def _salted(rows: DataFrame, keys: list[str]) -> DataFrame:
    """Adds a column `_salt`, 0 where there is a key. Rows without a key are spread by it, as they have nothing in
    common: otherwise all of them would be one task's."""
    from pyspark.sql import functions as sql

    missing = " or ".join(f"`{key}` is null" for key in keys)
    return rows.withColumn(
        "_salt",
        sql.when(sql.expr(missing), sql.monotonically_increasing_id() % _SALTS + 1).otherwise(0),
    )


def _join(rows: DataFrame, join: Join, spec: Spec) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    side = side_table(rows.sparkSession, join)
    keys = [f"_on{i}" for i in range(len(join.on))]
    added = list(join.columns)
    left = _salted(
        rows.select(
            "*",
            *[
                sql.col(f"`{name}`").cast("string").alias(key)
                for key, name in zip(keys, join.on, strict=True)
            ],
        ),
        keys,
    )
    if join.time is None:
        # If several rows have one key, the largest counts, so that no row of the input is doubled.
        one = side.groupBy(*keys).agg(sql.max(sql.struct(*added)).alias("_side"))
        one = one.select(
            *keys,
            sql.lit(0).alias("_salt"),
            *[sql.col("_side").getField(name).alias(name) for name in added],
        )
        one = sql.broadcast(one) if joined_by(rows.sparkSession, join) == "broadcast" else one
        return left.join(one, [*keys, "_salt"], "left").drop(*keys, "_salt")
    # Both sides share one column of time: each row takes the last side row before it, without a join of ranges.
    values = sql.struct(*added)
    ours = left.select(
        "*",
        sql.col(f"`{join.time}`").cast("double").alias("_at"),
        sql.lit(1).alias("_side_first"),
        sql.lit(None).cast(side.select(values.alias("v")).schema["v"].dataType).alias("_side"),
    )
    theirs = side.select(
        *keys,
        sql.lit(0).alias("_salt"),
        sql.col("_since").alias("_at"),
        sql.lit(0).alias("_side_first"),
        values.alias("_side"),
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
        *[f"`{name}`" for name in rows.columns],
        *[sql.when(known, sql.col("_side").getField(name)).alias(name) for name in added],
    )


def newest_of(side: DataFrame, join: Join) -> DataFrame:
    """For each key, the side row that counts for all rows still to come; columns `key` and the side table's."""
    from pyspark.sql import functions as sql

    values = sql.struct(*[f"`{name}`" for name in join.columns])
    if join.time is not None:
        side = side.where("_since is not null")
        values = sql.struct("_since", values.alias("_values"))
    parts = [sql.col(f"_on{i}") for i in range(len(join.on))]
    for character, code in ESCAPED.items() if len(parts) > 1 else ():
        parts = [sql.replace(part, sql.lit(character), sql.lit(code)) for part in parts]
    key = sql.concat_ws(BETWEEN, *parts)
    one = side.groupBy(key.alias("key")).agg(sql.max(values).alias("_side"))
    path = "_side._values" if join.time is not None else "_side"
    return one.select("key", *[sql.col(f"{path}.`{name}`").alias(name) for name in join.columns])


def joined_by(spark: SparkSession, join: Join) -> str:
    """`broadcast` for a side table that every worker can hold, otherwise `shuffle`; by its size as Spark estimates
    it."""
    if join.time is not None:
        return "window"
    plan: Any = side_table(spark, join)._jdf.queryExecution().optimizedPlan()
    return "broadcast" if int(str(plan.stats().sizeInBytes())) <= _BROADCAST_BYTES else "shuffle"


def newest_first(history: History, spec: Spec) -> list[Column]:
    """The order of a history, reversed."""
    from pyspark.sql import functions as sql

    return [
        sql.desc_nulls_last(f"`{name}`") for name in (history.order, *TIES, *spec.input.with_place)
    ]


def counted(history: History, spec: Spec) -> Column:
    """Whether a row's value enters the history; with a lag, every row's does."""
    from pyspark.sql import functions as sql

    if history.lag:
        return sql.lit(True)
    there = sql.col(f"`{history.of}`").isNotNull()
    return (sql.col(f"`{spec.label}`") == 1) & there if history.positive else there


def entry(history: History) -> Column:
    """What a later job must know of a row: its value, and where that belongs among those of other rows."""
    from pyspark.sql import functions as sql

    return sql.struct(
        sql.col(f"`{history.order}`").alias("at"), *TIES, sql.col(f"`{history.of}`").alias("value")
    )


def newest(values: Column, length: int) -> Column:
    """The last `length` elements of a list."""
    from pyspark.sql import functions as sql

    return sql.when(sql.size(values) > length, sql.slice(values, -length, length)).otherwise(values)


def _history(rows: DataFrame, history: History, spec: Spec, earlier: str | None) -> DataFrame:
    """Adds a history. `earlier` names what an earlier job's rows left (see `sluice.etl.spark.history_state`): the
    history continues from there. Each row gets what the first row of its moment finds before it, so that rows of one
    moment do not see each other."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    by, at, value = (sql.col(f"`{name}`") for name in (history.by, history.order, history.of))
    names, ties = rows.columns, _tied(rows.select(*spec.input.with_place))
    length = history.lag or history.length
    rows = _salted(rows, [history.by])
    window = Window.partitionBy(by, "_salt").orderBy(
        sql.asc_nulls_first(f"`{history.order}`"), *ties
    )
    moment = sql.first("_found").over(Window.partitionBy(by, "_salt", at).orderBy(*ties))
    if history.lag and earlier is None:
        made = rows.withColumn("_found", sql.lag(value, length).over(window)).withColumn(
            "_found", moment
        )
    else:
        # Rows are numbered by how many values lie before them, so that a frame of `length` numbers holds as many
        # values, however many other rows; these are gathered as null, and nulls are not kept.
        enters, kept = counted(history, spec), value if earlier is None else entry(history)
        lie_before = sql.sum(sql.when(enters, 1).otherwise(0)).over(
            window.rowsBetween(Window.unboundedPreceding, -1)
        )
        frame = Window.partitionBy(by, "_salt").orderBy("_before").rangeBetween(-length, -1)
        made = (
            rows.withColumn("_before", sql.coalesce(lie_before, sql.lit(0)))
            .withColumn("_found", sql.collect_list(sql.when(enters, kept)).over(frame))
            .withColumn("_found", moment)
        )
        if earlier is not None:
            made = _continued(made, history, earlier)
    there = by.isNotNull()
    if history.lag:
        found = sql.when(
            there, value - sql.col("_found") if history.difference else sql.col("_found")
        )
    else:
        kind = {"number": "array<double>"}.get(spec_kind(spec, history.of), "array<string>")
        found = sql.when(there, sql.col("_found")).otherwise(sql.array()).cast(kind)
    return made.withColumn(history.name, found).select(
        *[f"`{name}`" for name in names], f"`{history.name}`"
    )


def _continued(rows: DataFrame, history: History, earlier: str) -> DataFrame:
    """Turns the entries that each row has found into its history, or its lag, together with those of the earlier job
    that lie before its moment."""
    from pyspark.sql import functions as sql

    kind = rows.schema["_found"].dataType.simpleString()  # in which everything may be null
    left = rows.sparkSession.read.parquet(earlier).select(
        sql.col("key").alias("_key"),
        sql.lit(0).alias("_no_salt"),
        sql.col("entries").cast(kind).alias("_earlier"),
    )
    rows = rows.join(
        left,
        (sql.col(f"`{history.by}`") == sql.col("_key")) & (sql.col("_salt") == sql.col("_no_salt")),
        "left",
    )
    at, length = sql.col(f"`{history.order}`"), history.lag or history.length
    before = sql.filter("_earlier", lambda one: sql.coalesce(one["at"] < at, at.isNotNull()))
    whole = newest(
        sql.sort_array(sql.concat(sql.coalesce(before, sql.array().cast(kind)), "_found")), length
    )
    if history.lag:
        return rows.withColumn("_found", sql.get(whole, sql.size(whole) - length)["value"])
    return rows.withColumn("_found", sql.transform(whole, lambda one: one["value"]))


def spec_kind(spec: Spec, name: str) -> str:
    """Whether an input column, or one that a join adds, holds texts or numbers."""
    types = {
        **spec.input.with_place,
        **{n: k for join in spec.rows.joins for n, k in join.columns.items()},
    }
    return "text" if types.get(name) == "text" else "number"
