"""Computes the memory that a plan needs if all work is done one after the other: `MinimumMemory`. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sluice.ingest.columns import Columns
from sluice.ingest.knobs import format_bytes
from sluice.ingest.row_order import RankShare, RowsPlan
from sluice.ingest.stage_spec import StageSpec
from sluice.ingest.stages.batch import most_steps

if TYPE_CHECKING:
    from sluice.ingest.read.decoding import Decoding

_ORDERS = 16  # bytes of a row for the order of its window: two combined permutations
_UNPACKED = 16  # bytes of a row of the largest row group while one of its columns is unpacked
_WIDE = 8  # bytes of a row of a window while numbers of 8 bytes become numbers of 4
_BAG = 24  # bytes of a bag while its window is placed: its length, and its address twice
# Memory that Arrow's allocator keeps: a constant, plus one part in eight of what it allocated.
_KEPT = 4 * 2**20
_KEPT_PART = 8


@dataclass(frozen=True, kw_only=True)
class MinimumMemory:
    """The least memory of a run in bytes, by purpose. It is computed from upper bounds, so a run may use less."""

    row_groups: int
    """Decoded row groups that exist at the same time, including one that is read ahead."""
    decoding: int
    """Memory for decoding the largest row group, in addition to its result."""
    functions: int
    """Rows of functions over rows, at work and as results."""
    batches: int
    """Windows, and batches on their way to the consumer."""
    orders: int
    """The orders of the rows in the windows."""
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
            f"{format_bytes(self.batches)} for windows and batches, {format_bytes(self.orders)} for their orders, "
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
) -> MinimumMemory:
    """Computes the minimum memory. `functions` is that of functions over rows. `converted` is the number of columns
    that must be converted before their values are moved. With several `epochs`, the next epoch begins before the last
    one has ended."""
    ranks = share.readers
    streams = len(plan.streams_of(share.reader, ranks))
    steps = most_steps(plan, ranks, columns.row_bytes)
    windows, reads = _windows_and_reads(plan, decoding, share, epochs)
    together = steps * plan.stream_rows  # rows of a stream that are cut together
    row_groups, rows = _largest_holding(
        windows,
        reads,
        columns.window_row_bytes * streams,
        plan.widest + together,
    )
    a_rank = plan.batch_size // ranks
    chunk = steps * a_rank  # a chunk may be partly used on either side
    series = chunk * (columns.row_bytes + 4)
    # After each of these stages one series is done, and the next stage works on another.
    stages_with_series = sum(stage.holds_series for stage in stages)
    transforms = sum(stage.transforms for stage in stages)
    # While ids beyond int32 are copied, they are there twice.
    held = 2 * stages_with_series + columns.wide
    series_bytes = held * series + transforms * a_rank * columns.row_bytes
    unpacked = _UNPACKED * plan.largest_group
    window = plan.widest * (_ORDERS + _WIDE + 4 * converted + _BAG * len(columns.stored_bags))
    orders = sum(_ORDERS * 4 * size for size in plan.order_sizes()) * min(2, epochs)
    batches = (rows * streams + 2 * chunk) * columns.window_row_bytes + series_bytes
    return MinimumMemory(
        row_groups=row_groups,
        decoding=decoding.extra_bytes,
        functions=functions,
        batches=batches,
        orders=orders + window + unpacked,
        kept=_KEPT + (row_groups + decoding.extra_bytes) // _KEPT_PART,
    )


def _largest_holding(
    windows: list[tuple[int, int]], reads: list[tuple[int, int, int]], row_bytes: int, behind: int
) -> tuple[int, int]:
    """Returns the bytes of decoded row groups, and the rows of each stream in windows, at the moment when both together
    are largest. `row_bytes` has the bytes of one row of each stream. A window that ends `behind` rows before the
    current one is released."""
    # For each decoded row group: the last window that needs it, and its bytes.
    decoded: list[tuple[int, int]] = []
    most = (0, 0)
    next_read = oldest = furthest = 0
    for number, (first, last) in enumerate(windows):
        # While a window is shuffled, the next window's rows are decoded, and one more read is done.
        while next_read < len(reads) and reads[next_read][0] <= number + 1:
            decoded.append(reads[next_read][1:])
            next_read += 1
        ahead = reads[next_read][2] if next_read < len(reads) else 0
        # Batches are held until every stream has filled them. Windows come in the order of need.
        while windows[oldest][0] + behind <= first:
            oldest += 1
        furthest = max(furthest, last)
        now = sum(size for _, size in decoded) + ahead, furthest - windows[oldest][0]
        most = max(most, now, key=lambda held: held[0] + held[1] * row_bytes)
        decoded = [held for held in decoded if held[0] > number]
    return most


def _windows_and_reads(
    plan: RowsPlan, decoding: Decoding, share: RankShare, epochs: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Returns the windows and the reads of an epoch, and of the next one if that follows at once.

    A window is its first and last row in its stream, counted on through both epochs. A read is the first window that
    needs it, the last one, and its bytes."""
    windows: list[tuple[int, int]] = []
    reads: list[tuple[int, int, int]] = []
    for epoch in range(min(2, epochs)):
        schedule = plan.schedule(epoch, share.reader, share.readers)
        before = len(windows)
        offset = epoch * -(-plan.used // plan.streams)
        windows += [(offset + w.first, offset + w.first + w.rows) for w in schedule.windows]
        reads += [
            (
                before + read.parts[0].window,
                before + max(part.window for part in read.parts),
                decoding.decoded(read.rows),
            )
            for read in schedule.reads
        ]
    return windows, reads
