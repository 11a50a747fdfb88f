"""`CountSums`: adds up counts by key and value from several threads.

If the counts exceed their memory budget, they are written to disk in parts, by the hash of their values. `total` then
needs only one part at a time in memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa

from sluice.etl.apply.counts import COUNTS, sum_by_value
from sluice.etl.apply.spool import Spool
from sluice.etl.local.spooled_rows import SpooledRows
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
        self._spool = Spool(0)  # uses only the disk
        self._in_memory: dict[int, list[pa.Table]] = defaultdict(list)
        self._rows: dict[int, int] = defaultdict(int)
        """The rows in memory of each key."""
        self._limit: dict[int, int] = defaultdict(lambda: _ROWS_BEFORE_SUM)
        self._parts: dict[int, SpooledRows] = defaultdict(lambda: SpooledRows(_PARTS, self._spool))

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
            taken, parts = self._in_memory.pop(largest), self._parts[largest]
            self._rows[largest] = 0
        _write_parts(sum_by_value(taken), parts)

    def total(self, max_rows: int) -> pa.Table | None:
        """Returns all sums, as rows of (key, value, count). None: more than `max_rows` rows would be kept."""
        found, rows = [COUNTS.empty_table()], 0
        for table in self._threads.map(self._sum_piece, self._pieces()):
            found.append(table)
            if (rows := rows + table.num_rows) > max_rows:
                return None
        return pa.concat_tables(found)

    def _pieces(self) -> Iterator[tuple[int, list[pa.Table], int]]:
        for key in sorted(self._in_memory.keys() | self._parts.keys()):
            tables = self._in_memory.pop(key, [])
            if key not in self._parts:
                yield key, tables, -1
                continue
            _write_parts(sum_by_value(tables), self._parts[key])
            yield from ((key, [], part) for part in range(_PARTS))

    def _sum_piece(self, taken: tuple[int, list[pa.Table], int]) -> pa.Table:
        key, tables, part = taken
        if part >= 0:
            tables = [pa.Table.from_batches([batch]) for batch in self._parts[key].of(part)]
        total = sum_by_value(tables)
        if self._least.get(key, 1) > 1:
            total = total.filter(pa.compute.greater_equal(total["count"], self._least[key]))
        return total.add_column(
            0, COUNTS.field("key"), pa.array(np.full(total.num_rows, key, np.int32))
        ).cast(COUNTS)

    def close(self) -> None:
        self._spool.close()


def _write_parts(counts: pa.Table, parts: SpooledRows) -> None:
    """Writes counts to the disk, in parts by the hash of their values."""
    for batch in counts.combine_chunks().to_batches():
        parts.add(batch, (hash_texts(batch["value"]) % np.uint64(_PARTS)).astype(np.int32))
