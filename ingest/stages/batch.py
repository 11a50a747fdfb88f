"""Finishes batches whose rows are placed: `Finisher`.

Stages pass on several consecutive batches at a time, as a `BatchSeries`, so that small batches share the cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from zlib_ng.zlib_ng import crc32

from sluice.ingest.batch import Batch
from sluice.ingest.columns import Columns, lengths_name
from sluice.ingest.flow.bags import copy_bags
from sluice.ingest.flow.decoded import Placed
from sluice.ingest.flow.series import most_steps
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule, RankShare, RowsPlan
from sluice.ingest.stages.quarantine import Quarantine

if TYPE_CHECKING:
    from sluice.ingest.stages.taken_rows import TakenRows

LONG_S, SHORT_S = 0.25, 0.02
"""How long a transform may take for one series: LONG_S divided by the number of its workers, but at least SHORT_S. So a
slow transform delivers steadily, and all its workers have work even in a short epoch."""
_UNMEASURED_STEPS = 2
"""The most batches of a series while the time of a transform is not yet measured."""


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
    """The part of all arrays of the chunk, until ids are made of them."""
    reads: tuple[tuple[Placed, int], ...] = ()
    """The reads that the rows come from, each with their number, while these account for their memory."""
    padding: tuple[slice, ...] = ()
    """Where the last batch has padding rows."""
    ids: tuple[Ids, ...] = ()
    checksums: tuple[int, ...] = ()
    charge: Charge | None = None
    batches: tuple[Batch, ...] = ()
    """The batches for the consumer, when all stages are done. Their memory is charged until the consumer asks for the
    next batch after them."""
    taken: tuple[TakenRows, ...] = ()
    """The rows with the columns that the next function over rows gets, between two of these functions."""
    owners: tuple[Any, ...] = ()
    """What owns the ids of bags that functions over rows have made, until they are copied."""

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> npt.NDArray[Any]:
        return self.floats[:, -1]

    @property
    def nbytes(self) -> int:
        """Its bytes, with those of the rows that wait for its next function over rows."""
        tables: int = sum(rows.table.get_total_buffer_size() for rows in self.taken)
        arrays = (*self.placed, *self.owners) or (self.floats, *self.ids)
        return tables + sum(int(array.nbytes) for array in arrays)


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


class Finisher:
    """Makes ids and tensors of the placed rows of a series. Many threads can use it."""

    def __init__(
        self,
        plan: RowsPlan,
        columns: Columns,
        share: RankShare,
        buffers: Buffers,
        quarantine: Quarantine,
        *,
        is_last: bool,
        late: frozenset[str] = frozenset(),
    ):
        """`is_last`: no stage of transforms comes before batches get their tensors. The `late` columns are those that
        functions over rows make after rows are placed."""
        self._columns = columns
        self._buffers = buffers
        self._share = share
        self._quarantine = quarantine
        self._is_last = is_last
        self.rows = plan.batch_size // share.readers
        self.most_steps = most_steps(plan, share.readers, columns.row_bytes)
        self.longest_series_bytes = self.most_steps * self.rows * (columns.row_bytes + 4)
        self._checked = (
            None if columns.in_order_hash is None else columns.sparse.index(columns.in_order_hash)
        )
        self._added = [
            [n for n, name in enumerate(names) if name in columns.added | late]
            for names in (columns.floats, columns.scalars, columns.sparse if columns.bags else ())
        ]
        self._starts = tuple(range(0, (len(columns.sparse) + 1) * self.rows, self.rows))
        self._bags = [columns.sparse.index(name) for name in columns.stored_bags]
        self._others = [n for n in range(len(columns.sparse)) if n not in self._bags]
        self._lengths = np.array(
            [[int(columns.sparse[n] not in columns.bags)] for n in self._others], np.int32
        ).reshape(-1, 1)
        """The number of ids of a row in each of `_others`, before a transform adds some."""
        self._ones = torch.ones(len(columns.sparse) * share.rows, dtype=torch.int32)

    def clear(self, series: BatchSeries, charge: Charge) -> BatchSeries:
        """Sets all values that no file holds."""
        floats, scalars, lengths, _ = arrays = series.placed
        for array, added in zip(arrays, self._added, strict=False):
            if added:
                array[:, added] = 0  # until a transform sets them
        if not self._columns.weight:
            floats[:, -1] = 1
        for lanes in series.padding:
            floats[-1, :, lanes] = scalars[-1, :, lanes] = 0
            lengths[-1, :, lanes] = 0
            if has_row_numbers(arrays) and series.reads:  # a number that no row has
                row_numbers(arrays)[-1, lanes] = (series.reads[0][0].task.first - 1) % 2**32
        charge.correct(series.nbytes)
        return replace(series, charge=charge)

    def size(self, series: BatchSeries) -> int:
        """Returns the bytes to reserve for work on a series. Ids beyond int32 exist twice while they are copied."""
        ids = sum(part.values.nbytes for part in series.ids)
        nbytes = series.nbytes
        if series.placed:
            _, scalars, lengths, _ = series.placed
            ids = scalars.nbytes + 4 * int(lengths[:, self._bags].sum())
            nbytes = series.floats.nbytes + ids + lengths.nbytes
        return nbytes + 2 * ids * self._columns.wide

    def __call__(self, series: BatchSeries, charge: Charge) -> BatchSeries:
        """Sets what no file holds and finishes a series whose rows are placed."""
        return self.finish(self.clear(series, charge), charge)

    def finish(self, series: BatchSeries, charge: Charge) -> BatchSeries:
        """Makes the ids of a series, and its tensors if no transform follows."""
        self._zero_lost_rows(series)
        ids = tuple(map(self._ids, *series.placed[1:]))
        series = replace(series, ids=ids, placed=(), owners=())
        if self._share.parts > 1:
            series = self._part_of(series)
        number = self._checked
        checked = (
            series.floats[:, 0] if number is None else [part.of(number) for part in series.ids]
        )
        series = replace(series, checksums=tuple(crc32(array.data) for array in checked))
        self._quarantine.zero_lost_weights(series, self._columns)
        return self.pass_on(series, charge, is_last=self._is_last)

    def _zero_lost_rows(self, series: BatchSeries) -> None:
        """Sets all columns to 0 for rows that could not be read, or on which functions over rows failed."""
        for n in range(series.steps):
            rows = self._quarantine.lost_rows(series.schedule.epoch, series.step + n)
            rows = [row + self._share.bounds.start for row in rows]
            if rows:
                floats, scalars, lengths, _ = (array[n] for array in series.placed)
                floats[:, rows] = scalars[:, rows] = lengths[:, rows] = 0

    def pass_on(self, series: BatchSeries, charge: Charge, *, is_last: bool) -> BatchSeries:
        """Returns a series after a stage, with a charge of its own in place of those before. After the last stage it
        gets its batches."""
        passed = self._with_batches(series) if is_last else series
        for read, rows in series.reads:
            read.give_away(rows)
        if series.charge and series.charge is not charge:
            series.charge.release()
        charge.correct(passed.nbytes)
        return replace(passed, reads=(), charge=charge)

    def _part_of(self, series: BatchSeries) -> BatchSeries:
        """Returns this rank's rows of a stream that several ranks share. Padding rows are the last of the stream."""
        own, columns = self._share.bounds, len(self._columns.sparse)
        return replace(
            series,
            rows=tuple(min(max(0, rows - own.start), self._share.rows) for rows in series.rows),
            floats=np.ascontiguousarray(series.floats[:, :, own]),
            ids=tuple(part.part(own, columns, self.rows) for part in series.ids),
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


def has_row_numbers(placed: Sequence[npt.NDArray[Any]]) -> bool:
    """Whether batches have the numbers of their rows, in a line after those of bags, of which each has two."""
    return bool(placed[3].shape[1] % 2)


def row_numbers(placed: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint32]:
    """Returns the number of each row of some batches (`ReadTask.first`)."""
    return placed[3][:, -1].view(np.uint32)


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


def join_ids(columns: Columns, arrays: Mapping[str, npt.NDArray[Any]], rows: int) -> Ids:
    """Joins the ids of a batch after a transform has changed lengths of bags."""
    parts = [arrays[name].view(np.int32) for name in columns.sparse]
    ones = np.ones(rows, np.int32)
    lengths = [arrays[lengths_name(n)] if n in columns.bags else ones for n in columns.sparse]
    starts = tuple(itertools.accumulate(map(len, parts), initial=0))
    return Ids(np.concatenate(parts), np.concatenate(lengths, dtype=np.int32), starts)
