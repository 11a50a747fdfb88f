"""Whether compressed text files are whole, by their first and last bytes: `refuse_cut`, before any row is read.

Spark takes a .bz2 file that ends where one of its blocks does for whole, and a file that is not bzip2 at all for empty.
A .gz file that is cut short makes its reader fail, as its checksum comes last.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

from sluice.etl.spark.parquet_footers import InputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READERS = 8
_HEAD, _TAIL = 10, 11
_BLOCK, _END = b"1AY&SY", 0x177245385090  # π and √π, as bzip2 writes them before a block and behind the last one


def fault(name: str, head: bytes, tail: bytes) -> str | None:
    """What is wrong with a file of this name, by its first ten and last eleven bytes; None if no fault is seen."""
    if name.endswith(".gz") and head and head[:2] != b"\x1f\x8b":
        return "it is no gzip file"
    if not name.endswith(".bz2") or not head:
        return None
    end = _END.to_bytes(6, "big")
    if head[:3] != b"BZh" or head[4:10] not in (_BLOCK[:len(head) - 4], end[:len(head) - 4]):
        return "it is no bzip2 file"
    # The mark, then a checksum of four bytes, and up to seven bits that fill the last byte.
    bits = int.from_bytes(tail, "big")
    if not any(bits >> (32 + spare) & (1 << 48) - 1 == _END for spare in range(8)):
        return "its end is missing, or something else follows it"
    return None


def refuse_cut(spark: SparkSession, files: Iterable[str]) -> None:
    """Raises an InputError that names the first file which is not whole; reads through Spark's own file systems."""
    looked_at = [file for file in files if file.endswith((".gz", ".bz2"))]
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()

    def look(file: str) -> str | None:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        system = path.getFileSystem(conf)
        size = int(system.getFileStatus(path).getLen())
        stream = system.open(path)
        try:
            head = bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream, min(size, _HEAD)))
            stream.seek(max(0, size - _TAIL))
            return fault(file, head, bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream, min(size, _TAIL))))
        finally:
            stream.close()

    if not looked_at:
        return
    with ThreadPool(_READERS) as pool:
        for file, wrong in zip(looked_at, pool.imap(look, looked_at), strict=True):
            if wrong:
                raise InputError(f"{file}: {wrong}; copy it here anew, whole")
