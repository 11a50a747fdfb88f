"""An open Parquet file whose page checksums are verified: `LocalFile`, `StoreFile`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.stores import Place
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.read.pages import StoredColumns, StoredRows

_RANGES_AT_ONCE = 2  # ranges of a row group that each reader fetches at the same time
_TAIL = 8  # bytes after a footer: its length, and `PAR1`


def local_path(path: str) -> str | None:
    """Returns the path of a plain local file, or None if it lies in a store."""
    place = Place.of(path)
    return None if place.scheme or place.delay_ms is not None else place.path


def stored_footer(path: str, size: int) -> bytes:
    """Returns the stored footer of a local file with its length."""
    with open(path, "rb", buffering=0) as file:
        return footer_by(partial(os.pread, file.fileno()), size)


def footer_by(read: Callable[[int, int], bytes], size: int) -> bytes:
    """Returns the stored footer with its length. `read` takes a length and an offset. For a file that is not Parquet,
    returns its last bytes."""
    before = max(0, size - _TAIL)
    tail = read(_TAIL, before)
    length = min(int.from_bytes(tail[:4], "little"), before)
    return read(length, before - length) + tail


def texts_as_differences(metadata: pq.FileMetaData, names: Sequence[str]) -> set[str]:
    """Returns the columns among `names` whose texts are stored as differences from the text before. Arrow does not
    decode these as dictionaries."""
    leaves = [
        leaf
        for leaf in range(metadata.num_columns if names else 0)
        if metadata.schema.column(leaf).path in names
    ]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(leaf) for group in groups for leaf in leaves)
    return {chunk.path_in_schema for chunk in chunks if "DELTA_BYTE_ARRAY" in chunk.encodings}


class OpenFile:
    """An open Parquet file. Only one thread may use it at a time."""

    def __init__(
        self,
        opened: str | pa.NativeFile,
        metadata: pq.FileMetaData | None,
        dictionaries: Sequence[str],
        *,
        ahead: bool,
    ):
        """Columns of texts in `dictionaries` are decoded as dictionaries. `ahead` fetches bytes before they are
        decoded."""
        checked = partial(pq.ParquetFile, opened, pre_buffer=ahead, page_checksum_verification=True)
        self._parquet = checked(metadata=metadata, read_dictionary=list(dictionaries))
        self.metadata = self._parquet.metadata
        self.schema = self._parquet.schema_arrow
        self._differing = texts_as_differences(self.metadata, dictionaries)
        if self._differing:
            kept = [name for name in dictionaries if name not in self._differing]
            self._parquet = checked(metadata=self.metadata, read_dictionary=kept)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Decodes these columns of a row group."""
        table = self._parquet.read_row_group(group, columns=list(columns), use_threads=False)
        for name in self._differing.intersection(table.column_names):
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(at).dictionary_encode())
        return table

    def free_memory(self) -> None:
        """Frees memory that is not needed until the next read."""

    def close(self) -> None:
        self._parquet.close(force=True)


class LocalFile(OpenFile):
    """A file on this machine. It is not fetched ahead, because handing work to Arrow's threads costs more."""

    def __init__(self, path: str, metadata: pq.FileMetaData | None, dictionaries: Sequence[str]):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, os.close, self.descriptor)
        try:  # opened by descriptor, because another file may replace it at the path
            super().__init__(f"/dev/fd/{self.descriptor}", metadata, dictionaries, ahead=False)
        except BaseException:
            self._release()
            raise
        self._columns: StoredColumns | None = None

    def fetch(
        self, group: int, portions: Sequence[Sequence[str]], buffers: Buffers
    ) -> StoredRows | None:
        """Reads those columns of a row group that may stay stored. None: there are none."""
        if self._columns is None:
            size = os.fstat(self.descriptor).st_size
            self._columns = StoredColumns(self.metadata, self.schema, size)
        return self._columns.fetch(self.descriptor, group, portions, buffers)

    def status(self) -> os.stat_result:
        """Returns the status of the open file, even if another file has replaced it at the path."""
        return os.fstat(self.descriptor)

    def close(self) -> None:
        super().close()
        self._release()


class _StoreReads:
    """Counts the row groups that this process is fetching from stores, and gives Arrow enough threads for them.

    Arrow's default is eight threads, so a ninth reader would wait for another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count * _RANGES_AT_ONCE > pa.io_thread_count():
                pa.set_io_thread_count(self._count * _RANGES_AT_ONCE)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1


_store_reads = _StoreReads()


class StoreFile(OpenFile):
    """A file in a store. `close` closes the store's file too."""

    def __init__(
        self, opened: pa.NativeFile, metadata: pq.FileMetaData | None, dictionaries: Sequence[str]
    ):
        super().__init__(opened, metadata, dictionaries, ahead=True)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        with _store_reads:
            return super().read(group, columns)

    def free_memory(self) -> None:
        """Frees the fetched bytes, which Arrow would keep until the next read."""
        self._parquet.read_row_group(0, columns=[], use_threads=False)
