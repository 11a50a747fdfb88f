"""Whether Parquet inputs agree: `refuse_differences`, by their footers, before any row is read.

Spark assumes that all files have one file's columns: a column that another file lacks would silently be read as
nulls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

from sluice.etl.common.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READERS = 8


class InputError(UsageError):
    """Input that cannot be read: its message names the path, and what is wrong."""


def types_of(spark: SparkSession, files: Iterable[str]) -> dict[str, Mapping[str, str]]:
    """The columns of each file with their types as Spark has them; read through Spark's own file systems."""
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    known: dict[str, Mapping[str, str]] = {}

    def schema_of(file: str) -> Any:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(
            jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(path, conf))
        try:
            return reader.getFooter().getFileMetaData().getSchema()
        finally:
            reader.close()

    def described(file: str) -> tuple[str, Mapping[str, str]]:
        schema = schema_of(file)
        text = str(schema.toString())
        if text not in known:  # most often all files have the same schema
            parquet = jvm.org.apache.spark.sql.execution.datasources.parquet
            fields = parquet.ParquetToSparkSchemaConverter(spark._jsparkSession.sessionState().conf()).convert(schema)
            known[text] = {field.name(): str(field.dataType().simpleString()) for field in fields.fields()}
        return file, known[text]

    with ThreadPool(_READERS) as pool:
        return dict(pool.imap(described, files))


def refuse_differences(files: Mapping[str, Mapping[str, str]], columns: Iterable[str], optional: Collection[str],
                       hint: str) -> None:
    """Raises an error that names file and column, if a file lacks a column that is not `optional`, or has it in another
    type than the first that has it. A column that no file has is checked elsewhere."""
    for column in columns:
        having = [file for file, types in files.items() if column in types]
        for file, types in files.items() if having else ():
            if column not in types and column not in optional:
                raise InputError(f"{file}: there is no column {column!r}, which {having[0]} has; {hint}")
            if column in types and types[column] != files[having[0]][column]:
                raise InputError(f"{file}: column {column!r} holds {types[column]}, in {having[0]} it holds "
                                 f"{files[having[0]][column]}; write the files with one type, or read them in jobs of "
                                 "their own")
