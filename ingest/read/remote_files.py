"""`RemoteFiles` opens files for reading, on this machine or in a store.

Local paths are opened directly. All other files are read in ranges: from an optional cache, otherwise from the store,
with retries (`sluice.ingest.read.retry`). A read that returns too few bytes counts as failed.

    RemoteFiles.at("s3://bucket/table?endpoint_override=127.0.0.1:9000&scheme=http").open("part-0.parquet")
    RemoteFiles.at("latency://60ms/data/table").open("part-0.parquet")
    RemoteFiles.at("latency:///data/table?latency_ms=50&error_rate=0.1").open("part-0.parquet")
"""

from __future__ import annotations

import io
import os
import threading

import pyarrow as pa
import pyarrow.fs as pafs

from sluice.common.stores import SLOW, Place, StoreError
from sluice.ingest.read.cache import FileCache
from sluice.ingest.read.range_files import (
    ArrowFiles,
    FileSystem,
    FsspecFiles,
    LocalFiles,
    RangeFile,
)
from sluice.ingest.read.retry import Clock, Retrier, RetryPolicy
from sluice.ingest.read.slow_store import Disturbance, FaultyFileSystem


class RemoteFiles:
    """The files below one root. Many threads can use it. `open` returns a new file each time."""

    def __init__(
        self,
        root: str,
        backend: FileSystem,
        *,
        scheme: str = "",
        retry: RetryPolicy | None = None,
        cache: FileCache | None = None,
        clock: Clock | None = None,
    ):
        """Makes one from its parts. `at` makes one from a URI."""
        self.root = root.rstrip("/") or "/"
        self._backend = backend
        self._scheme = scheme
        self._cache = cache
        self._clock = clock or Clock()
        self._retrier = Retrier(retry or RetryPolicy(), self._clock)
        self._lock = threading.Lock()
        self._reads = self._bytes = 0

    @classmethod
    def at(
        cls,
        uri: str,
        *,
        retry: RetryPolicy | None = None,
        cache: FileCache | None = None,
        clock: Clock | None = None,
    ) -> RemoteFiles:
        """Opens the store of a URI or a local path. Raises ValueError for an invalid URI."""
        clock = clock or Clock()
        scheme, root, backend = _resolve(uri, clock)
        return cls(root, backend, scheme=scheme, retry=retry, cache=cache, clock=clock)

    @property
    def local(self) -> bool:
        """Whether its files are plain local files without injected faults."""
        return isinstance(self._backend, LocalFiles)

    @property
    def disturbed(self) -> FaultyFileSystem | None:
        """The handle for `--inject`, if the root is a latency:// URI."""
        return self._backend if isinstance(self._backend, FaultyFileSystem) else None

    def open(self, path: str = "") -> pa.NativeFile:
        """Opens a file by its full path or its path below the root. Without a path, the root itself is the file.
        `pyarrow.parquet.ParquetFile` takes the result but does not close it, so use `with`."""
        name, source = self._open(path)
        if isinstance(self._backend, LocalFiles):
            source.close()
            return pa.OSFile(name)
        return pa.PythonFile(_File(self, name, source), mode="r")

    def state(self, path: str = "") -> tuple[int, str]:
        """Returns the size and the tag that a file has now."""
        _, source = self._open(path)
        source.close()
        return source.size, source.tag

    def _open(self, path: str) -> tuple[str, RangeFile]:
        if self._scheme and path.startswith(self._scheme):
            key = path.removeprefix(self._scheme)
        else:
            key = os.path.join(self.root, path) if path else self.root
        name = self._scheme + key
        return name, self._retrier.call(lambda: self._backend.open(key), f"{name}: opening")

    def stats(self) -> dict[str, int]:
        """Returns the counters since the start, for the run's metrics."""
        with self._lock:
            counts = {
                "reads": self._reads,
                "bytes": self._bytes,
                "retries": self._retrier.retries,
                "gave_up": self._retrier.gave_up,
            }
        return counts | (self._cache.stats() if self._cache else {})

    def close(self) -> None:
        """Stops all waiting for the store: waiting reads raise StoreClosed. Does not close the cache."""
        self._clock.stop()

    def read(self, name: str, source: RangeFile, offset: int, length: int) -> bytes:
        """Reads all of the range, from the cache or the store."""
        entry = f"{name}|{source.size}|{source.tag}|{offset}|{length}"
        data = self._cache.get(entry) if self._cache else None
        if data is None:
            data = self._retrier.call(
                lambda: _read_whole(source, offset, length),
                f"{name}: reading bytes {offset} to {offset + length}",
            )
            if self._cache:
                self._cache.put(entry, data)
        with self._lock:
            self._reads += 1
            self._bytes += length
        return data


def _read_whole(source: RangeFile, offset: int, length: int) -> bytes:
    data = source.read(offset, length)
    if len(data) != length:
        raise OSError(f"a short read: {len(data)} of {length} bytes")
    return data


def _resolve(uri: str, clock: Clock) -> tuple[str, str, FileSystem]:
    """Splits a URI into (scheme with its slashes, root, backend)."""
    place = Place.of(uri)
    if place.delay_ms is not None:
        slow = Disturbance(latency_ms=place.delay_ms)
        return place.prefix, place.path, FaultyFileSystem(LocalFiles(), slow, clock)
    if not place.scheme:
        return "", place.path, LocalFiles()
    if place.scheme == SLOW:
        if "?" in place.path:
            raise StoreError(f"{uri}: write name=value pairs, joined by &, after the question mark")
        scheme, root, inner = _resolve(place.path, clock)
        return scheme, root, FaultyFileSystem(inner, Disturbance.parse(place.options), clock)
    files, root = place.files(attempts=1)  # `Retrier` retries, so that its counts show all attempts
    if isinstance(files, pafs.PyFileSystem):
        return place.prefix, place.path, FsspecFiles(files.handler.fs, place.scheme)
    return place.prefix, root, ArrowFiles(files, place.scheme)


class _File(io.RawIOBase):
    """A file object with a position, as pyarrow needs it."""

    def __init__(self, store: RemoteFiles, name: str, source: RangeFile):
        self._store = store
        self._name = name
        self._source = source
        self._at = 0

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._source.size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        data = self._store.read(self._name, self._source, self._at, length)
        self._at += length
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._source.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()
