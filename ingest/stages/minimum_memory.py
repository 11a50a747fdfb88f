"""Computes the memory that a plan needs if all work is done one after the other: `MinimumMemory`. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sluice.ingest.columns import Columns
from sluice.ingest.flow.place_rows import SCRATCH_OF_A_ROW, UNPACKED_OF_A_ROW
from sluice.ingest.flow.series import most_steps
from sluice.ingest.knobs import format_bytes
from sluice.ingest.row_order import RankShare, Read, RowsPlan
from sluice.ingest.stage_spec import StageSpec

if TYPE_CHECKING:
    from sluice.ingest.read.decoding import Decoding

_ORDERS = 8  # bytes of a row of the permutations that make the orders of windows
_PLACES = 4  # bytes of a row of a window of many small row groups: its place in the order
_BAG = 24  # bytes of a bag while it is placed: its length, and its address twice
# Memory that Arrow's allocator keeps: a constant, plus one part in eight of what it allocated.
_KEPT = 4 * 2**20
_KEPT_PART = 8


@dataclass(frozen=True, kw_only=True)
class MinimumMemory:
    """The least memory of a run in bytes, by purpose. It is computed from upper bounds, so a run may use less."""

    row_groups: int
    """Decoded row groups: the one that is decoded, and the one before."""
    decoding: int
    """Memory for decoding the largest row group, in addition to its result."""
    functions: int
    """Rows of functions over rows, at work and as results."""
    batches: int
    """Batches that are being filled, and those on their way to the consumer."""
    orders: int
    """The orders of rows, and the memory in which they are moved."""
    kept: int
    """Memory that allocators and the kernel keep after it was freed."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        called = (
            f"{format_bytes(self.functions)} for functions over rows, " if self.functions else ""
        )
        return (
            f"{format_bytes(self.row_groups)} for row groups, {format_bytes(self.decoding)} for decoding one, {called}"
            f"{format_bytes(self.batches)} for batches, {format_bytes(self.orders)} for moving rows, "
            f"{format_bytes(self.kept)} that allocators keep"
        )


def footprint_of(
    plan: RowsPlan,
    columns: Columns,
    decoding: Decoding,
    *,
    share: RankShare,
    stages: Sequence[StageSpec],
    converted: int,
    epochs: int,
    functions: int = 0,
    held: int = 0,
    largest: int = 0,
) -> MinimumMemory:
    """Computes the minimum memory. `functions` is that of functions over rows, `held` that of rows that are held for
    them. `converted` is the number of columns that must be converted before their values are moved. With several
    `epochs`, the next epoch begins before the last one has ended. `largest` is the most rows of a read, if larger row
    groups are read in pieces."""
    largest = largest or plan.largest_group
    ranks = share.readers
    steps = most_steps(plan, ranks, columns.row_bytes)
    a_rank = plan.batch_size // ranks
    chunk = steps * a_rank  # a chunk may be partly used on either side
    series = chunk * (columns.row_bytes + 4)
    # After each of these stages, and where series are finished, one is done, and the next stage works on another.
    stages_with_series = 1 + sum(stage.buffer_limit == "series" for stage in stages)
    transforms = sum(stage.transforms for stage in stages)
    # While ids beyond int32 are copied, they are there twice.
    copies = 2 * stages_with_series + columns.wide
    series_bytes = copies * series + transforms * a_rank * columns.row_bytes
    # Allocators may still keep the one before, and functions give another one.
    row_groups = decoding.decoded(largest) * (3 if functions else 2)
    of_a_row = (
        SCRATCH_OF_A_ROW + UNPACKED_OF_A_ROW + 4 * converted + _BAG * len(columns.stored_bags)
    )
    orders = sum(_ORDERS * 2 * size for size in plan.order_sizes()) * min(2, epochs)
    orders += 2 * plan.streams * _PLACES * plan.widest * plan.shuffle
    batches = (_most_rows(plan, share, epochs, largest) + 2 * chunk) * columns.placed_row_bytes
    return MinimumMemory(
        row_groups=row_groups + held,
        decoding=decoding.extra_bytes,
        functions=functions,
        batches=batches + series_bytes,
        orders=orders + of_a_row * largest,
        kept=_KEPT + (row_groups + decoding.extra_bytes) // _KEPT_PART,
    )


def _most_rows(plan: RowsPlan, share: RankShare, epochs: int, largest: int) -> int:
    """Returns the most rows that are at their places while their batches are not complete, if row groups are read one
    after the other."""
    placed, complete, _ = _reads(plan, share, epochs, largest)
    rows = np.cumsum(placed) - complete * (plan.batch_size // share.readers)
    return int(rows.max(initial=0)) + _rows_with_pieces(plan, share, largest)


def held_rows(
    plan: RowsPlan, share: RankShare, epochs: int, row_bytes: int, largest: int = 0
) -> int:
    """Returns the most rows that are held for functions over rows, if row groups are read one after the other.

    They are held until the last batch that needs their row group is made. It may be in a series as long as a chunk that
    is not complete, and two series may be at work before it."""
    largest = largest or plan.largest_group
    steps = most_steps(plan, share.readers, row_bytes)
    placed, complete, last = _reads(plan, share, epochs, largest)
    made = np.minimum((last // steps + 3) * steps, min(2, epochs) * plan.steps) - 1
    freed = np.bincount(np.searchsorted(complete, made, "right"), placed, len(placed) + 1)
    held = int((np.cumsum(placed) - np.cumsum(freed)[:-1]).max(initial=0))
    return held + _rows_with_pieces(plan, share, largest)


def _rows_with_pieces(plan: RowsPlan, share: RankShare, largest: int) -> int:
    """Returns the most rows that come with those for which pieces are read: at most one piece in each stream."""
    return largest * (plan.streams // share.readers) * (plan.largest_group > largest)


def _reads(
    plan: RowsPlan, share: RankShare, epochs: int, largest: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """Returns for each read its rows, the number of batches that are complete before it, and the last batch that needs
    it. With several epochs, the next one begins before the last one has ended. A row group of more than
    `largest` rows counts as one read for each of its parts."""
    placed: list[int] = []
    needed: list[int] = []
    waiting: list[tuple[int, int]] = []
    """For each window the read that completes it, and the first batch that waits for it."""
    epochs = min(2, epochs)
    for epoch in range(epochs):
        schedule, before = plan.schedule(epoch, share.reader, share.readers), epoch * plan.steps
        reads = [*plan.reads_of(schedule, lambda read: _parts(read, largest))]
        last, each = {}, plan.stream_rows
        for number, read in enumerate(reads, len(placed)):
            windows = [schedule.windows[part.window] for part in read.parts]
            end = max((window.first + window.rows for window in windows), default=0)
            needed.append(before + min(-(-end // each), plan.steps) - 1)
            last.update(dict.fromkeys((part.window for part in read.parts), number))
        for window, number in last.items():
            batch = schedule.windows[window].first // each
            waiting.append((number, before + min(batch, plan.steps)))
        placed += [sum(part.stop - part.start for part in read.parts) for read in reads]
    complete = np.full(len(placed), epochs * plan.steps)
    for number, batch in waiting:
        complete[number] = min(complete[number], batch)
    # Before a read, those batches are complete that wait neither for it nor for a later one.
    complete = np.minimum.accumulate(complete[::-1])[::-1]
    return np.array(placed, np.int64), complete, np.array(needed, np.int64)


def _parts(read: Read, largest: int) -> list[Read]:
    """Returns a read, or one for each of its parts if it is larger than `largest`."""
    return [read] if read.rows <= largest else [replace(read, parts=(p,)) for p in read.parts]
