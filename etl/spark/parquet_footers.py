"""The columns of Parquet inputs, by their footers: `types_of`, before any row is read.

Spark assumes that all files have one file's columns: a column that another file lacks would silently be read as
nulls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

from sluice.etl.common.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READERS = 8


NANOSECONDS = "timestamp_ns"
"""What `types_of` calls times in nanoseconds, which Spark reads as whole numbers."""


def types_of(spark: SparkSession, files: Iterable[str], names: Collection[str]) -> dict[str, Mapping[str, str]]:
    """Those of the columns that each file has, with their types as Spark has them; read through Spark's own file
    systems. InputError if Spark cannot read one."""
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

    def type_of(file: str, column: Any) -> str:
        if "TIMESTAMP(NANOS," in (stored := str(column)):
            return NANOSECONDS
        parquet = jvm.org.apache.spark.sql.execution.datasources.parquet
        alone = jvm.org.apache.parquet.schema.MessageType("column", jvm.java.util.List.of(column))
        settings = spark._jsparkSession.sessionState().conf()
        try:
            fields = parquet.ParquetToSparkSchemaConverter(settings).convert(alone).fields()
        except Exception as error:  # py4j's own, which wraps Spark's
            better = "run the job with `sluice etl --engine local`" if "FLOAT16" in stored else \
                "write the column in another type, or leave it out of input.columns"
            raise InputError(f"{file}: column {column.getName()!r} holds {stored}, which Spark does not read; {better}"
                             ) from error
        return str(fields[0].dataType().simpleString())

    def described(file: str) -> tuple[str, Mapping[str, str]]:
        schema = schema_of(file)
        text = str(schema.toString())
        if text not in known:  # most often all files have the same schema
            known[text] = {column.getName(): type_of(file, column) for column in schema.getFields()
                           if column.getName() in names}
        return file, known[text]

    with ThreadPool(_READERS) as pool:
        return dict(pool.imap(described, files))
