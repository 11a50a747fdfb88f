"""Vocabularies that are too large for the driver: `Large` writes them to files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from sluice.etl.ops import Fitted
from sluice.etl.ops.ids import Categorify
from sluice.etl.table.fitted_state import SCHEMA, FileBackedState, Learnt, rows_of
from sluice.etl.table.store import TableStore

_FILE_VALUES = 1 << 20
_MAX_FILES = 256
COMMIT_OPTIONS = {
    # The files of a failed task must not be visible. Only the first algorithm ensures that.
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


@dataclass(frozen=True)
class Large:
    """Writes large vocabularies to a folder of the table."""

    spark: SparkSession
    store: TableStore
    folder: str
    values: int
    """The most values of all vocabularies that the driver may collect."""

    def of_level(self, level: int) -> Large:
        return replace(self, folder=f"{self.folder}/level-{level}")

    def choose(self, sizes: Mapping[int, int], storable: Iterable[int]) -> list[int]:
        """Returns the keys of the largest vocabularies among `storable`, until the driver can collect the others.
        `sizes` has the number of values of each key."""
        left, chosen = sum(sizes.values()), []
        for number in sorted(storable, key=lambda n: (-sizes.get(n, 0), n)):
            if left > self.values and number in sizes:
                chosen.append(number)
                left -= sizes[number]
        return chosen

    def write(
        self, counted: DataFrame, ops: Mapping[int, Fitted], about: int
    ) -> dict[int, FileBackedState]:
        """Writes the vocabularies of `ops`, which have `about` values in all. `counted` has columns (key, value,
        count)."""
        if not ops:
            return {}
        self._sort(counted.where(counted["key"].isin(list(ops))), about, self.folder)
        return {
            number: FileBackedState.of(
                self.store,
                self._first(self._files(f"{self.folder}/key={number}"), _most(op)),
            )
            for number, op in ops.items()
        }

    def add(
        self,
        old: Learnt,
        new: Learnt,
        number: int,
        op: Fitted,
    ) -> FileBackedState:
        """Returns the values of `old`, and then those that only `new` has, up to the operator's `max_size` in all."""
        first = (
            old
            if isinstance(old, FileBackedState)
            else FileBackedState.of(
                self.store, [self._put(old, f"{self.folder}/old-{number}.parquet")]
            )
        )
        unseen = self._frame(new).join(self._frame(first).select("value"), "value", "left_anti")
        folder = f"{self.folder}/more"
        self._sort(unseen.withColumn("key", sql.lit(number)), new.num_rows, folder)
        more = self._first(self._files(f"{folder}/key={number}"), _most(op) - first.num_rows)
        return FileBackedState.of(self.store, [*(path for path, _ in first.parts), *more])

    def _sort(self, rows: DataFrame, about: int, folder: str) -> None:
        """Writes each key's values by falling count, and by value where counts are equal. Files continue each other."""
        files = min(
            _MAX_FILES,
            max(rows.sparkSession.sparkContext.defaultParallelism, about // _FILE_VALUES),
        )
        order = [sql.col("key"), sql.desc("count"), sql.col("value")]
        (
            rows.repartitionByRange(files, *order)
            .sortWithinPartitions(*order)
            .write.partitionBy("key")
            .mode("append")
            .options(compression="zstd", **COMMIT_OPTIONS)
            .parquet(self.store.spark_url(folder))
        )

    def _files(self, folder: str) -> list[str]:
        return [path for path in self.store.files(folder) if path.endswith(".parquet")]

    def _first(self, paths: Iterable[str], most: int) -> list[str]:
        """Returns the files with the first `most` values. Removes the others."""
        kept: list[str] = []
        for path in paths:
            rows = rows_of(self.store, path)
            if rows <= most:
                kept.append(path)
            else:
                if most > 0:
                    first = FileBackedState(
                        uri=self.store.uri, parts=((path, rows),), digest=""
                    ).head(most)
                    kept.append(self._put(first, f"{path}.first.parquet"))
                self.store.remove(path)
            most = max(0, most - rows)
        return kept

    def _put(self, table: pa.Table, path: str) -> str:
        self.store.write_table(path, table.select(SCHEMA.names))
        return path

    def _frame(self, table: Learnt) -> DataFrame:
        if isinstance(table, FileBackedState):
            return self.spark.read.parquet(*[self.store.spark_url(path) for path, _ in table.parts])
        return self.spark.createDataFrame(table)


def _most(op: Fitted) -> int:
    assert isinstance(op, Categorify)
    return op.max_size
