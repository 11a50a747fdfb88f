"""Refuses input files that lie in a table's folder, through Spark's own file systems: `refuse_tables`."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sluice.etl.table.foreign_tables import ForeignTableError, LocalTables, TableFinder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOKS = 8


def refuse_tables(spark: SparkSession, files: Iterable[str]) -> None:
    """Raises a ForeignTableError that names the table, if one of these files lies in a table's folder. Each folder of
    another store takes at most four requests to the file system."""
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()

    def system_of(uri: str) -> tuple[Any, Any]:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
        return path.getFileSystem(conf), path

    def is_folder(uri: str) -> bool:
        system, path = system_of(uri)
        return bool(system.exists(path))

    def names_in(uri: str) -> list[str]:
        system, path = system_of(uri)
        return [str(status.getPath().getName()) for status in system.listStatus(path)]

    files = sorted(files)
    here = [unquote(file.removeprefix("file:")) for file in files if file.startswith("file:")]
    folders = dict.fromkeys(
        f"{file.rpartition('/')[0]}/" for file in files if not file.startswith("file:")
    )
    with ThreadPool(_LOOKS) as pool:
        found = [
            *map(LocalTables().above, here),
            *pool.imap(TableFinder(is_folder, names_in).above, folders),
        ]
    if table := next(filter(None, found), None):
        raise ForeignTableError(table.refusal(in_job=True))
