"""`RowStore`: stores batches by key, in memory up to a budget, then on the disk."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


class RowStore:
    """Stores batches: in memory up to a budget, then in a file without a name, which disappears with the process.

    In the file, all columns of a batch are next to each other. A memory map of the columns would read unneeded pages
    around each column, and read them again when memory is short.
    """

    def __init__(self, budget: int, most: int | None = None) -> None:
        """`budget` is the limit of the memory in bytes, `most` that of the file."""
        self._budget = budget
        self._most = most
        self._memory = self._end = 0
        self._lock = threading.Lock()
        self._file: Any = None
        self._stored: dict[Hashable, list[pa.RecordBatch | tuple[pa.Schema, int, int]]]
        self._stored = defaultdict(list)
        self.rows = Counter[Any]()
        """The number of rows of each key."""

    def put(self, batches: Iterable[tuple[Hashable, pa.RecordBatch]]) -> bool:
        """Stores batches, each with its key. Returns False if they would exceed the limit of the file."""
        batches = list(batches)
        size = sum(batch.nbytes for _, batch in batches)
        with self._lock:
            if self._memory + size <= self._budget:
                self._memory += size
                self._add(batches, [batch for _, batch in batches])
                return True
        contents = [_as_bytes(batch) for _, batch in batches]
        with self._lock:
            starts = list(itertools.accumulate(map(len, contents), initial=self._end))
            if self._most is not None and starts[-1] > self._most:
                return False
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="sluice-etl-")  # noqa: SIM115  open as long as this is
            self._end = starts[-1]
        content, file, count = memoryview(b"".join(contents)), self._file.fileno(), 0
        while count < len(content):
            count += os.pwrite(file, content[count:], starts[0] + count)
        # The kernel then writes the bytes now, and not only when memory is short.
        os.posix_fadvise(file, starts[0], len(content), os.POSIX_FADV_DONTNEED)
        schemas = (batch.schema for _, batch in batches)
        with self._lock:
            self._add(batches, zip(schemas, starts, map(len, contents), strict=False))
        return True

    def _add(self, batches: list[tuple[Hashable, pa.RecordBatch]], stored: Iterable[Any]) -> None:
        for (key, batch), one in zip(batches, stored, strict=True):
            self._stored[key].append(one)
            self.rows[key] += batch.num_rows

    def get(self, key: Hashable) -> Iterator[pa.RecordBatch]:
        """Yields the batches of a key, in any order."""
        for stored in self._stored.get(key, ()):
            if isinstance(stored, pa.RecordBatch):
                yield stored
                continue
            schema, start, size = stored
            content = os.pread(self._file.fileno(), size, start)
            yield pa.ipc.open_stream(schema.serialize().to_pybytes() + content).read_next_batch()

    def drop(self, key: Hashable) -> None:
        """Forgets the batches of a key, so that their memory is free when nobody else uses them."""
        self._stored.pop(key, None)

    def close(self) -> None:
        self._stored.clear()
        if self._file is not None:
            self._file.close()


def _as_bytes(batch: pa.RecordBatch) -> memoryview:
    """Returns a batch as an Arrow stream without its schema."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batch.schema, options=COMPRESSED) as writer:
        writer.write_batch(batch)
    return memoryview(stream.getvalue())[batch.schema.serialize().size :]


def split_by_number(
    batch: pa.RecordBatch, numbers: npt.NDArray[np.int32], count: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields the rows of each number below `count`, if there are any, in their order."""
    order = np.argsort(numbers.astype(np.uint16 if count < 1 << 16 else np.int32), kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=count))
    grouped = batch.take(pa.array(order))
    for number, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end > start:
            yield number, grouped.slice(start, end - start)
