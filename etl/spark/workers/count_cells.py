"""Counts in cells: `count_cells` groups them into parts by value, and `sum_cells` adds up those of one part."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from sluice.etl.apply.count_sums import CountSums
from sluice.etl.apply.counts import COUNTS
from sluice.etl.apply.parse import Batches
from sluice.etl.apply.row_store import COMPRESSED, split_by_number
from sluice.etl.ops.hashing import hash_texts
from sluice.etl.spark.workers.cells import read_stream, slices, write_cell

_BUDGET = 1 << 30
"""The memory of the counts of a part. A part has seldom more than a few MiB."""


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
    with contextlib.closing(CountSums(_BUDGET, least)) as sums:
        sums.add(read_counts(batches))
        for table in sums.tables():
            for rows in table.to_batches():
                for few in slices(rows):
                    cell = write_cell([few], COUNTS, COMPRESSED)
                    yield pa.record_batch(
                        [few["key"][:1], pa.array([few.num_rows], pa.int64()), cell],
                        ["key", "sums", "counts"],
                    )
