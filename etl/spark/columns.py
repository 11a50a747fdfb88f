"""`cast_column` converts a stored column to a type of the spec, in Spark SQL, for inputs and side tables alike.
`sluice.etl.spec.input_values.converted` is the same for Arrow. `read_types` reads the types from footers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

from sluice.common.errors import InputError
from sluice.etl.apply.cells import INFINITY

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

SPARK_TYPES = {
    "int": "bigint",
    "float": "double",
    "text": "string",
    "texts": "array<string>",
    "floats": "array<double>",
}
_SAFE = {
    "int": ("tinyint", "smallint", "int", "bigint"),
    "text": ("string",),
    "float": ("tinyint", "smallint", "int", "bigint", "float", "double"),
}
_READERS = 8
NANOSECONDS = "timestamp_ns"
"""The type that `read_types` returns for times in nanoseconds. Spark reads them as whole numbers."""


def cast_column(where: str, name: str, stored: str, kind: str, decimal: str = ".") -> Column:
    """Returns a column of a file in a type of the spec. A value that does not fit becomes null. Times become seconds
    since 1970, and times without a zone are in UTC. `where` names the file in an error."""
    from pyspark.sql import functions as sql

    cell = sql.col(quoted(name))
    if stored == NANOSECONDS and kind not in ("int", "float"):
        raise InputError(
            f"{where}: column {name!r} holds times, which are not read as {kind}; read them as float, seconds "
            "since 1970"
        )
    if stored in ("float", "double") and kind == "text":
        raise InputError(
            f"{where}: column {name!r} holds {stored}, which has no exact text (17 becomes 17.0); declare "
            "it, and the column that a join compares it with, as int or float, or write it as text"
        )
    if kind in ("int", "float") and stored in ("date", "timestamp_ntz"):
        cell = cell.cast("timestamp")
    elif stored == NANOSECONDS:
        cell = sql.timestamp_micros(sql.expr(f"{quoted(name)} div 1000"))
    elif stored == "string" and decimal == "," and kind in ("int", "float"):
        cell = sql.translate(cell, ",.", ".?")
    typed = cell.try_cast(SPARK_TYPES[kind])
    if kind == "float" and stored == "string":
        # Spark casts a number that is too large to an infinity.
        return sql.when((sql.abs(typed) != math.inf) | cell.rlike(INFINITY), typed)
    if kind == "int" and stored.startswith(("float", "double", "decimal")):
        # Spark's cast would drop the fraction.
        return sql.when(cell % 1 == 0, typed)
    return typed


def may_lose(stored: str, kind: str) -> bool:
    """Returns whether a value of a stored type may not fit a type of the spec."""
    return stored not in _SAFE.get(kind, (SPARK_TYPES[kind],))


def quoted(name: str) -> str:
    """Returns a column's name as Spark's SQL writes it."""
    return f"`{name.replace('`', '``')}`"


def read_types(
    spark: SparkSession, files: Iterable[str], names: Collection[str]
) -> dict[str, Mapping[str, str]]:
    """Returns for each Parquet file its columns among `names`, with Spark's types. Reads through Spark's file systems.
    Raises an InputError if Spark cannot read a type. Spark itself would take the columns of one file for those of all
    files."""
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    known: dict[str, Mapping[str, str]] = {}

    def read_schema(file: str) -> Any:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(
            jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(path, conf)
        )
        try:
            return reader.getFooter().getFileMetaData().getSchema()
        finally:
            reader.close()

    def convert_type(file: str, column: Any) -> str:
        if "TIMESTAMP(NANOS," in (stored := str(column)):
            return NANOSECONDS
        parquet = jvm.org.apache.spark.sql.execution.datasources.parquet
        message = jvm.org.apache.parquet.schema.MessageType("column", jvm.java.util.List.of(column))
        settings = spark._jsparkSession.sessionState().conf()
        try:
            fields = parquet.ParquetToSparkSchemaConverter(settings).convert(message).fields()
        except Exception as error:  # py4j wraps Spark's error in its own
            better = (
                "run the job with `sluice etl --engine local`"
                if "FLOAT16" in stored
                else "write the column in another type, or leave it out of input.columns"
            )
            raise InputError(
                f"{file}: column {column.getName()!r} holds {stored}, which Spark does not read; {better}"
            ) from error
        return str(fields[0].dataType().simpleString())

    def read_file(file: str) -> tuple[str, Mapping[str, str]]:
        schema = read_schema(file)
        text = str(schema.toString())
        # Usually all files have the same schema, which is converted only once.
        if text not in known:
            known[text] = {
                column.getName(): convert_type(file, column)
                for column in schema.getFields()
                if column.getName() in names
            }
        return file, known[text]

    with ThreadPool(_READERS) as pool:
        return dict(pool.imap(read_file, files))
