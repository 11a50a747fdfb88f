"""`Spool`: stores batches in memory up to a budget, then on the disk."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch in a spool, with which `Spool.get` returns its parts."""

    ends: npt.NDArray[np.int64]
    """The number of rows before each part, and of all rows."""
    content: pa.RecordBatch | pa.Schema
    """The batch, if it is in memory. Its schema, if it is on the disk."""
    offsets: npt.NDArray[np.int64] | None = None
    """The position of each part on the disk, and the end of the last one."""


class Spool:
    """Stores batches: in memory up to a budget, then in a file without a name, which disappears with the process.

    In the file, all columns of a part are next to each other. A memory map of the columns would read unneeded pages
    around each column of each part, and read them again when memory is short.
    """

    def __init__(self, budget: int, most: int | None = None) -> None:
        """`budget` is the limit of the memory in bytes, `most` that of the file."""
        self._budget = budget
        self._most = most
        self._memory = 0
        self._lock = threading.Lock()
        self._file: Any = None
        self._end = 0

    def put(
        self, batch: pa.RecordBatch, ends: npt.NDArray[np.int64] | None = None
    ) -> Ticket | None:
        """Stores a batch, and returns the ticket for `get`. None if it would exceed the limit of the file. `ends` are
        the numbers of rows before each part, and of all rows."""
        ends = np.array([0, batch.num_rows]) if ends is None else ends
        with self._lock:
            if self._memory + batch.nbytes <= self._budget:
                self._memory += batch.nbytes
                return Ticket(ends, batch)
        stored = pa.BufferOutputStream()
        with pa.ipc.new_stream(stored, batch.schema, options=COMPRESSED) as writer:
            # This writes the schema, which is not needed: the ticket has it.
            writer.write_batch(batch.slice(0, 0))
            offsets = [stored.tell()]
            for first, last in itertools.pairwise(ends.tolist()):
                if last > first:
                    writer.write_batch(batch.slice(first, last - first))
                offsets.append(stored.tell())
        content = memoryview(stored.getvalue())[offsets[0] : offsets[-1]]
        with self._lock:
            start, end = self._end, self._end + len(content)
            if self._most is not None and end > self._most:
                return None
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="sluice-etl-")  # noqa: SIM115  open as long as this is
            self._end = end
        file, count = self._file.fileno(), 0
        while count < len(content):
            count += os.pwrite(file, content[count:], start + count)
        # The kernel then writes the bytes now, and not only when memory is short.
        os.posix_fadvise(file, start, len(content), os.POSIX_FADV_DONTNEED)
        return Ticket(ends, batch.schema, np.array(offsets) - offsets[0] + start)

    def get(self, ticket: Ticket, part: int = 0) -> pa.RecordBatch:
        """Returns a part of a batch."""
        first, last = ticket.ends[part : part + 2].tolist()
        if isinstance(ticket.content, pa.RecordBatch):
            return ticket.content.slice(first, last - first)
        if ticket.offsets is None or last == first:
            return pa.RecordBatch.from_pylist([], ticket.content)
        start, end = ticket.offsets[part : part + 2].tolist()
        content = os.pread(self._file.fileno(), end - start, start)
        return pa.ipc.read_record_batch(pa.py_buffer(content), ticket.content)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def group_by_file(
    batch: pa.RecordBatch, files: npt.NDArray[np.int32], count: int
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Returns the rows with those of each file together. Also returns the number of rows before each of `count` files,
    and of all rows."""
    order = np.argsort(files.astype(np.uint16 if count < 1 << 16 else np.int32), kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(files, minlength=count))])
    return batch.take(pa.array(order)), ends
