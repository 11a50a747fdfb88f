"""From blocks to what a trainer takes: `cuts`, `Cutter`, `Collator`, `Batch`.

Work goes in stretches of several consecutive batches, so that small batches do not pay for a hand-over each.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ingest.buffers import Buffers
from ingest.columns import Columns
from ingest.governor import Charge
from ingest.plan import RowsPlan, Schedule
from ingest.shuffle import Block

STRETCH_ROWS = 16384


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step of one rank takes. The tensors are views of memory that is used again once all are gone."""

    dense: torch.Tensor
    """[rows, dense columns] float32, feature by feature underneath."""
    values: torch.Tensor
    """[sparse columns × rows] int32: all ids of the first column, then of the second, as KeyedJaggedTensor has them."""
    lengths: torch.Tensor
    """[sparse columns × rows] int32: ids of each row. One tensor for all batches: do not write to it."""
    label: torch.Tensor
    """[rows] float32."""
    weight: torch.Tensor
    """[rows] float32: 0 marks a row that only fills the batch."""
    rows: int
    """Rows that are not filling."""
    epoch: int
    step: int
    checksum: int = field(default=0, repr=False)
    """Of one column's ids as read, before any transform: it goes into the order hash."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a stretch of batches lies: for each stream (block, first row, row after the last), in order."""

    schedule: Schedule
    step: int
    steps: int
    pieces: tuple[tuple[tuple[Block, int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Batches `step` to `step + steps`: [batch, column, row] of floats and of ids, and their weights [batch, row]."""

    schedule: Schedule
    step: int
    steps: int
    rows: tuple[int, ...]
    floats: npt.NDArray[Any]
    ids: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None
    checksums: tuple[int, ...]
    charge: Charge

    @property
    def nbytes(self) -> int:
        return self.floats.nbytes + self.ids.nbytes + (0 if self.weights is None else self.weights.nbytes)

    def with_charge(self, charge: Charge) -> Stretch:
        return replace(self, charge=charge)


@dataclass(frozen=True, slots=True)
class Ready:
    """Batches for the consumer, and what they hold until it has asked for the one after them."""

    batches: tuple[Batch, ...]
    nbytes: int
    charge: Charge


def most_steps(plan: RowsPlan, ranks: int) -> int:
    """Batches in a stretch, at most."""
    return max(1, STRETCH_ROWS * ranks // plan.batch_size)


def cuts(blocks: Iterable[Block], plan: RowsPlan, ranks: int) -> Iterator[Cut]:
    """As many batches at a time as the blocks at hand allow. Blocks come in the order of need."""
    each, most = plan.stream_rows, most_steps(plan, ranks)
    schedule: Schedule | None = None
    queues: dict[int, deque[tuple[Block, int]]] = {}  # of each stream: blocks, and the first row not yet cut
    held: dict[int, int] = {}  # rows at hand of each stream
    wanted: dict[int, int] = {}  # rows that a stream has left in this epoch
    step = 0
    for block in blocks:
        if block.schedule is not schedule:
            schedule, step = block.schedule, block.schedule.step
            queues = {s: deque() for s in schedule.streams}
            held = dict.fromkeys(schedule.streams, 0)
            wanted = {s: plan.bounds(s)[1] - plan.bounds(s)[0] - step * each for s in schedule.streams}
        stream = block.window.stream
        begin = max(0, schedule.step * each - block.window.first)
        if begin:
            block.taken(begin)  # a resumed run has used these already
        queues[stream].append((block, begin))
        held[stream] += block.rows - begin
        while step < plan.steps and all(held[s] >= min(each, wanted[s]) for s in schedule.streams):
            whole = min(held[s] // each for s in schedule.streams)
            steps = max(1, min(most, whole, plan.steps - step))  # 1: the last batch of an epoch may be short
            pieces = []
            for s in schedule.streams:
                count = min(steps * each, wanted[s])
                pieces.append(tuple(_slices(queues[s], count)))
                held[s] -= count
                wanted[s] -= count
            yield Cut(schedule, step, steps, tuple(pieces))
            del pieces
            step += steps
        del block


def _slices(queue: deque[tuple[Block, int]], count: int) -> Iterator[tuple[Block, int, int]]:
    while count:
        block, at = queue.popleft()
        take = min(count, block.rows - at)
        yield block, at, at + take
        if at + take < block.rows:
            queue.appendleft((block, at + take))
        count -= take


class Cutter:
    """One worker of the batch stage: copies slices of blocks into batches."""

    def __init__(self, plan: RowsPlan, columns: Columns, ranks: int, buffers: Buffers):
        self._plan, self._columns, self._buffers = plan, columns, buffers
        self._rows = plan.batch_size // ranks
        self._most = most_steps(plan, ranks)
        most_ids = max(columns.sparse, key=lambda name: columns.cardinalities.get(name, 0), default=None)
        self._checked = None if most_ids is None else columns.sparse.index(most_ids)

    def size(self, cut: Cut) -> int:
        return cut.steps * self._rows * (self._columns.row_bytes + (0 if self._columns.weight else 4))

    def __call__(self, cut: Cut, charge: Charge) -> Stretch:
        each, columns = self._plan.stream_rows, self._columns
        floats = self._buffers.take((self._most, len(columns.floats), self._rows), np.float32)[:cut.steps]
        ids = self._buffers.take((self._most, len(columns.sparse), self._rows), np.int32)[:cut.steps]
        weights = None
        if not columns.weight:
            weights = self._buffers.take((self._most, self._rows), np.float32)[:cut.steps]
            weights.fill(1)
        real = [self._rows] * cut.steps
        for position, pieces in enumerate(cut.pieces):
            done = 0
            for block, start, stop in pieces:
                for target, source in ((floats, block.floats), (ids, block.ids)):
                    _copy(target, source, (start, stop), each=each, at=position * each, done=done)
                block.taken(stop - start)
                done += stop - start
            if done < cut.steps * each:  # filling, in the last batch of an epoch
                low, high = position * each + done % each, (position + 1) * each
                floats[-1, :, low:high] = 0
                ids[-1, :, low:high] = 0
                if weights is not None:
                    weights[-1, low:high] = 0
                real[-1] -= high - low
        checked = floats[:, 0] if self._checked is None else ids[:, self._checked]
        return Stretch(cut.schedule, cut.step, cut.steps, tuple(real), floats, ids, weights,
                       tuple(zlib.crc32(checked[n]) for n in range(cut.steps)), charge)


def _copy(target: npt.NDArray[Any], source: npt.NDArray[Any], rows: tuple[int, int], *, each: int, at: int,
          done: int) -> None:
    """Some rows of a block to where its stream's rows lie in the batches; `done` rows of the stream are there."""
    start, stop = rows
    while start < stop:
        step, inside = divmod(done, each)
        whole = (stop - start) // each if not inside else 0
        if whole > 1:  # several batches in one call
            count = whole * each
            several = source[:, start:start + count].reshape(len(source), whole, each)
            target[step:step + whole, :, at:at + each] = several.swapaxes(0, 1)
        else:
            count = min(each - inside, stop - start)
            target[step, :, at + inside:at + inside + count] = source[:, start:start + count]
        start, done = start + count, done + count


class Collator:
    """One worker of the collate stage: batches as tensors, without a copy."""

    def __init__(self, columns: Columns, rows: int):
        self._columns = columns
        self._lengths = torch.ones(len(columns.sparse) * rows, dtype=torch.int32)

    def __call__(self, stretch: Stretch, charge: Charge) -> Ready:
        dense = len(self._columns.dense)
        floats, ids = torch.from_numpy(stretch.floats), torch.from_numpy(stretch.ids)
        weights = floats[:, dense + 1] if stretch.weights is None else torch.from_numpy(stretch.weights)
        batches = tuple(
            Batch(dense=floats[n, :dense].t(), values=ids[n].view(-1), lengths=self._lengths,
                  label=floats[n, dense], weight=weights[n], rows=stretch.rows[n], epoch=stretch.schedule.epoch,
                  step=stretch.step + n, checksum=stretch.checksums[n])
            for n in range(stretch.steps))
        stretch.charge.release()
        return Ready(batches, stretch.nbytes, charge)
