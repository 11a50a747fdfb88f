"""Ids by a join with a vocabulary that is kept in files: `Joins`, which takes the place of a lookup in the workers.

A worker gives each value an id from the vocabulary's most frequent values, or else that of its bucket. If the files
may have the value, the worker passes it on, and Spark joins it with the files. Frequent values and nulls get their
ids before the join, so they never crowd one task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.failure import FeatureError
from sluice.etl.apply.features import Features, stored
from sluice.etl.apply.number_limits import NUMBERS, reason, unfit
from sluice.etl.apply.parse import Batches
from sluice.etl.ops.base import FIRST
from sluice.etl.ops.chain import ELEMENTS, follow, step
from sluice.etl.ops.ids import Categorify
from sluice.etl.ops.lists import flat, relisted
from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.spec.row_split import Keys
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState
from sluice.etl.table.store import TableStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SALTS = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """A column whose operator of that number is applied by a join."""

    column: ColumnSpec
    number: int
    many: bool
    """Whether the column holds lists at that operator."""

    @property
    def op(self) -> Categorify:
        op = self.column.ops[self.number]
        assert isinstance(op, Categorify)
        return op

    @property
    def key(self) -> str:
        return self.column.state_key(self.number)

    @property
    def finished(self) -> bool:
        """Whether only the id is stored: no operator follows."""
        return not self.many and self.number == len(self.column.ops) - 1

    def opened(
        self, features: Features, columns: Mapping[str, pa.Array], extras: Mapping[str, pa.Array]
    ) -> tuple[pa.Array, pa.Array]:
        """In a worker: returns the ids as far as it knows them, and the values that the files may know."""
        values = features.run(self.column, self.column.ops[: self.number], columns, extras)
        lengths = None
        if self.many:
            values, lengths = flat(values)
        texts = values.cast(pa.string())
        ids = step(self.op, texts, features.prepared(self.key, self.op), extras)
        unknown = pc.and_(pc.greater_equal(ids, FIRST), pc.less(ids, FIRST + self.op.oov))
        left = pc.if_else(unknown, texts, pa.scalar(None, pa.string()))
        return (ids, left) if lengths is None else (relisted(ids, lengths), relisted(left, lengths))


@dataclass(frozen=True, slots=True)
class Joins:
    """All columns of a job that need a join; most often none."""

    spec: Spec
    cells: tuple[Cell, ...] = ()
    head: int = 1
    """How many of a vocabulary's first values the workers know."""

    @classmethod
    def of(cls, spec: Spec, keys: Sequence[str], head: int) -> Joins:
        cells = [
            Cell(column, number, _kind(spec, column, number) in ELEMENTS)
            for column in spec.columns
            for key, _, number in column.fitted
            if key in keys and (column.online is None or number < column.online)
        ]
        return cls(spec, tuple(cells), head)

    @property
    def names(self) -> list[str]:
        return [cell.column.name for cell in self.cells]

    @property
    def columns(self) -> list[str]:
        """The columns that `opened` gives."""
        return [
            name
            for place, cell in enumerate(self.cells)
            for name in (cell.column.name, f"_value{place}")
        ]

    @property
    def types(self) -> list[str]:
        return [
            part
            for place, cell in enumerate(self.cells)
            for part in (
                f"`{cell.column.name}` {'array<int>' if cell.many else 'int'} not null",
                f"_value{place} {'array<string>' if cell.many else 'string'}",
            )
        ]

    def shipped(self, state: FittedState) -> FittedState:
        """The state that workers need: only the head of each joined vocabulary."""
        heads = {
            cell.key: table.head(self.head)
            for cell in self.cells
            if isinstance(table := state.kept(cell.key), FileBackedState)
        }
        return replace(state, tables={**state.tables, **heads})

    def opened(
        self,
        features: Features,
        columns: Mapping[str, pa.Array],
        keys: Keys,
        split: npt.NDArray[np.int32] | None = None,
        folds: Keys | None = None,
    ) -> list[pa.Array]:
        if not self.cells:
            return []
        extras = features.extras(columns, keys, split, folds)
        return [part for cell in self.cells for part in cell.opened(features, columns, extras)]

    def closed(self, rows: DataFrame, state: FittedState, types: Mapping[str, str]) -> DataFrame:
        """Adds the ids that only the files know, and applies what follows them; `types` are those of the finished
        columns."""
        if not self.cells:
            return rows
        for place, cell in enumerate(self.cells):
            table = state.kept(cell.key)
            assert isinstance(table, FileBackedState)
            known = _places(rows, table, self.head, FIRST + cell.op.oov)
            rows = (_of_lists if cell.many else _of_values)(
                rows, cell.column.name, f"_value{place}", known
            )
        if all(cell.finished for cell in self.cells):
            return rows
        kinds = [types.get(name, f"`{name}` {kind} not null") for name, kind in rows.dtypes]
        return rows.mapInArrow(partial(_finished, self), ", ".join(kinds))


def _kind(spec: Spec, column: ColumnSpec, number: int) -> str:
    """The kind of a column before its operator of that number."""
    kind = spec.kinds[column.sources[0]] if len(column.sources) == 1 else "row"
    for op in column.ops[:number]:
        kind = follow(op, kind) or kind
    return kind


def _places(rows: DataFrame, table: FileBackedState, head: int, first: int) -> DataFrame:
    """Returns columns (_known, _id) of the vocabulary after its head."""
    from pyspark.sql import functions as sql

    store = TableStore(table.uri)
    ends = {}
    before = 0
    for path, count in table.parts:
        ends[path.rsplit("/", 1)[-1]] = before
        before += count
    files = rows.sparkSession.read.parquet(*[store.spark_url(path) for path, _ in table.parts])
    offsets = sql.create_map(*[sql.lit(part) for pair in ends.items() for part in pair])
    place = offsets[sql.col("_metadata.file_name")] + sql.col("_metadata.row_index")
    return files.select(
        sql.col("value").alias("_known"), (place + first).cast("int").alias("_id")
    ).where(sql.col("_id") >= first + head)


def _joined(rows: DataFrame, value: str, known: DataFrame) -> DataFrame:
    """Adds `_id` to the rows whose value is known. Those without a value are spread by a salt: otherwise they would all
    share one key."""
    from pyspark.sql import functions as sql

    salt = sql.when(
        sql.col(value).isNull(), sql.monotonically_increasing_id() % _SALTS + 1
    ).otherwise(0)
    salted = rows.withColumn("_salt", salt.cast("int"))
    side = known.withColumn("_no_salt", sql.lit(0)).hint("merge")
    return salted.join(
        side,
        (sql.col(value) == sql.col("_known")) & (sql.col("_salt") == sql.col("_no_salt")),
        "left",
    ).drop("_salt", "_no_salt", "_known")


def _of_values(rows: DataFrame, name: str, value: str, known: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sql

    joined = _joined(rows, value, known)
    return joined.withColumn(name, sql.coalesce("_id", f"`{name}`")).drop("_id", value)


def _of_lists(rows: DataFrame, name: str, value: str, known: DataFrame) -> DataFrame:
    """Joins lists element by element; a row's other columns travel with its first element."""
    from pyspark.sql import functions as sql

    others = [column for column in rows.columns if column not in (name, value)]
    elements = rows.withColumn("_row", sql.monotonically_increasing_id()).select(
        "_row",
        sql.struct(*[f"`{column}`" for column in others]).alias("_others"),
        sql.posexplode_outer(
            sql.arrays_zip(sql.col(f"`{name}`").alias("_mine"), sql.col(value).alias("_left"))
        ),
    )
    one = elements.select(
        "_row",
        "pos",
        sql.when(sql.coalesce("pos", sql.lit(0)) == 0, sql.col("_others")).alias("_others"),
        sql.col("col._mine").alias("_mine"),
        sql.col("col._left").alias("_left"),
    )
    found = sql.when(
        sql.col("pos").isNotNull(), sql.struct("pos", sql.coalesce("_id", "_mine").alias("id"))
    )
    rows = (
        _joined(one, "_left", known)
        .groupBy("_row")
        .agg(
            sql.first("_others", ignorenulls=True).alias("_others"),
            sql.sort_array(sql.collect_list(found)).alias("_ids"),
        )
    )
    return rows.select("_others.*", sql.col("_ids.id").alias(name))


def _finished(joins: Joins, batches: Batches) -> Batches:
    """In a worker: applies the operators that follow the ids, and gives columns the form in which they are stored."""
    cells = {cell.column.name: cell for cell in joins.cells}
    for batch in batches:
        columns = []
        for name in batch.schema.names:
            values = batch[name]
            if cell := cells.get(name):
                for op in cell.column.ops[cell.number + 1 :]:
                    values = step(op, values, None, {})
                values = stored(values, joins.spec, cell.column)
                if cell.column.role in NUMBERS and len(
                    unfit(values.to_numpy(zero_copy_only=False), cell.column)
                ):
                    raise FeatureError(
                        f"column {name!r}: of a vocabulary in files, its operators make a number that "
                        f"may not be published ({reason(cell.column)}); clip it before, or fill it"
                    )
            columns.append(values)
        yield pa.record_batch(columns, batch.schema.names)
