"""`SpooledRows`: collects the rows of every file from several threads, in a `Spool`. `FileWriter` sorts and writes a
file."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.etl.apply.features import FileAssignment
from sluice.etl.local.threads import Threads
from sluice.etl.table.data_files import arrow_schema, folder_of, with_dictionaries
from sluice.etl.table.store import TableStore

_ESCAPED = re.compile(r"[\x01-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""The characters that Hive and Spark escape in a folder's name."""
_AS_STORED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


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
        with pa.ipc.new_stream(stored, batch.schema, options=_AS_STORED) as writer:
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
        order = np.argsort(
            files.astype(np.uint16 if self._files < 1 << 16 else np.int32), kind="stable"
        )
        counts = np.bincount(files, minlength=self._files)
        ticket = self._spool.put(
            batch.take(pa.array(order)), np.concatenate([[0], np.cumsum(counts)])
        )
        assert ticket is not None  # this spool's file has no limit
        with self._lock:
            self._batches.append(ticket)
            self.rows += counts
            self.row_bytes = max(self.row_bytes, int(batch.nbytes // max(1, batch.num_rows)))

    def of(self, file: int) -> pa.Table:
        """Returns all rows of a file, in any order."""
        tickets = [ticket for ticket in self._batches if ticket.ends[file + 1] > ticket.ends[file]]
        parts = [self._spool.get(ticket, file) for ticket in tickets or self._batches[:1]]
        return pa.Table.from_batches(parts).combine_chunks()


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
            value = _ESCAPED.sub(
                lambda found: f"%{ord(found[0]):02X}", self.placement.partitions[file]
            )
            folder += f"/partition={value}"
        return f"{folder}/part-{file:05}.parquet"

    def finish(self, file: int) -> int:
        """Sorts a file's rows and writes them with the options of `etl.spark.write.parquet_options`. Returns their
        number."""
        rows, spec = self.runs.of(file), self.placement.spec
        self.threads.check_wanted()
        by = [
            rows[name].to_numpy()
            for name in ("_row", "_key", "_first")
            if name in rows.column_names
        ]
        order = np.argsort(by[0]) if len(by) == 1 else np.lexsort(by)
        schema, group = arrow_schema(spec.fields({})), spec.table.row_group_rows
        rows, path = rows.select(schema.names), self.store.path(self.path(file))
        self.store.fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with (
            self.store.fs.open_output_stream(path) as sink,
            pq.ParquetWriter(
                sink,
                schema,
                compression="lz4",
                use_dictionary=with_dictionaries(schema),
                write_page_checksum=True,
                store_schema=False,
            ) as writer,
        ):
            for start in range(0, len(order), group):
                self.threads.check_wanted()
                writer.write_table(
                    rows.take(pa.array(order[start : start + group])).cast(schema),
                    row_group_size=group,
                )
        return len(order)
