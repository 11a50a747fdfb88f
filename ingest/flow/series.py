"""The memory of batches that are being filled: `Chunks`."""

from __future__ import annotations

import functools
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
        self.addresses = addresses_of(arrays)
        """Where each array of each batch begins."""


def addresses_of(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """Returns where each of some arrays of batches begins, by batch."""
    steps = np.arange(len(arrays[0]), dtype=np.uint64)
    return np.stack([np.uint64(a.ctypes.data) + steps * np.uint64(a.strides[0]) for a in arrays], 1)


class Chunks:
    """Hands out chunks by number. A chunk exists as long as it has rows that are in no batch yet."""

    def __init__(
        self,
        plan: RowsPlan,
        columns: Columns,
        ranks: int,
        buffers: Buffers,
        *,
        has_numbers: bool = False,
    ):
        """`has_numbers`: each row has its number (`ReadTask.first`), by which functions over rows find it."""
        self.steps = most_steps(plan, ranks, columns.row_bytes)
        rows = plan.batch_size // ranks
        bags = columns.stored_bags
        sizes = (
            len(columns.floats) + (not columns.weight),  # the weights are always the last one
            len(columns.scalars),
            len(columns.sparse) if columns.bags else 0,
            2 * len(bags) + has_numbers,
        )
        # Batches account for weights that no file holds.
        self.row_bytes = 4 * (sum(sizes) - (not columns.weight))
        self._shapes = [(self.steps, size, rows) for size in sizes]
        self._columns, self._rows = columns, rows
        self.numbers = (3, 8 * rows * len(bags)) if has_numbers else None
        """The array of a batch with the numbers of its rows, and where they begin there, in bytes."""
        self.places_of = functools.cache(self._find_places)
        self._buffers = buffers
        self._lock = threading.Lock()
        self._chunks: weakref.WeakValueDictionary[tuple[int, int], Chunk] = (
            weakref.WeakValueDictionary()
        )

    def _find_places(
        self, added: frozenset[str]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns where columns begin in a batch, without those in `added`. For each column of numbers: its array, and
        the bytes before it there. For each column of bags: the bytes before its lengths, and before both halves of its
        addresses."""
        columns, rows = self._columns, self._rows
        numbers = [
            *((0, 4 * rows * n) for n, name in enumerate(columns.floats) if name not in added),
            *((1, 4 * rows * n) for n, name in enumerate(columns.scalars) if name not in added),
        ]
        lines = [
            (columns.sparse.index(name), 2 * n, 2 * n + 1)
            for n, name in enumerate(columns.stored_bags)
            if name not in added
        ]
        return (
            np.array(numbers, np.int64).reshape(-1, 2),
            4 * rows * np.array(lines, np.int64).reshape(-1, 3),
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
