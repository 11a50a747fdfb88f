"""Counts in cells: `count_cells` groups them into parts by value, and `sum_cells` adds up those of one part."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from sluice.etl.apply.counts import COUNTS, kept_sums, sum_by_value
from sluice.etl.apply.parse import Batches
from sluice.etl.apply.row_store import COMPRESSED, split_by_number
from sluice.etl.ops.hashing import hash_texts
from sluice.etl.spark.workers.cells import read_stream, slices, write_cell

_ROWS_BEFORE_SUM = 1 << 19


def count_cells(counted: Sequence[pa.RecordBatch], parts: int) -> Batches:
    """Yields cells with the counts of each part. A value's hash decides its part."""
    found = [batch for batch in counted if batch.num_rows]
    if not found:
        return
    found.sort(key=lambda batch: int(batch["key"][0].as_py()))
    whole = pa.concat_batches(found)
    part = (hash_texts(whole["value"]) % np.uint64(parts)).astype(np.int32)
    # The rows of a part stay in the order of their keys.
    for number, rows in split_by_number(whole, part, parts):
        for few in slices(rows):
            cell = write_cell([few], rows.schema, COMPRESSED)
            yield pa.record_batch([pa.array([number], pa.int32()), cell], ["part", "counts"])


def read_counts(batches: Batches) -> Batches:
    """Yields the counts of cells."""
    for batch in batches:
        for cell in batch["counts"].drop_null():
            yield from read_stream(cell)


def sum_cells(least: Mapping[int, int], batches: Batches) -> Batches:
    """Yields cells with the sums of one part, each with its key and its number of sums. Leaves out a key's sums below
    `least`."""
    tables: dict[int, list[pa.Table]] = defaultdict(list)
    limit: dict[int, int] = defaultdict(lambda: _ROWS_BEFORE_SUM)
    for batch in read_counts(batches):
        for key, counts in _by_key(batch):
            tables[key].append(counts)
            if sum(map(len, tables[key])) > limit[key]:
                tables[key] = [sum_by_value(tables[key])]
                limit[key] = max(_ROWS_BEFORE_SUM, 2 * len(tables[key][0]))
    for key in sorted(tables):
        for rows in kept_sums(key, tables.pop(key), least.get(key, 1)).to_batches():
            for few in slices(rows):
                cell = write_cell([few], COUNTS, COMPRESSED)
                yield pa.record_batch(
                    [pa.array([key], pa.int32()), pa.array([few.num_rows], pa.int64()), cell],
                    ["key", "sums", "counts"],
                )


def _by_key(counts: pa.RecordBatch) -> Iterator[tuple[int, pa.Table]]:
    """Yields the values and counts of each key. Rows with the same key are next to each other."""
    keys = counts["key"].to_numpy()
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    for start, end in itertools.pairwise([*starts.tolist(), len(keys)]):
        part = counts.slice(start, end - start)
        yield int(keys[start]), pa.table(part.columns[1:], ["value", "count"])
