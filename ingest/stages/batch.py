"""Makes batches of placed windows: `Cutter`, `Collator`.

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
    """The memory of some consecutive batches, which are filled window by window: four arrays [batch, column, row]."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], moved: Sequence[tuple[int, int]]):
        """`moved` are the columns that rows are moved to: the number of the array, and the column there."""
        self.floats, self.ids, self.lengths, self.places = arrays
        """`ids` are those of columns with one id a row. `lengths` has the number of ids of each row in each column of
        ids, and `places` the address of each bag in two halves. Without bags, both have no column."""
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
class Cut:
    """Consecutive batches of a chunk whose rows are all there."""

    schedule: EpochSchedule
    step: int
    rows: tuple[int, ...]
    """The number of rows of each batch, without padding."""
    chunk: Chunk
    padding: tuple[slice, ...]
    """The rows of the last batch that only fill it. Their bags are empty already."""
    windows: tuple[tuple[WindowRows, int], ...]
    """The windows that these rows come from, each with their number."""

    @property
    def batches(self) -> slice:
        """The places of the batches in the chunk."""
        first = self.step % len(self.chunk.floats)
        return slice(first, first + len(self.rows))


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
    floats: npt.NDArray[Any]
    ids: tuple[Ids, ...]
    checksums: tuple[int, ...]
    charge: Charge
    done: int = 0
    """The number of transform stages that are done."""

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> npt.NDArray[Any]:
        return self.floats[:, -1]

    @property
    def nbytes(self) -> int:
        return self.floats.nbytes + sum(ids.nbytes for ids in self.ids)


@dataclass(frozen=True)
class Ready:
    """Batches for the consumer. Their memory is charged until the consumer asks for the next batch after them."""

    batches: tuple[Batch, ...]
    nbytes: int
    charge: Charge


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
    ):
        self._plan = plan
        self._columns = columns
        self._buffers = buffers
        self._share = share
        self._quarantine = quarantine
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

    def cuts(
        self, windows: Iterable[WindowRows], chunks: Chunks, most: Callable[[], int]
    ) -> Iterator[Cut]:
        """Yields cuts of at most `most()` batches as soon as all their rows are placed. Windows come in the order of
        need.

        The first cut has one batch, and each further one has up to twice as many, so that the first batch comes early.
        On some ranks the last batch of an epoch is only padding, so its chunk is taken by number and not from a
        window."""
        plan, each = self._plan, self._plan.stream_rows
        schedule: EpochSchedule | None = None
        placed: dict[int, deque[WindowRows]] = {}
        """For each stream: the windows with rows that are in no cut yet."""
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
                yield self._cut(schedule, step, steps, chunk, placed)
                del chunk
                step += steps

    def _cut(
        self,
        schedule: EpochSchedule,
        step: int,
        steps: int,
        chunk: Chunk,
        placed: Mapping[int, deque[WindowRows]],
    ) -> Cut:
        """Takes the rows of some batches from the windows of each stream."""
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
        cut = Cut(schedule, step, tuple(real), chunk, tuple(padding), tuple(windows))
        for lanes in padding:
            chunk.lengths[cut.batches.stop - 1, :, lanes] = 0
        return cut

    def size(self, cut: Cut) -> int:
        """Returns the bytes of the batches of a cut."""
        columns = self._columns
        lengths = 4 * len(columns.sparse) if columns.bags else 0
        numbers = 4 * (len(columns.floats) + len(columns.scalars) + (not columns.weight)) + lengths
        bags = 4 * int(cut.chunk.lengths[cut.batches, self._bags].sum()) if self._bags else 0
        return len(cut.rows) * self._rows * numbers + bags

    def __call__(self, cut: Cut, charge: Charge) -> BatchSeries:
        columns, batches, steps = self._columns, cut.batches, len(cut.rows)
        floats, scalars = cut.chunk.floats[batches], cut.chunk.ids[batches]
        for array, added in zip((floats, scalars), self._added, strict=True):
            if added:
                array[:, added] = 0  # until a transform sets them
        if not columns.weight:
            floats[:, -1] = 1
        for lanes in cut.padding:
            floats[-1, :, lanes] = scalars[-1, :, lanes] = 0
        if columns.bags:
            ids = tuple(self._with_bags(cut.chunk, batches.start + n) for n in range(steps))
        else:
            ids = tuple(Ids(scalars[n].reshape(-1), None, self._starts) for n in range(steps))
        for window, rows in cut.windows:
            window.give_away(rows)
        series = BatchSeries(cut.schedule, cut.step, cut.rows, floats, ids, (), charge)
        if self._share.parts > 1:
            series = self._part_of(series)
        number = self._checked
        checked = series.floats[:, 0] if number is None else [one.of(number) for one in series.ids]
        series = replace(series, checksums=tuple(crc32(array.data) for array in checked))
        self._quarantine.zero_lost_weights(series, columns)
        return series

    def _part_of(self, series: BatchSeries) -> BatchSeries:
        """Returns this rank's rows of a stream that several ranks share. Padding rows are the last of the stream."""
        own, columns = self._share.bounds, len(self._columns.sparse)
        return replace(
            series,
            rows=tuple(min(max(0, rows - own.start), self._share.rows) for rows in series.rows),
            floats=np.ascontiguousarray(series.floats[:, :, own]),
            ids=tuple(one.part(own, columns, self._rows) for one in series.ids),
        )

    def _with_bags(self, chunk: Chunk, number: int) -> Ids:
        """Joins the ids of batch `number` of a chunk. Padding rows have empty bags."""
        lengths, scalars, places = chunk.lengths[number], iter(chunk.ids[number]), chunk.places
        lengths[self._others] = self._lengths
        starts = tuple(itertools.accumulate(lengths.sum(axis=1).tolist(), initial=0))
        values = self._buffers.take_line(starts[-1], np.int32)
        for column in self._others:
            if starts[column] < starts[column + 1]:
                values[starts[column] : starts[column + 1]] = next(scalars)
        for at, column in enumerate(self._bags):
            low, high = places[number, 2 * at : 2 * at + 2]
            copy_bags(lengths[column], low, high, values[starts[column] :])
        return Ids(values, lengths.reshape(-1), starts)


class Collator:
    """One worker of the collate stage. It makes batches of tensors. Only ids beyond int32 are copied."""

    def __init__(self, columns: Columns, rows: int, quarantine: Quarantine):
        self._columns = columns
        self._quarantine = quarantine
        self._wide = columns.wide
        self._lengths = torch.ones(len(columns.sparse) * rows, dtype=torch.int32)

    def __call__(self, series: BatchSeries, charge: Charge) -> Ready:
        self._quarantine.replace_non_finite(series, self._columns)
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
        return series.nbytes + self._wide * sum(ids.values.nbytes for ids in series.ids)

    def _values(self, ids: Ids) -> torch.Tensor:
        """Returns a batch's ids as int32, or all as int64 if some do not fit int32."""
        return torch.from_numpy(
            ids.values.view(np.uint32).astype(np.int64) if self._wide else ids.values
        )


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
    one = np.ones(rows, np.int32)
    lengths = [arrays[lengths_name(n)] if n in columns.bags else one for n in columns.sparse]
    starts = tuple(itertools.accumulate(map(len, parts), initial=0))
    return Ids(np.concatenate(parts), np.concatenate(lengths, dtype=np.int32), starts)
