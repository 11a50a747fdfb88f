"""Reads Parquet files with Spark as the columns of a table: `read_tables`. `with_constants` adds the columns that have
one value for a whole file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING
from urllib.parse import unquote

from sluice.common.errors import InputError
from sluice.etl.spark.columns import quoted
from sluice.etl.table.table_columns import FileColumns
from sluice.etl.table.table_files import TableFiles

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

FILE, ROW = "_file", "_at"
"""A row's file as Spark writes it, and its number there."""


def read_tables(
    spark: SparkSession, tables: Sequence[TableFiles], wanted: Collection[str]
) -> DataFrame:
    """Returns those wanted columns that the tables have, with `FILE` and `ROW`."""
    frames = [frame for table in tables for frame in _frames(spark, table, wanted)]
    if not frames:
        raise InputError(f"{', '.join(table.name for table in tables)}: holds no rows")
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)


def _frames(spark: SparkSession, table: TableFiles, wanted: Collection[str]) -> Iterable[DataFrame]:
    """Yields a frame for the files in which the columns have the same names."""
    from pyspark.sql import functions as sql
    from pyspark.sql.types import StructField, StructType

    groups: dict[tuple[tuple[str, str], ...], dict[str, FileColumns]] = {}
    for path, columns in table.columns.items():
        names = {name: own for name, own in (columns.names or {}).items() if name in wanted}
        groups.setdefault(tuple(names.items()), {})[path] = columns.of(wanted)
    for renamed, files in groups.items():
        types = {name: _spark_type(table, name) for name, _ in renamed}
        schema = StructType([StructField(own, types[name]) for name, own in renamed])
        frame = spark.read.schema(schema).parquet(*map(_hadoop_name, files))
        frame = frame.select(
            *(sql.col(quoted(own)).alias(name) for name, own in renamed),
            *metadata(),
        )
        yield with_constants(frame, files)


def with_constants(frame: DataFrame, files: Mapping[str, FileColumns]) -> DataFrame:
    """Adds the columns that have one value for a whole file. The frame has `FILE`."""
    from pyspark.sql import functions as sql
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StringType, StructField, StructType

    names = ((_hadoop_name(path), columns) for path, columns in files.items())
    located = {
        name if "://" in name else f"file://{name}": columns.constants for name, columns in names
    }
    first = next(iter(located.values()))
    if not first:
        return frame
    # In rows, Spark names a local file with one slash.
    rows = [
        (
            uri.replace("file:///", "file:/"),
            tuple(one.as_py() for one in located[unquote(uri)].values()),
        )
        for uri in frame.inputFiles()
    ]
    values = StructType(
        [
            StructField(n, from_arrow_type(one.type, prefer_timestamp_ntz=True))
            for n, one in first.items()
        ]
    )
    schema = StructType([StructField("_of", StringType()), StructField("_values", values)])
    constants = sql.broadcast(frame.sparkSession.createDataFrame(rows, schema))
    found = frame.join(constants, frame[FILE] == constants["_of"], "left")
    lost = sql.raise_error(sql.concat(sql.lit("no partition is known of the file "), found[FILE]))
    return found.select(
        *(found[quoted(name)] for name in frame.columns),
        *(
            sql.when(sql.col("_values").isNull(), lost)
            .otherwise(sql.col("_values").getField(name))
            .alias(name)
            for name in first
        ),
    )


def metadata() -> tuple[Column, Column]:
    """Returns `FILE` and `ROW` of a frame that was just read from Parquet."""
    from pyspark.sql import functions as sql

    return sql.col("_metadata.file_path").alias(FILE), sql.col("_metadata.row_index").alias(ROW)


def _spark_type(table: TableFiles, name: str) -> DataType:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type

    kind = table.schema.field(name).type
    try:
        return from_arrow_type(kind, prefer_timestamp_ntz=True)
    except PySparkException:
        raise InputError(
            f"{table.uri}: column {name!r} holds {kind}, which Spark does not read; run the job with "
            "`sluice etl --engine local`, or leave the column out of input.columns"
        ) from None


def _hadoop_name(path: str) -> str:
    """Returns the name by which Spark opens a file. Its options for S3 are its own."""
    name = path.partition("?")[0] if "://" in path else path
    return f"s3a{name[2:]}" if name.startswith("s3://") else name
