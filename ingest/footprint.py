"""How much memory a plan needs when everything is done one after the other: `minimum_bytes`. Pure."""

from __future__ import annotations

from ingest.batch import most_steps
from ingest.columns import Columns
from ingest.plan import RowsPlan


def minimum_bytes(plan: RowsPlan, columns: Columns, rank: int, ranks: int, stages: int) -> int:
    """The most that decoded row groups, blocks and batches take in the first epoch, window after window.

    `stages` are those that hold a stretch of batches each."""
    schedule = plan.schedule(0, rank, ranks)
    block_bytes = plan.widest * columns.row_bytes
    last_use = [max(part.window for part in read.parts) for read in schedule.reads]
    decoded: dict[int, int] = {}  # rows of the row groups that are held, by their number
    peak = next_read = oldest = 0
    for number, window in enumerate(schedule.windows):
        while next_read < len(schedule.reads) and schedule.reads[next_read].parts[0].window <= number:
            decoded[next_read] = schedule.reads[next_read].rows
            next_read += 1
        # A block is held until every stream has passed it; windows come in the order of need.
        while schedule.windows[oldest].first + plan.widest + plan.stream_rows <= window.first:
            oldest += 1
        peak = max(peak, sum(decoded.values()) * columns.row_bytes + (number - oldest + 1) * block_bytes)
        decoded = {n: rows for n, rows in decoded.items() if last_use[n] > number}
    stretch = most_steps(plan, ranks) * (plan.batch_size // ranks) * (columns.row_bytes + 4)
    return peak + stages * stretch
