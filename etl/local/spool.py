"""Batches that wait until they are needed: `Spool`, in memory up to a budget, and beyond it in a file without a name,
which is gone with the process, however that ends."""

from __future__ import annotations

import mmap
import tempfile
import threading
from typing import Any, TypeAlias

import pyarrow as pa

Ticket: TypeAlias = pa.RecordBatch | tuple[int, int]


class Spool:
    def __init__(self, budget: int) -> None:
        self._budget, self._held, self._lock = budget, 0, threading.Lock()
        self._file: Any = None
        self._end = 0

    @property
    def spilled(self) -> int:
        """How many bytes went to the disk."""
        return self._end

    def put(self, batch: pa.RecordBatch, *, to_disk: bool = False) -> Ticket:
        """Takes a batch, and returns what `get` gives it back for."""
        size = batch.nbytes
        with self._lock:
            if not to_disk and self._held + size <= self._budget:
                self._held += size
                return batch
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="sluice-etl-")  # noqa: SIM115  open as long as this is
            start = self._end
            self._file.seek(start)
            with pa.ipc.new_stream(self._file, batch.schema) as writer:
                writer.write_batch(batch)
            self._end = -(-self._file.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._file.truncate(self._end)
            return start, self._end

    def get(self, ticket: Ticket) -> pa.RecordBatch:
        """The batch of a ticket; of one on the disk only what is touched is read."""
        if isinstance(ticket, pa.RecordBatch):
            return ticket
        start, end = ticket
        mapped = mmap.mmap(self._file.fileno(), end - start, access=mmap.ACCESS_READ, offset=start)
        batch: pa.RecordBatch = pa.ipc.open_stream(pa.py_buffer(mapped)).read_next_batch()
        return batch

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
