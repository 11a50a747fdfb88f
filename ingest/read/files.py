"""`FileOpener` opens a loader's files. Arrow reads plain local files itself. All others go through `RemoteFiles`."""

from __future__ import annotations

import threading
from collections import Counter

import pyarrow as pa

from sluice.ingest.read.cache import FileCache
from sluice.ingest.read.open_file import local_path
from sluice.ingest.read.remote_files import RemoteFiles
from sluice.ingest.read.retry import RetryPolicy
from sluice.ingest.read.slow_store import FaultyFileSystem


class FileOpener:
    """Opens files for all threads of a loader. A store is opened when its first file is."""

    def __init__(
        self,
        *,
        disturbed: str = "",
        retry: RetryPolicy | None = None,
        cache: FileCache | None = None,
    ):
        """`disturbed` makes all files slow or faulty. It has the form of a latency:// URI's part after the question
        mark. `cache` keeps what was read from remote files. `close` closes it."""
        self._disturbed = disturbed
        self._retry = retry
        self._cache = cache
        self._lock = threading.Lock()
        self._stores: dict[tuple[str, str], RemoteFiles] = {}
        self._slowed_s = 0.0

    def local(self, path: str) -> str | None:
        """Returns the path of a plain local file, or None if the file is read through a store."""
        return None if self._disturbed else local_path(path)

    def open(self, path: str) -> str | pa.NativeFile:
        """Returns an argument for `pyarrow.parquet.ParquetFile`. A store's options follow the file's name, as in
        `s3://bucket/part-0.parquet?region=eu-west-1`. Close it along with the ParquetFile (`close(force=True)`)."""
        local = self.local(path)
        if local is not None:
            return local
        store, name = self._store(path)
        return store.open(name)

    def state(self, path: str) -> tuple[int, str]:
        """Asks the store for the size and the tag that a file has now."""
        store, name = self._store(path)
        return store.state(name)

    def stats(self) -> dict[str, int]:
        """Counts reads, bytes, retries and cache hits over all stores."""
        counts = Counter[str]()
        for store in self._all():
            counts.update(store.stats())
        return dict(counts) | (self._cache.stats() if self._cache else {})

    def disturbances(self) -> list[FaultyFileSystem]:
        """Returns the handles for injected faults, one for each store opened so far."""
        return [d for d in (store.disturbed for store in self._all()) if d is not None]

    def slow(self, seconds: float) -> None:
        """Makes each read wait `seconds` longer, in all stores, including stores opened later."""
        with self._lock:
            self._slowed_s = seconds
        for disturbed in self.disturbances():
            disturbed.slow(seconds)

    def close(self) -> None:
        """Stops all waiting for stores and closes the cache."""
        for store in self._all():
            store.close()
        if self._cache is not None:
            self._cache.close()

    def _all(self) -> list[RemoteFiles]:
        with self._lock:
            return list(self._stores.values())

    def _store(self, path: str) -> tuple[RemoteFiles, str]:
        bare, _, query = path.partition("?") if "://" in path else (path, "", "")
        folder, _, name = bare.rpartition("/")
        with self._lock:
            store = self._stores.get((folder, query))
            if store is None:
                uri = f"{folder or '/'}?{query}" if query else folder or "/"
                if self._disturbed:
                    uri = f"latency://{uri}?{self._disturbed}"
                store = RemoteFiles.at(uri, retry=self._retry, cache=self._cache)
                if store.disturbed is not None:
                    store.disturbed.slow(self._slowed_s)
                self._stores[folder, query] = store
        return store, name
