"""`SpooledRows`: collects the rows of every file from several threads, in a `Spool`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.apply.spool import Spool, Ticket, group_by_file


class SpooledRows:
    """The rows of all files of a job, in batches with a part for each file."""

    def __init__(self, files: int, spool: Spool) -> None:
        self._files = files
        self._spool = spool
        self._lock = threading.Lock()
        self._batches: list[Ticket] = []
        self.rows = np.zeros(files, np.int64)
        self.row_bytes = 0
        """About how many bytes a row takes."""

    def add(self, batch: pa.RecordBatch, files: npt.NDArray[np.int32]) -> None:
        grouped, ends = group_by_file(batch, files, self._files)
        ticket = self._spool.put(grouped, ends)
        assert ticket is not None  # this spool's file has no limit
        with self._lock:
            self._batches.append(ticket)
            self.rows += np.diff(ends)
            self.row_bytes = max(self.row_bytes, int(batch.nbytes // max(1, batch.num_rows)))

    def of(self, file: int) -> Iterator[pa.RecordBatch]:
        """Yields all rows of a file, in any order."""
        for ticket in self._batches:
            if ticket.ends[file + 1] > ticket.ends[file]:
                yield self._spool.get(ticket, file)
