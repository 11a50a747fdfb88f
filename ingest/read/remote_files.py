"""Reads files of a store in ranges: `RemoteFile`, a file of a `Store`.

Failed requests are repeated (`sluice.ingest.read.retry`). A read that returns too few bytes counts as failed.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.fs as pafs

from sluice.common.stores import Place
from sluice.ingest.read.range_files import RangeFile, Stored, open_range_file, translated
from sluice.ingest.read.retry import Clock, Retrier, RetryPolicy
from sluice.ingest.read.slow_store import FaultyFiles

Answer = TypeVar("Answer")
_PART_BYTES, _MOST_PARTS = 4 * 2**20, 16
"""A row group is requested in at most this many parts at the same time, of at least so many bytes."""


class Store:
    """Reads ranges of the files of one store. Many threads can use it."""

    def __init__(
        self,
        place: Place,
        faults: FaultyFiles,
        retry: RetryPolicy | None,
        clock: Clock,
    ):
        """`faults` makes it slow or faulty. Each request also takes the delay of the place longer."""
        files, path = place.files(attempts=1)  # `Retrier` counts all attempts
        if isinstance(files, pafs.S3FileSystem):
            from sluice.ingest.read.s3_files import client_of

            files = client_of(files, path.partition("/")[0])
        self._files = files
        self._prefix, self._faults = place.prefix, faults
        self._clock, self._delay_s = clock, (place.delay_ms or 0.0) / 1000
        self._retrier = Retrier(retry or RetryPolicy(), clock)

    def open_source(self, key: str) -> RangeFile:
        """Opens what reads the ranges of a file."""

        def open_now() -> RangeFile:
            self._faults.disturb(key)
            return open_range_file(self._files, self._prefix, key)

        return self._ask(open_now, key, "opening")

    def _ask(self, action: Callable[[], Answer], key: str, what: str) -> Answer:
        """Calls `action()`, and repeats it after each error of the store that may be temporary."""
        name = f"{self._prefix}{key}"

        def ask() -> Answer:
            try:
                if self._delay_s:
                    self._clock.sleep(self._delay_s)
                return action()
            except (ValueError, TypeError, NotImplementedError, MemoryError):
                raise
            except Exception as error:
                raise translated(error, name) from error

        return self._retrier.call(ask, f"{name}: {what}")

    def stats(self) -> dict[str, int]:
        """Returns the counters since the start, for the run's metrics."""
        return self._retrier.count(reads=0, bytes=0)

    def read(self, key: str, source: RangeFile, offset: int, length: int) -> Stored:
        """Reads all of the range."""

        def read_whole() -> Stored:
            data = self._faults.read(key, source, offset, length)
            if len(data) != length:
                raise OSError(f"a short read: {len(data)} of {length} bytes")
            return data

        data = self._ask(read_whole, key, f"reading bytes {offset} to {offset + length}")
        self._retrier.count(reads=1, bytes=length)
        return data


class RemoteFile(io.RawIOBase):
    """An open file of a store. It keeps the ranges that `fetch` got, and reads all others from the store when they are
    needed. One thread may use it at a time."""

    def __init__(self, store: Store, key: str):
        self._store = store
        self._key = key
        self._source = store.open_source(key)
        self.state = self._source.size, self._source.tag
        """The size and the tag that the store had for this name when the file was opened, or after the last `fetch`."""
        self._at = 0
        self._fetched: list[tuple[int, Stored]] = []
        """Where each fetched part begins, and its bytes. They are in the order of the file."""

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Gets these ranges, each from its first byte up to but without its last, and keeps them until `drop`."""
        total = sum(end - begin for begin, end in ranges)
        size = max(_PART_BYTES, -(-total // _MOST_PARTS))
        parts = [
            (at, min(at + size, end)) for begin, end in ranges for at in range(begin, end, size)
        ]
        fetched: dict[int, Stored] = {}
        errors: list[BaseException] = []

        def get(begin: int, end: int) -> None:
            try:
                fetched[begin] = self._store.read(self._key, self._source, begin, end - begin)
            except BaseException as error:
                errors.append(error)

        # Not in an executor: the interpreter would wait for its threads at exit.
        others = [threading.Thread(target=get, args=part, daemon=True) for part in parts[1:]]
        for other in others:
            other.start()
        for part in parts[:1]:
            get(*part)
        for other in others:
            other.join()
        if errors:
            raise errors[0]
        self._fetched = sorted(fetched.items())
        now = self._source
        if not now.is_current:
            now = self._store.open_source(self._key)
            now.close()
        self.state = now.size, now.tag

    def fetched(
        self, places: npt.NDArray[np.int64], beyond: int
    ) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.uint8]]]:
        """Returns the addresses of ranges of the file, after each of which `beyond` bytes more may be read, and the
        arrays that hold them. Those that lie in several parts that were fetched, or at the end of one, are copied."""
        held = [np.frombuffer(data, np.uint8) for _, data in self._fetched]
        addresses = np.zeros(len(places), np.int64)
        for (at, _), part in zip(self._fetched, held, strict=True):
            lies = (places[:, 0] >= at) & (places[:, 1] + beyond <= at + len(part))
            addresses[lies] = places[lies, 0] + (part.ctypes.data - at)
        for number in np.flatnonzero(addresses == 0):
            begin, end = places[number].tolist()
            copy = np.empty(end - begin + beyond, np.uint8)
            self.seek(begin)
            copy[: end - begin] = np.frombuffer(self.read(end - begin), np.uint8)
            addresses[number] = copy.ctypes.data
            held.append(copy)
        return addresses, held

    def drop(self) -> None:
        """Frees the ranges that were fetched."""
        self._fetched = []

    def read(self, size: int | None = -1) -> Stored:
        left = max(0, self._source.size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        begin, end = self._at, self._at + length
        self._at = end
        pieces = []
        for at, data in self._fetched:
            if at <= begin < at + len(data):
                pieces.append(memoryview(data)[begin - at : end - at])
                begin += len(pieces[-1])
        if begin < end:  # not all of it was fetched
            return self._store.read(self._key, self._source, end - length, length)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._source.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()
