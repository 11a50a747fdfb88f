"""`CountSums`: adds up counts by key and value from several threads.

If the counts exceed their memory budget, they are written to disk in parts, by the hash of their values. `total` then
needs only one part at a time in memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa

from sluice.etl.apply.counts import COUNTS, kept_sums, sum_by_value
from sluice.etl.apply.row_store import RowStore, split_by_number
from sluice.etl.local.threads import Threads
from sluice.etl.ops.hashing import hash_texts

_PARTS = 64
_ROWS_BEFORE_SUM = 1 << 19
_ROW_BYTES = 64
"""The memory of a count with a short text, also while counts are added up."""


class CountSums:
    """Sums of counts. `total` leaves out a key's sums below `least[key]`."""

    def __init__(self, threads: Threads, budget: int, least: Mapping[int, int]) -> None:
        self._threads = threads
        self._least = least
        self._lock = threading.Lock()
        self._most_rows = budget // _ROW_BYTES
        self._disk = RowStore(0)
        self._written = set[int]()
        """The keys whose counts are on the disk."""
        self._in_memory: dict[int, list[pa.Table]] = defaultdict(list)
        self._rows: dict[int, int] = defaultdict(int)
        """The rows in memory of each key."""
        self._limit: dict[int, int] = defaultdict(lambda: _ROWS_BEFORE_SUM)

    def add(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in batches:
            if batch.num_rows:
                self._add(batch["key"][0].as_py(), pa.table(batch.columns[1:], ["value", "count"]))

    def _add(self, key: int, counts: pa.Table) -> None:
        with self._lock:
            self._in_memory[key].append(counts)
            self._rows[key] += counts.num_rows
            if self._rows[key] < self._limit[key]:
                return
            taken = self._in_memory.pop(key)
            self._rows[key] = 0
        total = sum_by_value(taken)
        with self._lock:
            self._in_memory[key].append(total)
            self._rows[key] += total.num_rows
            self._limit[key] = max(_ROWS_BEFORE_SUM, 2 * total.num_rows)
            if sum(self._rows.values()) <= self._most_rows:
                return
            largest = max(self._rows, key=self._rows.__getitem__)
            taken = self._in_memory.pop(largest)
            self._rows[largest] = 0
        self._write_parts(largest, taken)

    def _write_parts(self, key: int, counts: list[pa.Table]) -> None:
        """Writes counts to the disk, in parts by the hash of their values."""
        self._written.add(key)
        for batch in sum_by_value(counts).combine_chunks().to_batches():
            part = (hash_texts(batch["value"]) % np.uint64(_PARTS)).astype(np.int32)
            parts = split_by_number(batch, part, _PARTS)
            self._disk.put(((key, number), rows) for number, rows in parts)

    def total(self, max_rows: int) -> pa.Table | None:
        """Returns all sums, as rows of (key, value, count). None: more than `max_rows` rows would be kept."""
        found, rows = [COUNTS.empty_table()], 0
        for table in self._threads.map(self._sum_piece, self._pieces()):
            found.append(table)
            if (rows := rows + table.num_rows) > max_rows:
                return None
        return pa.concat_tables(found)

    def _pieces(self) -> Iterator[tuple[int, list[pa.Table], int]]:
        for key in sorted(self._in_memory.keys() | self._written):
            tables = self._in_memory.pop(key, [])
            if key not in self._written:
                yield key, tables, -1
                continue
            self._write_parts(key, tables)
            yield from ((key, [], part) for part in range(_PARTS))

    def _sum_piece(self, taken: tuple[int, list[pa.Table], int]) -> pa.Table:
        key, tables, part = taken
        if part >= 0:
            tables = [pa.Table.from_batches([batch]) for batch in self._disk.get((key, part))]
        return kept_sums(key, tables, self._least.get(key, 1))

    def close(self) -> None:
        self._disk.close()
