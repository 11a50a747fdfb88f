"""What waits until it is needed: `Spool`, in memory up to a budget, and beyond it in a file without a name, which is
gone with the process, however that ends."""

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

    def put(self, batch: pa.RecordBatch) -> Ticket:
        """Takes a batch, and returns what `get` gives it back for."""
        with self._lock:
            if self._held + batch.nbytes <= self._budget:
                self._held += batch.nbytes
                return batch
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="sluice-etl-")  # noqa: SIM115  open as long as this is
            start = self._file.seek(self._end)
            with pa.ipc.new_stream(self._file, batch.schema) as writer:
                writer.write_batch(batch)
            # A map of the file begins at whole pages.
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

    def close(self) -> int:
        """Lets go of the file; returns how many bytes went there."""
        if self._file is not None:
            self._file.close()
        return self._end
