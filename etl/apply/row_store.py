"""`RowStore` stores batches by key, in memory up to a budget, then on the disk. `SortedRows` sorts the rows of one file
in the same way."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.etl.ops.hashing import Narrow, Whole

_PART_BYTES = 4 << 20
"""The size of the pieces in which a sorted run is read from the disk."""
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
        for (key, batch), kept in zip(batches, stored, strict=True):
            self._stored[key].append(kept)
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
    batch: pa.RecordBatch, numbers: Narrow, count: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields the rows of each number below `count`, if there are any, in their order."""
    order = np.argsort(numbers.astype(np.uint16 if count < 1 << 16 else np.int32), kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=count))
    grouped = batch.take(pa.array(order))
    for number, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end > start:
            yield number, grouped.slice(start, end - start)


class SortedRows:
    """Collects rows with the columns of `RowPlacement.finish`, and yields them in that order.

    Rows stay in memory up to a budget. Beyond it they wait on the disk in sorted runs, which are merged at the end.
    """

    def __init__(self, budget: int) -> None:
        """`budget` is the limit in bytes. A sort needs about three times as much memory."""
        self._budget = budget
        self._bytes = 0
        self._batches: list[pa.RecordBatch] = []
        self._disk = RowStore(0)
        self._runs = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > self._budget:
            self._write_run()

    def pieces(self, rows: int) -> Iterator[pa.Table]:
        """Yields all rows in tables of `rows` rows. Only the last table may be smaller. Call it once."""
        if not self._runs:
            table = self._take_rows()
            order = sort_order(table)
            for start in range(0, len(order), rows):
                yield table.take(pa.array(order[start : start + rows]))
            return
        if self._batches:
            self._write_run()
        waiting: list[pa.Table] = []
        for table in self._merge():
            waiting.append(table)
            if sum(map(len, waiting)) >= rows:
                whole = pa.concat_tables(waiting)
                ends = range(rows, len(whole) + 1, rows)
                for end in ends:
                    yield whole.slice(end - rows, rows)
                waiting = [whole.slice(ends[-1])]
        if any(map(len, waiting)):
            yield pa.concat_tables(waiting)

    def close(self) -> None:
        self._disk.close()

    def _take_rows(self) -> pa.Table:
        table = pa.Table.from_batches(self._batches).combine_chunks()
        self._batches, self._bytes = [], 0
        return table

    def _write_run(self) -> None:
        """Sorts the rows in memory, and writes them to the disk."""
        table = self._take_rows()
        step = max(1, _PART_BYTES * len(table) // max(1, table.nbytes))
        parts = table.take(pa.array(sort_order(table))).combine_chunks().to_batches(step)
        self._disk.put((self._runs, part) for part in parts)
        self._runs += 1

    def _merge(self) -> Iterator[pa.Table]:
        """Yields the rows of all runs in order. Has one part of each run in memory, or little more."""
        runs = {number: self._read(number) for number in range(self._runs)}
        table: pa.Table | None = None
        while runs or table:
            loaded = set(table["_run"].to_numpy().tolist()) if table else set()
            parts = [table] if table else []
            for number in runs.keys() - loaded:
                part = next(runs[number], None)
                if part is None:
                    del runs[number]
                else:
                    parts.append(part)
            if not parts:
                return
            table = pa.concat_tables(parts).combine_chunks()
            table = table.take(pa.array(sort_order(table)))
            of_run = table["_run"].to_numpy()
            # What follows the last loaded row of a run may follow rows that are not loaded, too.
            known = min(
                (int(np.flatnonzero(of_run == number)[-1]) + 1 for number in runs),
                default=len(table),
            )
            yield table.slice(0, known).drop_columns("_run")
            table = table.slice(known)

    def _read(self, number: int) -> Iterator[pa.Table]:
        """Yields the parts of a run, with its number."""
        for rows in self._disk.get(number):
            yield pa.Table.from_batches([rows]).append_column(
                "_run", pa.array(np.full(rows.num_rows, number, np.int32))
            )


def sort_order(rows: pa.Table) -> Whole:
    """Returns the numbers of the rows in the order of their file: see `RowPlacement.finish`."""
    names = ("_row", "_key", "_then", "_first")
    by = [rows[name].to_numpy() for name in names if name in rows.column_names]
    return np.argsort(by[0]) if len(by) == 1 else np.lexsort(by)
