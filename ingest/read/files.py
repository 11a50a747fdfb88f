"""`FileOpener` opens a loader's files. Arrow reads plain local files itself. All others are a `RemoteFile`.

FileOpener().open("s3://bucket/table/part-0.parquet?endpoint_override=127.0.0.1:9000&scheme=http")
FileOpener().open("latency://60ms/data/table/part-0.parquet")
FileOpener(disturbed="latency_ms=50&error_rate=0.1").open("/data/table/part-0.parquet")
"""

from __future__ import annotations

import threading
from collections import Counter

from sluice.common.stores import Place
from sluice.ingest.read.remote_files import RemoteFile, Store
from sluice.ingest.read.retry import Clock, RetryPolicy
from sluice.ingest.read.slow_store import Disturbance, FaultyFiles


class FileOpener:
    """Opens files for all threads of a loader. A store is opened when its first file is."""

    def __init__(
        self,
        *,
        disturbed: str = "",
        retry: RetryPolicy | None = None,
        clock: Clock | None = None,
    ):
        """`disturbed` makes all files slow or faulty: fields of `Disturbance`, joined by `&`."""
        self.is_disturbed = bool(disturbed)
        self._retry = retry
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._stores: dict[tuple[str, ...], Store] = {}
        self.faults = FaultyFiles(Disturbance.parse(disturbed), self._clock)
        """Injects faults into all files, if these are `disturbed`."""

    def local(self, path: str) -> str | None:
        """Returns the path of a plain local file, or None if the file is read through a store."""
        place = Place.of(path)
        is_far = self.is_disturbed or place.scheme or place.delay_ms is not None
        return None if is_far else place.path

    def open(self, path: str) -> str | RemoteFile:
        """Returns an argument for `pyarrow.parquet.ParquetFile`. Close it along with the ParquetFile
        (`close(force=True)`)."""
        local = self.local(path)
        return self.open_remote(path) if local is None else local

    def open_remote(self, path: str) -> RemoteFile:
        """Opens a file in ranges. A store's options follow the file's name, as in
        `s3://bucket/part-0.parquet?region=eu-west-1`. Raises ValueError for an invalid URI."""
        place = Place.of(path)
        host, slash, rest = place.path.partition("/")
        if place.scheme == "s3":
            host = host.rpartition("@")[2]  # keys of the store may precede the bucket
        at = place.prefix, host, place.query
        with self._lock:
            if at not in self._stores:
                self._stores[at] = Store(place, self.faults, self._retry, self._clock)
        return RemoteFile(self._stores[at], f"{host}{slash}{rest}")

    def stats(self) -> dict[str, int]:
        """Counts reads, bytes and retries over all stores."""
        counts = Counter[str]()
        for store in list(self._stores.values()):
            counts.update(store.stats())
        return dict(counts)

    def close(self) -> None:
        """Stops all waiting for stores, where waiting reads raise StoreClosed."""
        self._clock.stop()
