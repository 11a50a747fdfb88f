"""Counts by key and value, added up as threads find them: `CountSums`, which sets parts down on the disk when they
outgrow their budget, each part by the hash of its values, so that no more than a part must be in memory again."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa

from sluice.etl.apply.counts import COUNTS
from sluice.etl.local.spool import Spool, Ticket
from sluice.etl.local.threads import Threads
from sluice.etl.ops.hashing import hash_texts

_PARTS = 64
_ROWS_BEFORE_SUM = 1 << 19
_ROW_BYTES = 32  # of an offset, a count and a short text


class CountSums:
    """`least` are the sums below which a key's values are left out."""

    def __init__(self, threads: Threads, budget: int, least: Mapping[int, int]) -> None:
        self._threads, self._least = threads, least
        self._most_rows = budget // _ROW_BYTES
        self._held: dict[int, list[pa.Table]] = defaultdict(list)
        self._rows: dict[int, int] = defaultdict(int)
        self._limit: dict[int, int] = defaultdict(lambda: _ROWS_BEFORE_SUM)
        self._lock = threading.Lock()
        self._spool = Spool(0)  # what is set down goes to the disk
        self._parts: dict[tuple[int, int], list[Ticket]] = defaultdict(list)

    def add(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in batches:
            if batch.num_rows:
                self._add(batch["key"][0].as_py(), pa.table(batch.columns[1:], ["value", "count"]))

    def _add(self, key: int, counts: pa.Table) -> None:
        with self._lock:
            self._held[key].append(counts)
            self._rows[key] += counts.num_rows
            if self._rows[key] < self._limit[key]:
                return
            taken, self._held[key], self._rows[key] = self._held[key], [], 0
        whole = summed(taken)
        with self._lock:
            self._held[key].append(whole)
            self._rows[key] += whole.num_rows
            self._limit[key] = max(_ROWS_BEFORE_SUM, 2 * whole.num_rows)
            largest = None
            if sum(self._rows.values()) > self._most_rows:
                key = max(self._rows, key=self._rows.__getitem__)
                largest, self._held[key], self._rows[key] = self._held[key], [], 0
                self._limit[key] = _ROWS_BEFORE_SUM
        if largest:
            self._set_down(key, summed(largest))

    def _set_down(self, key: int, counts: pa.Table) -> None:
        for part, found in _parted(counts):
            ticket = self._spool.put(found.to_batches()[0])
            with self._lock:
                self._parts[key, part].append(ticket)

    def total(self, most: int) -> pa.Table | None:
        """All sums, as rows of (key, value, count); None if more than `most` rows are to be kept."""
        found, rows = [], 0
        for table in self._threads.over(self._whole, self._each()):
            found.append(table)
            if (rows := rows + table.num_rows) > most:
                return None
        return pa.concat_tables(found) if found else COUNTS.empty_table()

    def _each(self) -> Iterator[tuple[int, list[pa.Table], list[Ticket]]]:
        spilled = {key for key, _ in self._parts}
        for key in sorted(self._held.keys() | spilled):
            held = self._held.pop(key, [])
            if key not in spilled:
                yield key, held, []
                continue
            parts = dict(_parted(summed(held))) if held else {}
            for part in range(_PARTS):
                yield key, [parts[part]] if part in parts else [], self._parts.pop((key, part), [])

    def _whole(self, taken: tuple[int, list[pa.Table], list[Ticket]]) -> pa.Table:
        key, held, tickets = taken
        whole = summed([*held, *(pa.Table.from_batches([self._spool.get(ticket)]) for ticket in tickets)])
        if self._least.get(key, 1) > 1:
            whole = whole.filter(pa.compute.greater_equal(whole["count"], self._least[key]))
        return whole.add_column(0, COUNTS.field("key"), pa.array(np.full(whole.num_rows, key, np.int32))).cast(COUNTS)

    def close(self) -> int:
        return self._spool.close()


def summed(tables: list[pa.Table]) -> pa.Table:
    if not tables:
        return pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
    whole = pa.concat_tables(tables)
    return whole.group_by("value", use_threads=False).aggregate([("count", "sum")]).rename_columns(["value", "count"])


def _parted(counts: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """The counts by the hash of their values: parts that have no value in common."""
    counts = counts.combine_chunks()
    parts = (hash_texts(counts["value"].chunk(0)) % np.uint64(_PARTS)).astype(np.uint8) if counts.num_rows else \
        np.empty(0, np.uint8)
    order = np.argsort(parts, kind="stable")
    ends = np.searchsorted(parts[order], np.arange(_PARTS + 1))
    taken = counts.take(pa.array(order)).combine_chunks()
    for part in range(_PARTS):
        if ends[part + 1] > ends[part]:
            # Copied: a slice would be written with the rows around it.
            yield part, pa.Table.from_batches([pa.concat_batches(
                taken.slice(ends[part], ends[part + 1] - ends[part]).to_batches())])
