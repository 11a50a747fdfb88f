"""`SparkEngine`: runs a job's passes on a Spark session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from sluice.etl.apply.counts import RowCounts
from sluice.etl.apply.features import FileAssignment
from sluice.etl.apply.rejected import Reject
from sluice.etl.jobs.engine import MAPPED, Engine, Learnt, Sums, Written
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.progress import JobProgress, draw_bar
from sluice.etl.ops import Fitted
from sluice.etl.spark.columns import quoted
from sluice.etl.spark.fit import sum_counts
from sluice.etl.spark.history_state import write_tails
from sluice.etl.spark.joins import unit_of_time
from sluice.etl.spark.large import Large
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.rejects import check_rejects, find_reject_of, write_rejects
from sluice.etl.spark.session import fit_partitions
from sluice.etl.spark.write import write
from sluice.etl.spec.spec import Learned
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.store import folder_of_tails

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MOST_ROW_BYTES = 2**16
"""If Spark's records are larger on average, they are stored batches, and their number is not that of rows."""


class SparkEngine(Engine):
    name: ClassVar[str] = "spark"

    def __init__(self, spark: SparkSession, job: Job, progress: JobProgress) -> None:
        super().__init__(job, progress)
        self._spark = spark
        folders = {}
        if job.mode == "append" and job.parent is not None and job.parent.tails:
            names = [history.name for history in job.spec.rows.histories]
            folders = {name: folder_of_tails(job.parent.job, name) for name in names}
        earlier = {
            name: job.store.spark_url(folder)
            for name, folder in folders.items()
            if job.store.files(folder)
        }
        self._raw = RawInput(spark, job.spec, job.inputs, 0 if job.learns else None, earlier)
        self._large = Large(spark, job.store, job.files_of_state, job.collected_values)
        progress.follow(passes_of(spark))

    def check(self) -> None:
        if self.job.rejects is not None:
            check_rejects(self._spark, self.job.rejects)
        self._raw.check()
        for side in self._raw.sides:
            side.check_values(self.job.accept_nulls)
        size = self._raw.bytes + sum(side.bytes for side in self._raw.sides)
        fit_partitions(self._spark, size)

    def _warn_of_units(self) -> None:
        """Names each side table whose times seem to have another unit than those of the rows."""
        for side in self._raw.sides:
            join = side.join
            if join.time is not None:
                [[ours]] = self._raw.related.selectExpr(f"max({quoted(join.time)})").collect()
                [[theirs]] = side.rows.selectExpr("max(_since)").collect()
                units = [unit_of_time(ours), unit_of_time(theirs)]
                if None not in units and units[0] != units[1]:
                    self.progress.say(
                        f"warning: join.path = {join.path!r}: time {join.time!r} seems to be in {units[0]} ({ours:g}), "
                        f"and their_time {join.their_time!r} in {units[1]} ({theirs:g}); write both in one unit"
                    )

    def url(self, relative: str) -> str:
        return self.job.store.spark_url(relative)

    def sums(self, level: int | None, state: FittedState, operators: Mapping[int, Learned]) -> Sums:
        found = sum_counts(self._raw, level, state, operators, self._large)
        if not level:
            self._warn_of_units()
        return found

    def extend(self, level: int, number: int, op: Fitted, old: Learnt, new: Learnt) -> Learnt:
        if isinstance(old, pa.Table) and isinstance(new, pa.Table):
            return op.update(old, new)
        return self._large.of_level(level).add(old, new, number, op)

    def write_rejects(self, folder: str, state: FittedState | None = None) -> Mapping[str, int]:
        return write_rejects(self._raw, folder, state)

    def find_reject(self, folder: str, reason: str) -> Reject | None:
        return find_reject_of(self._spark, folder, reason)

    def ways(self, state: FittedState) -> dict[str, str]:
        return dict.fromkeys(state.stored, MAPPED) | {
            side.join.path: side.way for side in self._raw.sides
        }

    def write(self, state: FittedState, counted: RowCounts) -> Written:
        job = self.job
        placement = FileAssignment.of(
            self.spec, counted.rows, counted.pairs, counted.nulls.get(self.spec.label, 0.0)
        )
        written = write(self._raw, state, placement, job, rows=counted.rows)
        if self.spec.rows.looks_back:
            write_tails(self._raw, job.store, job.name)
        return written

    def close(self) -> None:
        self._raw.release()


def passes_of(spark: Any, clock: Callable[[], float] = time.monotonic) -> Callable[[], str]:
    """Returns a function that describes the progress of the session's active stages: the share of finished tasks, and
    the rows and bytes that these tasks have read."""
    store = spark.sparkContext._jsc.sc().statusStore()
    began: dict[tuple[int, ...], float] = {}

    def so_far() -> str:
        try:
            active = store.activeStages()
            stages = [active.apply(number) for number in range(active.size())]
        except Exception:  # the session may be ending, and a progress line must not fail the job
            return "…"
        if not stages:
            return "…"
        ids, now = tuple(sorted(stage.stageId() for stage in stages)), clock()
        if ids not in began:  # new stages, so the time starts again
            began.clear()
            began[ids] = now
        total = max(1, sum(stage.numTasks() for stage in stages))
        done = sum(stage.numCompleteTasks() for stage in stages)
        rows, size = (
            sum(getattr(stage, what)() for stage in stages)
            for what in ("inputRecords", "inputBytes")
        )
        return draw_bar(
            "",
            share=done / total,
            rows=rows if size <= _MOST_ROW_BYTES * rows else 0,
            size=size,
            seconds=now - began[ids],
        )

    return so_far
