"""Makes batches of placed windows: `Cutter`.

Stages pass on several consecutive batches at a time, as a `BatchSeries`, so that small batches share the cost.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from sluice.ingest.stages.bags import copy_bags
from sluice.ingest.stages.quarantine import Quarantine
from sluice.ingest.stages.shuffle import WindowRows

SERIES_ROWS = 65536
SERIES_BYTES = 256 * 2**20
LONG_S, SHORT_S = 0.25, 0.02
"""How long a transform may take for one series: LONG_S divided by the number of its workers, but at least SHORT_S. So a
slow transform delivers steadily, and all its workers have work even in a short epoch."""
_UNMEASURED_STEPS = 2
"""The most batches of a series while the time of a transform is not yet measured."""


class Chunk:
    """The memory of some consecutive batches, which are filled window by window."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], moved: Sequence[tuple[int, int]]):
        """`moved` are the columns that rows are moved to: the number of the array, and the column there."""
        self.arrays = arrays
        """Four arrays [batch, column, row]: floats, the ids of columns with one id a row, the number of ids of each row
        in each column of ids, and the address of each bag in two halves. Without bags, the last two have no column."""
        begins = [array.ctypes.data for array in arrays]
        self.addresses = np.array(
            [begins[n] + at * arrays[n].strides[1] for n, at in moved], np.uint64
        )
        """The address of each moved column in the chunk's first batch."""
        self.owners: list[Any] = []
        """What owns the memory at these addresses."""


class Chunks:
    """Hands out chunks by number. A chunk exists as long as a window has rows in it."""

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
        self._moved = [
            *((0, n) for n, name in enumerate(columns.floats) if name not in columns.added),
            *((1, n) for n, name in enumerate(columns.scalars) if name not in columns.added),
        ]
        for number, name in enumerate(bags):
            self._moved += [(2, columns.sparse.index(name)), (3, 2 * number), (3, 2 * number + 1)]
        self.strides = np.array([4 * rows * sizes[n] for n, _ in self._moved], np.int64)
        """For each moved column, the bytes from one batch in a chunk to the next."""
        self.buffers = buffers
        self._lock = threading.Lock()
        self._chunks: weakref.WeakValueDictionary[tuple[int, int], Chunk] = (
            weakref.WeakValueDictionary()
        )

    def take(self, epoch: int, number: int) -> Chunk:
        with self._lock:
            if chunk := self._chunks.get((epoch, number)):
                return chunk
            kinds = (np.float32, np.int32, np.int32, np.int32)
            arrays = map(self.buffers.take, self._shapes, kinds)
            chunk = self._chunks[epoch, number] = Chunk([*arrays], self._moved)
            return chunk


def most_steps(plan: RowsPlan, ranks: int, row_bytes: int) -> int:
    """Returns the number of batches in a chunk, and the most that a series may have: SERIES_ROWS rows or SERIES_BYTES,
    whichever is less."""
    rows = min(SERIES_ROWS, SERIES_BYTES // max(1, row_bytes))
    return max(1, rows * ranks // plan.batch_size)


@dataclass(frozen=True)
class Ids:
    """The ids of one batch in one array, column by column. Column n begins at `starts[n]`. Ids beyond int32 are stored
    as the same 32 bits."""

    values: npt.NDArray[Any]
    lengths: npt.NDArray[Any] | None
    """The number of ids of each row, column by column. None: every row has one id in each column."""
    starts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.lengths is None else self.lengths.nbytes)

    def of(self, column: int) -> npt.NDArray[Any]:
        return self.values[self.starts[column] : self.starts[column + 1]]

    def part(self, own: slice, columns: int, rows: int) -> Ids:
        """Returns the ids of some of the batch's `rows` rows."""
        lengths, low, high = None, [own.start] * columns, [own.stop] * columns
        if self.lengths is not None:
            whole = self.lengths.reshape(columns, rows)
            low, high = (whole[:, :row].sum(axis=1).tolist() for row in (own.start, own.stop))
            lengths = np.ascontiguousarray(whole[:, own]).reshape(-1)
        parts = [self.of(column)[low[column] : high[column]] for column in range(columns)]
        starts = tuple(itertools.accumulate(map(len, parts), initial=0))
        return Ids(np.concatenate([self.values[:0], *parts]), lengths, starts)


@dataclass(frozen=True)
class BatchSeries:
    """Several consecutive batches, `step` to `step + steps`: floats [batch, column, row], of which the weights are the
    last column, and the ids of each batch."""

    schedule: EpochSchedule
    step: int
    rows: tuple[int, ...]
    """The number of rows of each batch, without padding."""
    floats: npt.NDArray[Any]
    placed: Sequence[npt.NDArray[Any]] = ()
    """The part of all arrays of the chunk, until the batch stage makes ids of them."""
    windows: tuple[tuple[WindowRows, int], ...] = ()
    """The windows that the rows come from, each with their number, while these account for their memory."""
    ids: tuple[Ids, ...] = ()
    checksums: tuple[int, ...] = ()
    charge: Charge | None = None
    done: int = 0
    """The number of transform stages that are done."""
    batches: tuple[Batch, ...] = ()
    """The batches for the consumer, when all stages are done. Their memory is charged until the consumer asks for the
    next batch after them."""

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> npt.NDArray[Any]:
        return self.floats[:, -1]

    @property
    def nbytes(self) -> int:
        return self.floats.nbytes + sum(ids.nbytes for ids in self.ids)


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


class Cutter:
    """Makes batches of chunks. Many threads can use it."""

    def __init__(
        self,
        plan: RowsPlan,
        columns: Columns,
        share: RankShare,
        buffers: Buffers,
        quarantine: Quarantine,
        *,
        stages: int,
    ):
        """`stages` is the number of stages of transforms, which come before batches get their tensors."""
        self._plan = plan
        self._columns = columns
        self._buffers = buffers
        self._share = share
        self._quarantine = quarantine
        self._stages = stages
        self._rows = plan.batch_size // share.readers
        self.most_steps = most_steps(plan, share.readers, columns.row_bytes)
        self.longest_series_bytes = self.most_steps * self._rows * (columns.row_bytes + 4)
        self._checked = (
            None if columns.in_order_hash is None else columns.sparse.index(columns.in_order_hash)
        )
        self._added = [
            [n for n, name in enumerate(names) if name in columns.added]
            for names in (columns.floats, columns.scalars)
        ]
        self._starts = tuple(range(0, (len(columns.sparse) + 1) * self._rows, self._rows))
        self._bags = [columns.sparse.index(name) for name in columns.stored_bags]
        self._others = [n for n in range(len(columns.sparse)) if n not in self._bags]
        self._lengths = np.array(
            [[int(columns.sparse[n] not in columns.bags)] for n in self._others], np.int32
        ).reshape(-1, 1)
        """The number of ids of a row in each of `_others`, before a transform adds some."""
        self._ones = torch.ones(len(columns.sparse) * share.rows, dtype=torch.int32)

    def cut(
        self, windows: Iterable[WindowRows], chunks: Chunks, most: Callable[[], int]
    ) -> Iterator[BatchSeries]:
        """Yields series of at most `most()` batches as soon as all their rows are placed. Windows come in the order of
        need. The batch stage works on each series.

        The first one has one batch, and each further one has up to twice as many, so that the first batch comes early.
        On some ranks the last batch of an epoch is only padding, so its chunk is taken by number and not from a
        window."""
        plan, each = self._plan, self._plan.stream_rows
        schedule: EpochSchedule | None = None
        placed: dict[int, deque[WindowRows]] = {}
        """For each stream: the windows with rows that are in no series yet."""
        ends: dict[int, int] = {}
        """For each stream: the row after the last that is placed."""
        sizes: dict[int, int] = {}
        step, allowed = 0, 1
        for window in windows:
            if window.schedule is not schedule:
                schedule, step = window.schedule, window.schedule.step
                placed = {s: deque() for s in schedule.streams}
                ends = dict.fromkeys(schedule.streams, step * each)
                sizes = {s: plan.bounds(s)[1] - plan.bounds(s)[0] for s in schedule.streams}
            placed[window.window.stream].append(window)
            ends[window.window.stream] = window.end
            del window
            whole = min(plan.steps if ends[s] >= sizes[s] else ends[s] // each for s in ends)
            while steps := min(
                allowed, most(), plan.steps - step, chunks.steps - step % chunks.steps
            ):
                if step + steps > whole:
                    break
                allowed = min(2 * allowed, chunks.steps)
                chunk = chunks.take(schedule.epoch, step // chunks.steps)
                yield self._take(schedule, step, steps, chunk, placed)
                del chunk
                step += steps

    def _take(
        self,
        schedule: EpochSchedule,
        step: int,
        steps: int,
        chunk: Chunk,
        placed: Mapping[int, deque[WindowRows]],
    ) -> BatchSeries:
        """Takes the rows of some batches from the windows of each stream, and sets all values that no file holds."""
        each = self._plan.stream_rows
        end = (step + steps) * each
        windows, padding = [], []
        for lane, stream in enumerate(schedule.streams):
            low, high = self._plan.bounds(stream)
            if missing := end - min(end, high - low):
                padding.append(slice((lane + 1) * each - missing, (lane + 1) * each))
            queue = placed[stream]
            while queue and queue[0].first < end:
                rows = min(queue[0].end, end) - max(queue[0].first, step * each)
                windows.append((queue[0], rows))
                if queue[0].end > end:
                    break
                queue.popleft()
        real = [self._rows] * steps
        real[-1] -= sum(lanes.stop - lanes.start for lanes in padding)
        first = step % len(chunk.arrays[0])
        arrays = [array[first : first + steps] for array in chunk.arrays]
        floats, scalars, lengths, _ = arrays
        for array, added in zip((floats, scalars), self._added, strict=True):
            if added:
                array[:, added] = 0  # until a transform sets them
        if not self._columns.weight:
            floats[:, -1] = 1
        for lanes in padding:
            floats[-1, :, lanes] = scalars[-1, :, lanes] = 0
            lengths[-1, :, lanes] = 0
        return BatchSeries(schedule, step, tuple(real), floats, arrays, tuple(windows))

    def size(self, series: BatchSeries) -> int:
        """Returns the bytes to reserve for work on a series. Ids beyond int32 exist twice while they are copied."""
        ids = sum(part.values.nbytes for part in series.ids)
        nbytes = series.nbytes
        if series.placed:
            _, scalars, lengths, _ = series.placed
            ids = scalars.nbytes + 4 * int(lengths[:, self._bags].sum())
            nbytes += ids + lengths.nbytes
        return nbytes + 2 * ids * self._columns.wide

    def __call__(self, series: BatchSeries, charge: Charge) -> BatchSeries:
        ids = tuple(map(self._ids, *series.placed[1:]))
        series = replace(series, ids=ids, placed=())
        if self._share.parts > 1:
            series = self._part_of(series)
        number = self._checked
        checked = (
            series.floats[:, 0] if number is None else [part.of(number) for part in series.ids]
        )
        series = replace(series, checksums=tuple(crc32(array.data) for array in checked))
        self._quarantine.zero_lost_weights(series, self._columns)
        return self.pass_on(series, charge, 0)

    def pass_on(self, series: BatchSeries, charge: Charge, done: int) -> BatchSeries:
        """Returns a series after so many stages of transforms, with a charge of its own in place of the one before.
        After the last stage it gets its batches."""
        passed = self._with_batches(series) if done == self._stages else series
        for window, rows in series.windows:
            window.give_away(rows)
        if series.charge is not None:
            series.charge.release()
        return replace(passed, windows=(), charge=charge, done=done)

    def _part_of(self, series: BatchSeries) -> BatchSeries:
        """Returns this rank's rows of a stream that several ranks share. Padding rows are the last of the stream."""
        own, columns = self._share.bounds, len(self._columns.sparse)
        return replace(
            series,
            rows=tuple(min(max(0, rows - own.start), self._share.rows) for rows in series.rows),
            floats=np.ascontiguousarray(series.floats[:, :, own]),
            ids=tuple(part.part(own, columns, self._rows) for part in series.ids),
        )

    def _ids(
        self, single: npt.NDArray[Any], lengths: npt.NDArray[Any], places: npt.NDArray[Any]
    ) -> Ids:
        """Returns the ids of a batch. Those of bags are joined with those of columns with one id a row (`single`).
        Padding rows have empty bags."""
        if not self._columns.bags:
            return Ids(single.reshape(-1), None, self._starts)
        scalars = iter(single)
        lengths[self._others] = self._lengths
        starts = tuple(itertools.accumulate(lengths.sum(axis=1).tolist(), initial=0))
        values = self._buffers.take_line(starts[-1], np.int32)
        for column in self._others:
            if starts[column] < starts[column + 1]:
                values[starts[column] : starts[column + 1]] = next(scalars)
        for at, column in enumerate(self._bags):
            low, high = places[2 * at : 2 * at + 2]
            copy_bags(lengths[column], low, high, values[starts[column] :])
        return Ids(values, lengths.reshape(-1), starts)

    def _with_batches(self, series: BatchSeries) -> BatchSeries:
        """Makes the batches, of tensors. Only ids beyond int32 are copied."""
        self._quarantine.replace_non_finite(series, self._columns)
        if self._columns.wide:
            wide = (
                replace(i, values=i.values.view(np.uint32).astype(np.int64)) for i in series.ids
            )
            series = replace(series, ids=tuple(wide))
        dense = len(self._columns.dense)
        floats = torch.from_numpy(series.floats)
        # One call makes the views of all batches, because views cost small batches more than their rows.
        views = zip(
            floats[:, :dense].transpose(1, 2).unbind(),
            floats[:, dense].unbind(),
            floats[:, -1].unbind(),
            strict=True,
        )
        batches = tuple(
            Batch(
                dense=numbers,
                values=torch.from_numpy(ids.values),
                lengths=self._ones if ids.lengths is None else torch.from_numpy(ids.lengths),
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
        return replace(series, batches=batches)


def columns_of(series: BatchSeries, number: int, columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """Returns batch `number` of a series as a dict of arrays, which are views. A column of bags also has
    `NAME.lengths`."""
    ids = series.ids[number]
    # Weights that no file holds follow the columns.
    arrays: dict[str, npt.NDArray[Any]] = dict(
        zip(columns.floats, series.floats[number, : len(columns.floats)], strict=True)
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
    ones = np.ones(rows, np.int32)
    lengths = [arrays[lengths_name(n)] if n in columns.bags else ones for n in columns.sparse]
    starts = tuple(itertools.accumulate(map(len, parts), initial=0))
    return Ids(np.concatenate(parts), np.concatenate(lengths, dtype=np.int32), starts)
