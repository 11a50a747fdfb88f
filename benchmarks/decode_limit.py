"""Measures how fast the reader decodes when its tables are dropped: the limit of any loader on the same files."""

from __future__ import annotations

import itertools
import time

from sluice.ingest.flow.decoded import ReadTask
from sluice.ingest.memory.governor import Governor
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.row_order import EpochSchedule, Read, WindowPart
from sluice.ingest.stages.counters import StageCounters
from sluice.ingest.stages.pool import Pool

_UNLIMITED = 2**60


def decode_rows_per_s(groups: RowGroupReader, threads: int, seconds: float) -> float:
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
    pool = Pool(
        StageCounters("decode"),
        tasks,
        lambda: groups.work,
        workers=threads,
        limit_bytes=2**26,
        governor=Governor(_UNLIMITED, 0),
        size=lambda t: t.read.rows * 4 * len(groups.columns),
        measure=lambda d: (d.rows.num_rows, d.rows.nbytes),
    )
    rows = 0
    began = time.perf_counter()
    try:
        for decoded in pool:
            rows += decoded.task.read.rows
            decoded.release()
            if time.perf_counter() - began > seconds:
                break
        return rows / (time.perf_counter() - began)
    finally:
        pool.close()
        pool.join(5.0)
