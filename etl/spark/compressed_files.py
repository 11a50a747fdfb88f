"""Whether compressed text files are whole, through Spark's own file systems: `refuse_cut`, before any row is read.

Spark takes a .bz2 file that ends where one of its blocks does for whole, and a file that is not bzip2 at all for empty.
It reads a .zst file of several frames up to the one that is cut short, so the heads of all blocks are looked at. A .gz
file that is cut short makes its reader fail, as its checksum comes last.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

from sluice.etl.apply.input_checks import HEAD, TAIL, fault, refuse_faults, zstd_fault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READERS = 8


def refuse_cut(spark: SparkSession, files: Iterable[str]) -> None:
    """Raises an InputError that names the first file which is not whole; reads through Spark's own file systems."""
    looked_at = [file for file in files if file.endswith((".gz", ".bz2", ".zst"))]
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()

    def look(file: str) -> str | None:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        system = path.getFileSystem(conf)
        size = int(system.getFileStatus(path).getLen())
        stream = system.open(path)

        def read(start: int, count: int) -> bytes:
            stream.seek(start)
            return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream, count))

        try:
            if file.endswith(".zst"):
                return zstd_fault(read, size)
            head = bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream, min(size, HEAD)))
            stream.seek(max(0, size - TAIL))
            return fault(file, head, bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream, min(size, TAIL))))
        finally:
            stream.close()

    if looked_at:
        with ThreadPool(_READERS) as pool:
            refuse_faults(zip(looked_at, pool.imap(look, looked_at), strict=True))
