"""`SparkEngine`: runs a job's passes on a Spark session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import SparkSession

from sluice.etl.apply.row_placement import WritePlan
from sluice.etl.jobs.engine import MAPPED, Engine, Sums, Written
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.ops import Fitted
from sluice.etl.read.input_files import InputFiles
from sluice.etl.read.side_rows import check_side_table
from sluice.etl.spark.columns import quoted
from sluice.etl.spark.fit import sum_counts
from sluice.etl.spark.history_state import write_tails
from sluice.etl.spark.joins import unit_of_time
from sluice.etl.spark.large import Large
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.session import fit_session
from sluice.etl.spark.write import write
from sluice.etl.spec.spec import Learned
from sluice.etl.table.fitted_state import FittedState, Learnt, StateError
from sluice.etl.table.store import folder_of_tails


class SparkEngine(Engine):
    name: ClassVar[str] = "spark"

    def __init__(self, start: Callable[[], SparkSession], job: Job, progress: JobProgress) -> None:
        """`start` returns a session. It is called when the files of the input are as the spec says."""
        super().__init__(job, progress)
        self._start = start
        self._raw: RawInput
        self._release: Callable[[], None] = lambda: None

    def check(self) -> None:
        super().check()
        job, earlier = self.job, dict[str, str]()
        files = InputFiles(self.spec.input, job.inputs)
        files.check()
        for join in self.spec.rows.joins:
            check_side_table(join, self.spec.types, job.accept_nulls)
        spark = self._start()
        if job.mode == "append" and job.parent is not None:
            for history in self.spec.rows.histories:
                folder = folder_of_tails(job.parent.job, history.name)
                if not job.store.files(folder):
                    raise StateError(
                        f"{job.store.url(folder)}: what {history.name!r} must know of earlier rows is not there; "
                        f"{job.advise_rebuild(self.spec)}"
                    )
                earlier[history.name] = job.store.spark_url(folder)
        self._raw = RawInput(
            spark,
            self.spec,
            files,
            0 if job.learns else None,
            earlier,
            job.accept_nulls,
            job.late == "reject",
        )
        self._release = self._raw.release
        self._large = Large(spark, job.store, job.files_of_state, job.collected_values)
        fit_session(
            spark,
            files.bytes + sum(side.bytes for side in self._raw.sides),
            self.spec.rows.relational,
        )

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

    def sums(self, level: int | None, state: FittedState, operators: Mapping[int, Learned]) -> Sums:
        sums = sum_counts(self._raw, level, state, operators, self._large)
        if not level:
            if sums.counted.rejected:
                for rows in self._raw.rejects():
                    self.rejects.add(rows)
            self._warn_of_units()
            self.late = self._raw.late
        return sums

    def extend(self, level: int, number: int, op: Fitted, old: Learnt, new: Learnt) -> Learnt:
        if isinstance(old, pa.Table) and isinstance(new, pa.Table):
            return op.update(old, new)
        return self._large.of_level(level).add(old, new, number, op)

    def ways(self, state: FittedState) -> dict[str, str]:
        return dict.fromkeys(state.stored, MAPPED) | {
            side.join.path: side.way for side in self._raw.sides
        }

    def write(self, state: FittedState, plan: WritePlan) -> Written:
        job = self.job
        written = write(self._raw, state, plan, job, self.rejects)
        if self.spec.rows.looks_back:
            write_tails(self._raw, job.store, job.name)
        return written

    def close(self) -> None:
        super().close()
        self._release()
