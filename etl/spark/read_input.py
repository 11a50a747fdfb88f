"""`RawInput`: a job's input on Spark. The tasks of a pass read its files with Arrow, as the local engine does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from sluice.etl.apply.input_checks import Part, rows_before
from sluice.etl.apply.parse import Batches
from sluice.etl.read.input_files import InputFiles, TaskInput
from sluice.etl.read.pieces import OPEN_BYTES
from sluice.etl.spark.columns import SPARK_TYPES, quoted
from sluice.etl.spark.joins import relate
from sluice.etl.spark.session import PARTITIONS, number_tasks
from sluice.etl.spark.side_tables import SideTable
from sluice.etl.spark.workers.parsed_rows import (
    COUNTED_PARTS,
    DOT,
    ParsedRows,
    count_rows_of_parts,
    reject_related,
    rows_with_ties,
)
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec


@dataclass(frozen=True)
class RawInput:
    """The input of a job, and its rows after parsing, joins and histories."""

    spark: SparkSession
    spec: Spec
    files: InputFiles
    level: int | None
    """The level of operators whose values are counted when rows are parsed. None counts only rows."""
    earlier: Mapping[str, str]
    """For a job that appends: the files from which each history continues, by its name.
    `sluice.etl.spark.history_state` wrote them."""
    accepted: tuple[str, ...]
    """The columns of side tables that may have values of other types."""
    reject_late: bool = False
    """Whether rows are rejected that are older than the values from which a history continues."""

    @cached_property
    def _tasks(self) -> tuple[Callable[[], Sequence[TaskInput]], DataFrame]:
        """The parts of the input that each task reads, and a frame with the numbers of the tasks."""
        conf: Any = self.spark._jsparkSession.sessionState().conf()
        total = self.files.bytes + OPEN_BYTES * len(self.files.files)
        of_core = max(OPEN_BYTES, -(-total // self.spark.sparkContext.defaultParallelism))
        tasks = self.files.tasks(min(int(conf.filesMaxPartitionBytes()), of_core))
        return number_tasks(self.spark, tasks)

    @cached_property
    def sides(self) -> list[SideTable]:
        """The side tables of the spec's joins."""
        return [
            SideTable(self.spark, join, self.spec, self.accepted) for join in self.spec.rows.joins
        ]

    @cached_property
    def parsed_rows(self) -> ParsedRows:
        parts, numbers = self._tasks
        rows = ParsedRows(self.spec, self.level, self.count_parts, None, parts)
        if not self.spec.input.place:
            return rows
        counted = numbers.mapInArrow(partial(count_rows_of_parts, rows), COUNTED_PARTS)
        sums = Counter[Part]()
        for file, start, count in counted.collect():
            sums[file, start] += count
        return replace(rows, before=rows_before(sums))

    @cached_property
    def parsed(self) -> DataFrame:
        """Where the input's good rows are stored, their counts, and the rejected rows. The first pass parses them."""
        return self.parsed_rows.parse(self._tasks[1])

    def rejects(self) -> Batches:
        """Yields the rejected rows as `REJECTS`, also those that were rejected after joins and histories."""
        yield from collect_cells(self.parsed, "rejects")
        if self.spec.rows.relational:
            work = partial(reject_related, self.spec)
            yield from collect_cells(self.rows.mapInArrow(work, "rejects binary"), "rejects")

    @cached_property
    def count_parts(self) -> int:
        """The number of parts in which counts are added up. A worker has one part in memory, so that a part has the
        counts of two partitions, some 64 MiB of input."""
        partitions = int(self.spark.conf.get(PARTITIONS) or 1)
        return max(self.spark.sparkContext.defaultParallelism, partitions // 2)

    @cached_property
    def rows(self) -> DataFrame:
        """The rows that fitting and writing read: as they are stored, or columns after dedup, joins and histories. The
        names of these columns have `DOT` for each dot, because pyspark does not quote names for its workers."""
        if not self.spec.rows.relational:
            return self._stored
        related = self.related if self.reject_late else self.related.drop("_late")
        return related.toDF(*[name.replace(".", DOT) for name in related.columns])

    @property
    def _stored(self) -> DataFrame:
        """The files with parsed rows."""
        return self.parsed.select("file", "part").where("file is not null")

    @cached_property
    def related(self) -> DataFrame:
        """The rows after dedup, joins and histories."""
        kinds = [
            f"{quoted(name)} {SPARK_TYPES[kind]}"
            for name, kind in self.spec.input.with_place.items()
        ]
        kinds += [f"{name} bigint" for name in TIES]
        typed = self._stored.mapInArrow(partial(rows_with_ties, self.parsed_rows), ", ".join(kinds))
        related = relate(typed, self.spec, self.sides, self.earlier, reject_late=self.reject_late)
        return related.persist()

    @cached_property
    def late(self) -> int:
        """The number of rows that are older than values of the same key in the table."""
        return self.related.where("_late is not null").count() if self.earlier else 0

    def release(self) -> None:
        """Removes the rows that Spark has stored for this input. Waits for the executors, because a session that ends
        before they answer prints errors."""
        for name in {"parsed", "related"} & self.__dict__.keys():
            getattr(self, name).unpersist(blocking=True)


def collect_cells(frame: DataFrame, name: str) -> Batches:
    """Yields the batches of a column of cells, with few cells in memory."""
    for row in frame.select(name).where(f"{name} is not null").toLocalIterator(True):
        yield from pa.ipc.open_stream(bytes(row[name]))
