"""Cuts the rows of reads into series of batches: `Cutter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from sluice.ingest.flow.decoded import Placed
from sluice.ingest.flow.series import Chunks
from sluice.ingest.row_order import EpochSchedule, RowsPlan
from sluice.ingest.stages.batch import BatchSeries


class Cutter:
    """Knows which batches have all their rows. It is made for one run, and one thread at a time calls it."""

    def __init__(self, plan: RowsPlan, chunks: Chunks, most: Callable[[], int]):
        """A series has at most `most()` batches. The first one has one batch, and each further one has up to twice as
        many, so that the first batch comes early."""
        self._plan, self._chunks, self._most = plan, chunks, most
        self._schedule: EpochSchedule | None = None
        self._lanes = self._missing = np.zeros(0, np.int64)
        """How many rows each batch of the epoch gets of each stream, without padding, and how many it still lacks."""
        self._held: list[Placed] = []
        """The reads whose rows are not all in series yet."""
        self._allowed = 1

    def add(self, read: Placed) -> Iterator[BatchSeries]:
        """Yields the series that are complete with the rows of `read`. Reads come in the order of need.

        On some ranks the last batch of an epoch is only padding, so its chunk is taken by number and not from a
        read."""
        plan, schedule = self._plan, read.task.schedule
        if schedule is not self._schedule:
            self._schedule, self._held = schedule, []
            self._step = self._whole = schedule.step
            before = plan.stream_rows * np.arange(plan.steps)
            rows = [[high - low] for low, high in map(plan.bounds, schedule.streams)]
            self._lanes = np.clip(np.array(rows) - before, 0, plan.stream_rows)
            self._missing = self._lanes.sum(axis=0)
        missing = self._missing
        missing[read.first_step : read.first_step + len(read.moved)] -= read.moved
        self._held.append(read)
        while self._whole < plan.steps and not missing[self._whole]:
            self._whole += 1
        a_chunk = self._chunks.steps
        while steps := min(
            self._allowed, self._most(), plan.steps - self._step, a_chunk - self._step % a_chunk
        ):
            if self._step + steps > self._whole:
                break
            self._allowed = min(2 * self._allowed, a_chunk)
            yield self._take(schedule, steps)
            self._step += steps
            self._held = [r for r in self._held if r.first_step + len(r.moved) > self._step]

    def _take(self, schedule: EpochSchedule, steps: int) -> BatchSeries:
        """Takes the next batches."""
        step, a_chunk, each = self._step, self._chunks.steps, self._plan.stream_rows
        chunk = self._chunks.take(schedule.epoch, step // a_chunk)
        first, lanes = step % a_chunk, self._lanes[:, step : step + steps]
        padding = tuple(
            slice(lane * each + rows, (lane + 1) * each)
            for lane, rows in enumerate(lanes[:, -1].tolist())
            if rows < each
        )
        rows = tuple(lanes.sum(axis=0).tolist())
        arrays = [array[first : first + steps] for array in chunk.arrays]
        reads = tuple((r, n) for r in self._held if (n := r.rows_in(step, steps)))
        return BatchSeries(schedule, step, rows, arrays[0], arrays, reads, padding=padding)
