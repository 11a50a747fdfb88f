"""The columns of Parquet inputs, by their footers: `types_of`, before any row is read.

Spark assumes that all files have one file's columns: a column that another file lacks would silently be read as
nulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READERS = 8


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
