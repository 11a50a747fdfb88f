"""An open Parquet file whose pages are held against their checksums: `LocalFile`, `StoreFile`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

_RANGES_AT_ONCE = 2  # of a row group, fetched side by side by each reader
_TAIL = 8  # bytes after a footer: its length, and `PAR1`


def local_path(path: str) -> str | None:
    """The path of a plain local file; None: it lies in a store."""
    if path.startswith("file://"):
        return unquote(path.removeprefix("file://"))
    return None if "://" in path else path


def stored_footer(path: str, size: int) -> bytes:
    """The footer as it is stored in the file, with its length; for a file that is not Parquet, its last bytes."""
    with open(path, "rb", buffering=0) as file:
        tail = os.pread(file.fileno(), _TAIL, max(0, size - _TAIL))
        length = min(int.from_bytes(tail[:4], "little"), max(0, size - _TAIL))
        return os.pread(file.fileno(), length, max(0, size - _TAIL - length)) + tail


class OpenFile:
    """One thread uses it at a time."""

    def __init__(
        self,
        opened: str | pa.NativeFile,
        metadata: pq.FileMetaData | None,
        dictionaries: Sequence[str],
        *,
        ahead: bool,
    ):
        """Columns of texts among `dictionaries` are decoded as dictionaries. `ahead` fetches what is going to be
        decoded."""
        self._parquet = pq.ParquetFile(
            opened,
            metadata=metadata,
            pre_buffer=ahead,
            read_dictionary=list(dictionaries),
            page_checksum_verification=True,
        )
        self.metadata = self._parquet.metadata

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Decodes columns of a row group."""
        return self._parquet.read_row_group(group, columns=list(columns), use_threads=False)

    def rest(self) -> None:
        """Gives back what need not be held until the next request."""

    def close(self) -> None:
        self._parquet.close(force=True)


class LocalFile(OpenFile):
    """A file on this machine. Nothing of it is fetched ahead: the hand-over to Arrow's own threads costs more."""

    def __init__(self, path: str, metadata: pq.FileMetaData | None, dictionaries: Sequence[str]):
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, os.close, self._descriptor)
        self._described: bool | None = None
        try:  # by the descriptor, as another file may lie at the path a moment later
            super().__init__(f"/dev/fd/{self._descriptor}", metadata, dictionaries, ahead=False)
        except BaseException:
            self._release()
            raise

    def status(self) -> os.stat_result:
        """What the system says of the open file: another one may lie at its path by now."""
        return os.fstat(self._descriptor)

    def is_as_described(self) -> bool:
        """Whether the footer that pages are found by is the open file's own: it may have been read before that was
        opened."""
        if self._described is None:
            with pa.OSFile(f"/dev/fd/{self._descriptor}") as again:
                self._described = bool(pq.read_metadata(again).equals(self.metadata))
        return self._described

    def close(self) -> None:
        super().close()
        self._release()


class _StoreReads:
    """Counts the row groups that this process is fetching from stores, and gives Arrow threads for as many.

    Arrow fetches with eight threads unless it is told otherwise: a ninth reader would wait for another one's answer."""

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
    """A file in a store, which is closed with this."""

    def __init__(
        self, opened: pa.NativeFile, metadata: pq.FileMetaData | None, dictionaries: Sequence[str]
    ):
        super().__init__(opened, metadata, dictionaries, ahead=True)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        with _store_reads:
            return super().read(group, columns)

    def rest(self) -> None:
        """Gives back what was fetched, which Arrow keeps until the next request."""
        self._parquet.read_row_group(0, columns=[], use_threads=False)
