"""`CountSums`: adds up counts by key and value, from several threads or in a worker.

If the counts exceed their memory budget, they are written to disk in parts, by the hash of their values. `tables` then
needs only one part at a time in memory."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.row_counts import COUNTS
from sluice.etl.apply.row_store import RowStore, split_by_number
from sluice.etl.ops.hashing import hash_texts

_PARTS = 64
_ROWS_BEFORE_SUM = 1 << 19
_ROW_BYTES = 64
"""The memory of a count with a short text, also while counts are added up."""


class CountSums:
    """Sums of counts. `tables` leaves out a key's sums below `least[key]`."""

    def __init__(self, budget: int, least: Mapping[int, int]) -> None:
        """`budget` is in bytes."""
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
        """Adds counts as `COUNTS`. Rows with the same key are next to each other."""
        for batch in batches:
            keys = batch["key"].to_numpy()
            starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1)).tolist()
            for start, end in itertools.pairwise([*starts, len(keys)]):
                part = batch.slice(start, end - start)
                self._add(int(keys[start]), pa.table(part.columns[1:], ["value", "count"]))

    def _add(self, key: int, counts: pa.Table) -> None:
        with self._lock:
            self._in_memory[key].append(counts)
            self._rows[key] += counts.num_rows
            if self._rows[key] < self._limit[key]:
                return
            taken = self._in_memory.pop(key)
            self._rows[key] = 0
        total = _sum_by_value(taken)
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
        for batch in _sum_by_value(counts).combine_chunks().to_batches():
            part = (hash_texts(batch["value"]) % np.uint64(_PARTS)).astype(np.int32)
            parts = split_by_number(batch, part, _PARTS)
            self._disk.put(((key, number), rows) for number, rows in parts)

    def tables(self, call: Callable[..., Iterator[Any]] = map) -> Iterator[pa.Table]:
        """Yields all sums by rising keys, as `COUNTS`. `call` calls a function on many items, as `map` does."""
        return call(self._sum_piece, self._pieces())

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
        total, least = _sum_by_value(tables), self._least.get(key, 1)
        if least > 1:  # with 1, all are kept, because sums of numbers may be negative
            total = total.filter(pc.greater_equal(total["count"], least))
        keys = pa.array(np.full(len(total), key, np.int32))
        return total.add_column(0, COUNTS.field("key"), keys).cast(COUNTS)

    def close(self) -> None:
        self._disk.close()


def _sum_by_value(counts: Iterable[pa.Table]) -> pa.Table:
    """Returns the sum of each value. `counts` have columns (value, count)."""
    none = pa.table(COUNTS.empty_table().columns[1:], ["value", "count"])
    return (
        pa.concat_tables([none, *counts])
        .group_by("value", use_threads=False)
        .aggregate([("count", "sum")])
        .rename_columns(["value", "count"])
    )
