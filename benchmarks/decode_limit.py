"""Measures how fast the reader decodes when its tables are dropped: the limit of any loader on the same files."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from sluice.ingest.memory.governor import Governor
from sluice.ingest.read.reader import RowGroupReader, RowGroupSource, Work
from sluice.ingest.row_order import EpochSchedule, Read, WindowPart
from sluice.ingest.stages.counters import StageCounters
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.shuffle import Decoded, ReadTask

_UNLIMITED = 2**60


def decode_rows_per_s(
    source: RowGroupSource, groups: RowGroupReader, threads: int, seconds: float
) -> float:
    """Returns the rows a second of so many threads that read the table's row groups again and again."""
    schedule = EpochSchedule(0, 0, (), (), ())
    every = [
        (file, group, rows)
        for file, counts in enumerate(groups.row_groups)
        for group, rows in enumerate(counts)
    ]
    tasks = (
        ReadTask(schedule, Read(file, group, rows, (WindowPart(0, 0, 0, rows),)))
        for file, group, rows in itertools.cycle(every)
    )
    pools: list[Pool[ReadTask, Decoded]] = []

    def make_pool(
        upstream: Iterator[ReadTask], make_work: Callable[[], Work]
    ) -> Pool[ReadTask, Decoded]:
        pools.append(
            Pool(
                StageCounters("decode"),
                upstream,
                lambda _: make_work(),
                workers=threads,
                limit_bytes=2**26,
                governor=Governor(_UNLIMITED, 0),
                size=lambda t: t.read.rows * 4 * len(groups.columns),
                measure=lambda d: (d.rows.num_rows, d.rows.nbytes),
            )
        )
        return pools[-1]

    rows = 0
    began = time.perf_counter()
    try:
        for decoded in source.open(tasks, make_pool):
            rows += decoded.task.read.rows
            decoded.release()
            if time.perf_counter() - began > seconds:
                break
        return rows / (time.perf_counter() - began)
    finally:
        for pool in pools:
            pool.close()
            pool.join(5.0)
