"""Makes batches from blocks: `cuts`, `Cutter`, `Collator`.

Stages pass on several consecutive batches at a time, as a `BatchSeries`, so that small batches share the cost.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from zlib_ng.zlib_ng import crc32

from sluice.ingest.batch import Batch
from sluice.ingest.columns import Columns
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule, RankShare, RowsPlan
from sluice.ingest.stages.bags import HistoryViews
from sluice.ingest.stages.shuffle import Block, Chunk, Chunks, chunk_steps

SERIES_ROWS = 65536
SERIES_BYTES = 256 * 2**20
LONG_S, SHORT_S = 0.25, 0.02
"""How long a transform may take for one series: LONG_S divided by the number of its workers, but at least SHORT_S. So a
slow transform delivers steadily, and all its workers have work even in a short epoch."""
_UNMEASURED_STEPS = 2
"""The most batches of a series while the time of a transform is not yet measured."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive batches whose rows are complete. `pieces` has (block, first row, end row) for each stream."""

    schedule: EpochSchedule
    step: int
    steps: int
    chunk: Chunk
    pieces: tuple[tuple[tuple[Block, int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of one batch in one array, column by column. Column n begins at `starts[n]`. Ids beyond int32 are stored
    as the same 32 bits."""

    values: npt.NDArray[Any]
    lengths: npt.NDArray[Any] | None
    """The number of ids of each row, column by column. None: every row has one id in each column."""
    starts: tuple[int, ...]

    def of(self, column: int) -> npt.NDArray[Any]:
        return self.values[self.starts[column] : self.starts[column + 1]]

    def part(self, own: slice, columns: int, rows: int) -> Ids:
        """Returns the ids of some of the batch's `rows` rows."""
        lengths = None if self.lengths is None else self.lengths.reshape(columns, rows)
        parts = []
        for column in range(columns):
            first = own.start
            end = own.stop
            if lengths is not None:
                first = int(lengths[column, : own.start].sum())
                end = first + int(lengths[column, own].sum())
            parts.append(self.of(column)[first:end])
        starts = tuple(itertools.accumulate(map(len, parts), initial=0))
        values = np.concatenate(parts) if parts else self.values[:0]
        return Ids(
            values,
            None if lengths is None else np.ascontiguousarray(lengths[:, own]).reshape(-1),
            starts,
        )


@dataclass(frozen=True, slots=True)
class BatchSeries:
    """Several consecutive batches, `step` to `step + steps`: floats [batch, column, row], the ids of each batch, and
    weights [batch, row]."""

    schedule: EpochSchedule
    step: int
    rows: tuple[int, ...]
    floats: npt.NDArray[Any]
    ids: tuple[Ids, ...]
    weights: npt.NDArray[Any] | None
    checksums: tuple[int, ...]
    charge: Charge
    done: int = 0
    """The number of transform stages that are done."""

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        ids = sum(
            i.values.nbytes + (0 if i.lengths is None else i.lengths.nbytes) for i in self.ids
        )
        return self.floats.nbytes + ids + (0 if self.weights is None else self.weights.nbytes)

    def replaced(self, **changes: Any) -> BatchSeries:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Ready:
    """Batches for the consumer. Their memory is charged until the consumer asks for the next batch after them."""

    batches: tuple[Batch, ...]
    nbytes: int
    charge: Charge


def most_steps(plan: RowsPlan, ranks: int, row_bytes: int = 0) -> int:
    """Returns the most batches that a series may have: SERIES_ROWS rows or SERIES_BYTES, whichever is less."""
    rows = min(SERIES_ROWS, SERIES_BYTES // max(1, row_bytes))
    return max(1, rows * ranks // plan.batch_size)


def series_steps(most: int, batch_rows: int, work: Iterable[tuple[float, int, int]]) -> int:
    """Returns how many batches a series should have, at most `most`. `work` has for each transform stage the busy
    seconds and rows so far, and the number of its workers."""
    for busy_s, rows, workers in work:
        steps = _UNMEASURED_STEPS
        if rows:
            longest_s = max(SHORT_S, LONG_S / workers)
            steps = int(min(most, longest_s * rows / max(1e-9, busy_s * batch_rows)))
        most = max(1, min(most, steps))
    return most


def cuts(
    blocks: Iterable[Block], plan: RowsPlan, ranks: int, chunks: Chunks, most: Callable[[], int]
) -> Iterator[Cut]:
    """Yields cuts of at most `most()` batches as soon as all their rows are there. Blocks come in the order of need.

    The first cut has one batch, and each further one has up to twice as many, so that the first batch comes early. On
    some ranks the last batch of an epoch is only padding, so its chunk is taken by number and not from a block."""
    each = plan.stream_rows
    chunk_size = chunk_steps(plan, ranks)
    longest = most_steps(plan, ranks)
    schedule: EpochSchedule | None = None
    # For each stream: its blocks with the first row of each that is not yet cut, the number of rows in these blocks,
    # and the number of rows that are not yet cut in this epoch.
    queues: dict[int, deque[tuple[Block, int]]] = {}
    available: dict[int, int] = {}
    missing: dict[int, int] = {}
    step = 0
    allowed = 1
    for block in blocks:
        if block.schedule is not schedule:
            schedule = block.schedule
            step = schedule.step
            queues = {s: deque() for s in schedule.streams}
            available = dict.fromkeys(schedule.streams, 0)
            missing = {
                s: plan.bounds(s)[1] - plan.bounds(s)[0] - step * each for s in schedule.streams
            }
        stream = block.window.stream
        queues[stream].append((block, 0))
        available[stream] += block.rows
        while (
            steps := min(allowed, most(), plan.steps - step, chunk_size - step % chunk_size)
        ) and all(available[s] >= min(steps * each, missing[s]) for s in schedule.streams):
            allowed = min(2 * allowed, longest)
            chunk = chunks.take(schedule.epoch, step // chunk_size)
            pieces = []
            for s in schedule.streams:
                count = min(steps * each, missing[s])
                pieces.append(tuple(_take_rows(queues[s], count)))
                available[s] -= count
                missing[s] -= count
            yield Cut(schedule, step, steps, chunk, tuple(pieces))
            del pieces, chunk
            step += steps
        del block


def _take_rows(queue: deque[tuple[Block, int]], count: int) -> Iterator[tuple[Block, int, int]]:
    """Takes the next `count` rows from a queue of blocks."""
    while count:
        block, at = queue.popleft()
        take = min(count, block.rows - at)
        yield block, at, at + take
        if at + take < block.rows:
            queue.appendleft((block, at + take))
        count -= take


class Cutter:
    """One worker of the batch stage. It completes batches with padding, weights and bags."""

    def __init__(self, plan: RowsPlan, columns: Columns, share: RankShare, buffers: Buffers):
        self._plan = plan
        self._columns = columns
        self._buffers = buffers
        self._share = share
        self._rows = plan.batch_size // share.readers
        self._most = most_steps(plan, share.readers, columns.row_bytes)
        self._checked = (
            None if columns.in_order_hash is None else columns.sparse.index(columns.in_order_hash)
        )
        self._added = [
            [n for n, name in enumerate(names) if name in columns.added]
            for names in (columns.floats, columns.scalars)
        ]
        self._starts = tuple(range(0, (len(columns.sparse) + 1) * self._rows, self._rows))

    def size(self, cut: Cut) -> int:
        """Returns the bytes of the batches of a cut."""
        columns = self._columns
        bags = sum(
            4 * block.bags[name].count(start, stop)
            for pieces in cut.pieces
            for block, start, stop in pieces
            for name in columns.stored_bags
        )
        lengths = 4 * len(columns.sparse) if columns.bags else 0
        numbers = 4 * (len(columns.floats) + len(columns.scalars) + (not columns.weight)) + lengths
        return cut.steps * self._rows * numbers + bags

    def __call__(self, cut: Cut, charge: Charge) -> BatchSeries:
        columns, steps = self._columns, cut.steps
        first = cut.step % len(cut.chunk.floats)
        floats, scalars = (a[first : first + steps] for a in (cut.chunk.floats, cut.chunk.ids))
        for array, added in zip((floats, scalars), self._added, strict=True):
            if added:
                array[:, added] = 0  # until a transform sets them
        weights = None
        if not columns.weight:
            weights = self._buffers.take((self._most, self._rows), np.float32)[:steps]
            weights.fill(1)
        real = self._fill(cut, floats, scalars, weights)
        if columns.bags:
            ids = tuple(self._with_bags(cut, n, scalars[n]) for n in range(steps))
        else:
            ids = tuple(Ids(scalars[n].reshape(-1), None, self._starts) for n in range(steps))
        for pieces in cut.pieces:
            for block, start, stop in pieces:
                block.taken(stop - start)
        if self._share.parts > 1:
            floats, ids, weights, real = self._part_of(floats, ids, weights, real)
        checked = [
            floats[n, 0] if self._checked is None else ids[n].of(self._checked)
            for n in range(steps)
        ]
        return BatchSeries(
            cut.schedule,
            cut.step,
            real,
            floats,
            ids,
            weights,
            tuple(crc32(array.data) for array in checked),
            charge,
        )

    def _part_of(
        self,
        floats: npt.NDArray[Any],
        ids: tuple[Ids, ...],
        weights: npt.NDArray[Any] | None,
        real: tuple[int, ...],
    ) -> tuple[npt.NDArray[Any], tuple[Ids, ...], npt.NDArray[Any] | None, tuple[int, ...]]:
        """Returns this rank's rows of a stream that several ranks share. Padding rows are the last of the stream."""
        own = self._share.bounds
        columns = len(self._columns.sparse)
        return (
            np.ascontiguousarray(floats[:, :, own]),
            tuple(one.part(own, columns, self._rows) for one in ids),
            None if weights is None else np.ascontiguousarray(weights[:, own]),
            tuple(min(max(0, rows - own.start), self._share.rows) for rows in real),
        )

    def _fill(
        self,
        cut: Cut,
        floats: npt.NDArray[Any],
        scalars: npt.NDArray[Any],
        weights: npt.NDArray[Any] | None,
    ) -> tuple[int, ...]:
        """Pads the last batch of an epoch with zeros. Returns the number of real rows of each batch."""
        each = self._plan.stream_rows
        real = [self._rows] * cut.steps
        for lane, pieces in enumerate(cut.pieces):
            rows = sum(stop - start for _, start, stop in pieces)
            if rows < cut.steps * each:
                low = lane * each + rows % each
                high = (lane + 1) * each
                floats[-1, :, low:high] = 0
                scalars[-1, :, low:high] = 0
                if weights is not None:
                    weights[-1, low:high] = 0
                real[-1] -= high - low
        return tuple(real)

    def _with_bags(self, cut: Cut, number: int, scalars: npt.NDArray[Any]) -> Ids:
        """Joins the ids of one batch. Padding rows have empty bags."""
        columns, each = self._columns, self._plan.stream_rows
        lanes = [
            (lane, at, block, start, stop)
            for lane, pieces in enumerate(cut.pieces)
            for block, start, stop, at in _rows_of_batch(pieces, number * each, each)
        ]
        lengths = self._buffers.take((len(columns.sparse), self._rows), np.int32)
        starts = [0]
        scalar_numbers = iter(range(len(columns.scalars)))
        parts: list[npt.NDArray[Any]] = []
        histories: list[tuple[HistoryViews, int, int]] = []
        for column, name in enumerate(columns.sparse):
            if name not in columns.bags:
                lengths[column] = 1
                parts.append(scalars[next(scalar_numbers)])
                starts.append(starts[-1] + self._rows)
                continue
            lengths[column] = 0
            size = 0
            for lane, at, block, start, stop in lanes if name not in columns.added else ():
                bags = block.bags[name]
                low = lane * each + at
                lengths[column, low : low + stop - start] = bags.lengths(start, stop)
                size += bags.count(start, stop)
                if isinstance(bags, HistoryViews):
                    histories.append((bags, start, stop))
                else:
                    parts.append(bags.ids(start, stop))
            starts.append(starts[-1] + size)
        values = self._buffers.take_line(starts[-1], np.int32)
        at = starts[len(columns.sparse) - len(columns.histories)]
        np.concatenate(parts or [values[:0]], out=values[:at])
        for views, start, stop in histories:
            end = at + views.count(start, stop)
            views.copy_ids(start, stop, values[at:end])
            at = end
        return Ids(values, lengths.reshape(-1), tuple(starts))


def _rows_of_batch(
    pieces: tuple[tuple[Block, int, int], ...], first: int, count: int
) -> Iterator[tuple[Block, int, int, int]]:
    """Yields the parts of pieces within `count` rows from row `first` on, counted over all pieces, and each part's
    distance from `first`."""
    done = 0
    for block, start, stop in pieces:
        low, high = max(first, done), min(first + count, done + stop - start)
        if low < high:
            yield block, start + low - done, start + high - done, low - first
        done += stop - start


class Collator:
    """One worker of the collate stage. It makes batches of tensors. Only ids beyond int32 are copied."""

    def __init__(self, columns: Columns, rows: int):
        self._columns = columns
        self._wide = columns.wide
        self._lengths = torch.ones(len(columns.sparse) * rows, dtype=torch.int32)

    def __call__(self, series: BatchSeries, charge: Charge) -> Ready:
        dense = len(self._columns.dense)
        floats = torch.from_numpy(series.floats)
        weights = (
            floats[:, dense + 1] if series.weights is None else torch.from_numpy(series.weights)
        )
        # One call makes the views of all batches, because views cost small batches more than their rows.
        views = zip(
            floats[:, :dense].transpose(1, 2).unbind(),
            floats[:, dense].unbind(),
            weights.unbind(),
            strict=True,
        )
        batches = tuple(
            Batch(
                dense=numbers,
                values=self._values(ids),
                lengths=self._lengths if ids.lengths is None else torch.from_numpy(ids.lengths),
                label=label,
                weight=weight,
                rows=series.rows[n],
                epoch=series.schedule.epoch,
                step=series.step + n,
                checksum=series.checksums[n],
                columns=self._columns,
            )
            for n, (ids, (numbers, label, weight)) in enumerate(zip(series.ids, views, strict=True))
        )
        series.charge.release()
        return Ready(batches, self.size(series), charge)

    def size(self, series: BatchSeries) -> int:
        """Returns the bytes of the batches of a series."""
        return series.nbytes + (sum(ids.values.nbytes for ids in series.ids) if self._wide else 0)

    def _values(self, ids: Ids) -> torch.Tensor:
        """Returns a batch's ids as int32, or all as int64 if some do not fit int32."""
        return torch.from_numpy(
            ids.values.view(np.uint32).astype(np.int64) if self._wide else ids.values
        )


def columns_of(series: BatchSeries, number: int, columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """Returns batch `number` of a series as a dict of arrays, which are views. A column of bags also has
    `NAME.lengths`."""
    ids = series.ids[number]
    arrays: dict[str, npt.NDArray[Any]] = dict(
        zip(columns.floats, series.floats[number], strict=True)
    )
    if ids.lengths is None:
        rows = ids.values.reshape(len(columns.sparse), series.floats.shape[2])
        arrays.update(zip(columns.sparse, rows, strict=True))
    else:
        lengths = ids.lengths.reshape(len(columns.sparse), -1)
        for column, name in enumerate(columns.sparse):
            arrays[name] = ids.of(column)
            if name in columns.bags:
                arrays[lengths_name(name)] = lengths[column]
    for name in columns.sparse if columns.wide or columns.histories else ():
        arrays[name] = arrays[name].view(columns.value_kind(name))
    return arrays


def lengths_name(column: str) -> str:
    return f"{column}.lengths"


def join_ids(columns: Columns, arrays: Mapping[str, npt.NDArray[Any]], rows: int) -> Ids:
    """Joins the ids of a batch after a transform has changed lengths of bags."""
    parts = [arrays[name].view(np.int32) for name in columns.sparse]
    lengths = np.ones((len(parts), rows), np.int32)
    for column, name in enumerate(columns.sparse):
        if name in columns.bags:
            lengths[column] = arrays[lengths_name(name)]
    starts = tuple(itertools.accumulate(map(len, parts), initial=0))
    return Ids(np.concatenate(parts), lengths.reshape(-1), starts)
