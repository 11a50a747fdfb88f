"""Cells: Arrow streams as single values, so that Spark moves bytes and not rows. `count_cells` groups counts into parts
by value, and `sum_cells` adds up those of one part. All functions run in the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from sluice.etl.apply.count_sums import CountSums
from sluice.etl.apply.parse import Batches
from sluice.etl.apply.row_counts import COUNTS
from sluice.etl.apply.row_store import COMPRESSED, split_by_number
from sluice.etl.ops.hashing import hash_texts

CELL_BYTES = 4 << 20
"""The size of a cell. Java has five copies of a cell in memory while it writes the cell."""
_BUDGET = 1 << 30
"""The memory of the counts of a part. A part has seldom more than a few MiB."""
READ = pa.ipc.IpcReadOptions(use_threads=False)


def write_cell(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Array:
    """Returns an array of one value, the cell with these batches. Does not copy the cell."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=COMPRESSED) as stream:
        for batch in batches:
            stream.write_batch(batch)
    cell = sink.getvalue()
    ends = pa.py_buffer(np.array([0, cell.size], np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, ends, cell])


def read_stream(cell: pa.BinaryScalar) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a cell."""
    # `as_py` copies the bytes. A cell may begin at any byte of its batch, and numbers must be aligned.
    yield from pa.ipc.open_stream(cell.as_py(), options=READ)


def read_numbers(batches: Batches) -> Iterator[int]:
    """Yields the numbers of the tasks that a worker does."""
    for batch in batches:
        yield from batch["id"].to_pylist()


def slices(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields the rows in parts of about `CELL_BYTES` or less."""
    step = max(1, -(-rows.num_rows // max(1, -(-rows.nbytes // CELL_BYTES))))
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)


def count_cells(counted: Sequence[pa.RecordBatch], parts: int) -> Batches:
    """Yields cells with the counts of each part. A value's hash decides its part."""
    filled = [batch for batch in counted if batch.num_rows]
    if not filled:
        return
    filled.sort(key=lambda batch: int(batch["key"][0].as_py()))
    whole = pa.concat_batches(filled)
    part = (hash_texts(whole["value"]) % np.uint64(parts)).astype(np.int32)
    # The rows of a part stay in the order of their keys.
    for number, rows in split_by_number(whole, part, parts):
        for few in slices(rows):
            cell = write_cell([few], rows.schema)
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
                    cell = write_cell([few], COUNTS)
                    yield pa.record_batch(
                        [few["key"][:1], pa.array([few.num_rows], pa.int64()), cell],
                        ["key", "sums", "counts"],
                    )
