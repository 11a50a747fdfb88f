"""The memory of batches that are being filled: `Chunks`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.ingest.columns import Columns
from sluice.ingest.flow.place_rows import BLOCKS
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.row_order import RowsPlan

SERIES_ROWS = 65536
SERIES_BYTES = 256 * 2**20


class Chunk:
    """The memory of some consecutive batches, which are filled read by read."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]):
        self.arrays = arrays
        """Four arrays [batch, column, row]: floats, the ids of columns with one id a row, the number of ids of each row
        in each column of ids, and the address of each bag in two halves. Without bags, the last two have no column."""
        steps = np.arange(len(arrays[0]), dtype=np.uint64)
        self.addresses = np.stack(
            [np.uint64(a.ctypes.data) + steps * np.uint64(a.strides[0]) for a in arrays], 1
        )
        """Where each array of each batch begins."""


class Chunks:
    """Hands out chunks by number. A chunk exists as long as it has rows that are in no batch yet."""

    def __init__(self, plan: RowsPlan, columns: Columns, ranks: int, buffers: Buffers):
        self.steps = most_steps(plan, ranks, columns.row_bytes)
        rows = plan.batch_size // ranks
        bags = columns.stored_bags
        sizes = (
            len(columns.floats) + (not columns.weight),  # the weights are always the last one
            len(columns.scalars),
            len(columns.sparse) if columns.bags else 0,
            2 * len(bags),
        )
        # Batches account for weights that no file holds.
        self.row_bytes = 4 * (sum(sizes) - (not columns.weight))
        self._shapes = [(self.steps, size, rows) for size in sizes]
        added = columns.added
        numbers = [
            *((0, 4 * rows * n) for n, name in enumerate(columns.floats) if name not in added),
            *((1, 4 * rows * n) for n, name in enumerate(columns.scalars) if name not in added),
        ]
        self.number_places = np.array(numbers, np.int64).reshape(-1, 2)
        """For each stored column of numbers, its array in a batch, and where it begins there, in bytes."""
        lines = [(columns.sparse.index(name), 2 * n, 2 * n + 1) for n, name in enumerate(bags)]
        self.bag_places = 4 * rows * np.array(lines, np.int64).reshape(-1, 3)
        """For each stored column of bags, where lengths, and both halves of addresses, begin in their arrays."""
        self._buffers = buffers
        self._lock = threading.Lock()
        self._chunks: weakref.WeakValueDictionary[tuple[int, int], Chunk] = (
            weakref.WeakValueDictionary()
        )

    def take(self, epoch: int, number: int) -> Chunk:
        with self._lock:
            if chunk := self._chunks.get((epoch, number)):
                return chunk
            kinds = (np.float32, np.int32, np.int32, np.int32)
            arrays = map(self._buffers.take, self._shapes, kinds)
            chunk = self._chunks[epoch, number] = Chunk([*arrays])
            return chunk

    def targets(
        self, epoch: int, first: int, last: int
    ) -> tuple[npt.NDArray[np.uint64], list[Chunk]]:
        """Returns where the arrays of the batches from `first` up to but without `last` begin, and their chunks."""
        targets, taken = np.zeros((last - first, BLOCKS), np.uint64), []
        for begin in range(first - first % self.steps, last, self.steps):
            taken.append(chunk := self.take(epoch, begin // self.steps))
            low, high = max(first, begin), min(last, begin + self.steps)
            targets[low - first : high - first] = chunk.addresses[low - begin : high - begin]
        return targets, taken


def most_steps(plan: RowsPlan, ranks: int, row_bytes: int) -> int:
    """Returns the number of batches in a chunk, and the most that a series may have: SERIES_ROWS rows or SERIES_BYTES,
    whichever is less."""
    rows = min(SERIES_ROWS, SERIES_BYTES // max(1, row_bytes))
    return max(1, rows * ranks // plan.batch_size)
