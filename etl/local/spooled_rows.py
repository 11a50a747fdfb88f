"""The rows of every file of a job, as threads make them: `SpooledRows`, which wait in a `Spool`; and `FileWriter`,
which sorts one file and writes it."""

from __future__ import annotations

import mmap
import re
import tempfile
import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.etl.apply.features import FileAssignment
from sluice.etl.local.threads import Threads
from sluice.etl.table.data_files import arrow_schema, folder_of, with_dictionaries
from sluice.etl.table.store import TableStore

_ESCAPED = re.compile(r"[\x01-\x1f\x7f\"#%'*/:=?\\{\[\]^]")  # in a folder's name, as Hive and Spark escape it

Ticket: TypeAlias = pa.RecordBatch | tuple[int, int]


class Spool:
    """Batches that wait: in memory up to a budget, beyond it in a file without a name, which goes with the process."""

    def __init__(self, budget: int, most: int | None = None) -> None:
        """`most` are the bytes that the file may have."""
        self._budget, self._most, self._held, self._lock = budget, most, 0, threading.Lock()
        self._file: Any = None
        self._end = 0

    def put(self, batch: pa.RecordBatch) -> Ticket | None:
        """Takes a batch, and returns what `get` gives it back for; None if there is no room for it."""
        with self._lock:
            if self._held + batch.nbytes <= self._budget:
                self._held += batch.nbytes
                return batch
            if self._most is not None and self._end + batch.nbytes > self._most:
                return None
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

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class SpooledRows:
    """Batches sorted by the number of the file that each row goes to, and where in each the rows of a file lie."""

    def __init__(self, files: int, spool: Spool) -> None:
        self._files, self._spool, self._lock = files, spool, threading.Lock()
        self._batches: list[tuple[Ticket, npt.NDArray[np.int64]]] = []
        self.rows = np.zeros(files, np.int64)
        self.row_bytes = 0
        """About how many bytes a row takes."""

    def add(self, batch: pa.RecordBatch, files: npt.NDArray[np.int32]) -> None:
        order = np.argsort(files.astype(np.uint16 if self._files < 1 << 16 else np.int32), kind="stable")
        counts = np.bincount(files, minlength=self._files)
        ticket = self._spool.put(batch.take(pa.array(order)))
        assert ticket is not None  # its file has no bound
        with self._lock:
            self._batches.append((ticket, np.concatenate([[0], np.cumsum(counts)])))
            self.rows += counts
            self.row_bytes = max(self.row_bytes, int(batch.nbytes // max(1, batch.num_rows)))

    def of(self, file: int) -> pa.Table:
        """All rows of a file, in any order."""
        parts = [self._spool.get(ticket).slice(ends[file], ends[file + 1] - ends[file])
                 for ticket, ends in self._batches if ends[file + 1] > ends[file]]
        return pa.Table.from_batches(parts or [self._spool.get(self._batches[0][0]).slice(0, 0)]).combine_chunks()


@dataclass(frozen=True)
class FileWriter:
    """Writes the files of one job."""

    placement: FileAssignment
    store: TableStore
    job: str
    runs: SpooledRows
    threads: Threads

    def path(self, file: int) -> str:
        ends = zip(self.placement.spec.table.split, self.placement.ends, strict=True)
        folder = f"{folder_of(self.job)}/split={next(split for split, end in ends if file < end)}"
        if self.placement.pairs:
            value = _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", self.placement.partitions[file])
            folder += f"/partition={value}"
        return f"{folder}/part-{file:05}.parquet"

    def finish(self, file: int) -> int:
        """Sorts a file's rows and writes them as `etl.spark.write.parquet_options` describes it. Returns how many."""
        rows, spec = self.runs.of(file), self.placement.spec
        self.threads.wanted()
        by = [rows[name].to_numpy() for name in ("_row", "_key", "_first") if name in rows.column_names]
        order = np.argsort(by[0]) if len(by) == 1 else np.lexsort(by)
        schema, group = arrow_schema(spec.fields({})), spec.table.row_group_rows
        rows, path = rows.select(schema.names), self.store.path(self.path(file))
        self.store.fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with self.store.fs.open_output_stream(path) as sink, pq.ParquetWriter(
                sink, schema, compression="lz4", use_dictionary=with_dictionaries(schema), write_page_checksum=True,
                store_schema=False) as writer:
            for start in range(0, len(order), group):
                self.threads.wanted()
                writer.write_table(rows.take(pa.array(order[start:start + group])).cast(schema), row_group_size=group)
        return len(order)
