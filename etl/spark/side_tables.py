"""`SideTable`: the side table of a join, in the types of the spec. Workers read it as they read the input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as sql

from sluice.etl.apply.parse import Batches
from sluice.etl.read.input_files import TaskInput, pieces_of_task
from sluice.etl.read.side_rows import SideRows, open_side_table
from sluice.etl.spark.columns import SPARK_TYPES, quoted
from sluice.etl.spark.session import PARTITION_BYTES, number_tasks
from sluice.etl.spark.workers.cells import read_numbers
from sluice.etl.spec.row_rules import Join
from sluice.etl.spec.spec import Spec

MOST_ROWS = 1 << 20
"""The most rows of a side table by time that a server has in memory, beside the newest of each key."""


class SideTable:
    """Raises a SpecError if the side table cannot be read, and an InputError if it lacks a column of the join."""

    def __init__(
        self, spark: SparkSession, join: Join, spec: Spec, accepted: Collection[str]
    ) -> None:
        """In the `accepted` columns, a value that does not fit its type is null."""
        self._spark, self.join = spark, join
        self._rows, self._files = open_side_table(SideRows.of(join, spec.types, accepted))
        self.bytes = self._files.bytes

    @property
    def way(self) -> str:
        """How the rows are joined: `window` if by time, `broadcast` if the side table is small, otherwise `shuffle`."""
        if self.join.time is not None:
            return "window"
        return "broadcast" if self.bytes <= PARTITION_BYTES else "shuffle"

    @cached_property
    def rows(self) -> DataFrame:
        """The columns that the join uses, of rows with all keys. The keys `_on0`, `_on1`, and so on have the types of
        the columns that they are compared with. `_since` is the time. `_at` is the first time, in the type of
        `join.time`, at which the row is valid."""
        schema = ", ".join(
            f"{quoted(new)} {SPARK_TYPES[kind]}" for new, (_, kind) in self._rows.wanted.items()
        )
        tasks, numbers = number_tasks(self._spark, self._files.tasks(PARTITION_BYTES))
        rows = numbers.mapInArrow(partial(_read_tasks, self._rows, tasks), schema)
        rows = rows.where(" and ".join(f"_on{i} is not null" for i in range(len(self.join.on))))
        if self.join.time is None:
            return rows
        at = "nullif(_since, double('NaN'))"
        if "_whole" in self._rows.wanted:
            at = f"if(_since = double(_whole), _whole, ceil({at}))"
        return rows.selectExpr("*", f"{at} as _at").where("_at is not null")

    def known_rows(self) -> DataFrame:
        """Returns what a server must know: for each key the newest row, with the columns `_key` and those of the side
        table.

        With a time these are the rows of each key that a time from `_at` on needs, and `_is_first` marks the oldest of
        the side table. Beside the newest of each key there are at most MOST_ROWS, the newest of all keys."""
        join, side = self.join, self.rows
        parts = [sql.col(f"_on{i}") for i in range(len(join.on))]
        key = (parts[0] if len(parts) == 1 else sql.struct(*parts)).alias("_key")
        added = [sql.col("_side").getField(name).alias(name) for name in join.columns]
        if join.time is None:
            return (
                side.groupBy(key).agg(sql.max(self.ordered).alias("_side")).select("_key", *added)
            )
        rows = side.groupBy(key, "_at").agg(sql.max(self.ordered).alias("_side"))
        left_out = rows.select("_at").orderBy(sql.desc("_at")).offset(MOST_ROWS).first()
        by_time = Window.partitionBy("_key").orderBy("_at")
        rows = rows.withColumn("_is_first", sql.row_number().over(by_time) == 1)
        if left_out is not None:
            # A row is needed until the next one is valid.
            rows = rows.withColumn("_until", sql.lead("_at").over(by_time))
            until = sql.col("_until")
            rows = rows.where(until.isNull() | (until > sql.lit(left_out[0])))
        return rows.select("_key", "_at", "_is_first", *added)

    @property
    def ordered(self) -> Column:
        """The columns of the side table, as a struct. The largest row of a key counts, by time if there is one."""
        times = () if self.join.time is None else ("_at", "_since")
        return sql.struct(*times, *map(quoted, self.join.columns))


def _read_tasks(
    rows: SideRows, tasks: Callable[[], Sequence[TaskInput]], numbers: Batches
) -> Batches:
    for number in read_numbers(numbers):
        yield from rows.batches(pieces_of_task(tasks()[number]))
