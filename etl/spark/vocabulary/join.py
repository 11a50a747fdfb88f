"""`VocabularyJoins`: gives values their ids by a join with vocabularies in files.

Workers know only the most frequent values of such a vocabulary. A worker gives them their ids. It gives any other value
the id of its bucket, and Spark then joins the value with the files, which may know its own id. Frequent values and
nulls do not take part in the join, so no task gets too many rows.
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
class JoinedOperator:
    """A column, and the number of its operator that a join applies."""

    column: ColumnSpec
    number: int
    is_list: bool
    """Whether the operator gets lists."""

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
        return not self.is_list and self.number == len(self.column.ops) - 1

    def look_up_head(
        self, features: Features, columns: Mapping[str, pa.Array], extras: Mapping[str, pa.Array]
    ) -> tuple[pa.Array, pa.Array]:
        """Returns the ids that the worker knows, and the values to look up in the files. Runs in a worker."""
        values = features.run(self.column, self.column.ops[: self.number], columns, extras)
        lengths = None
        if self.is_list:
            values, lengths = flat(values)
        texts = values.cast(pa.string())
        ids = step(self.op, texts, features.prepared(self.key, self.op), extras)
        unknown = pc.and_(pc.greater_equal(ids, FIRST), pc.less(ids, FIRST + self.op.oov))
        unknown_values = pc.if_else(unknown, texts, pa.scalar(None, pa.string()))
        return (
            (ids, unknown_values)
            if lengths is None
            else (relisted(ids, lengths), relisted(unknown_values, lengths))
        )


@dataclass(frozen=True, slots=True)
class VocabularyJoins:
    """All columns of a job that need a join. Usually there are none."""

    spec: Spec
    operators: tuple[JoinedOperator, ...] = ()
    head: int = 1
    """The number of the most frequent values of a vocabulary that the workers know."""

    @classmethod
    def of(cls, spec: Spec, keys: Sequence[str], head: int) -> VocabularyJoins:
        operators = [
            JoinedOperator(column, number, _kind(spec, column, number) in ELEMENTS)
            for column in spec.columns
            for key, _, number in column.fitted
            if key in keys and (column.online is None or number < column.online)
        ]
        return cls(spec, tuple(operators), head)

    @property
    def names(self) -> list[str]:
        return [operator.column.name for operator in self.operators]

    @property
    def columns(self) -> list[str]:
        """The names of the columns that `look_up_head` returns."""
        return [
            name
            for index, operator in enumerate(self.operators)
            for name in (operator.column.name, f"_value{index}")
        ]

    @property
    def types(self) -> list[str]:
        return [
            part
            for index, operator in enumerate(self.operators)
            for part in (
                f"`{operator.column.name}` {'array<int>' if operator.is_list else 'int'} not null",
                f"_value{index} {'array<string>' if operator.is_list else 'string'}",
            )
        ]

    def for_workers(self, state: FittedState) -> FittedState:
        """Returns the state that workers need, with only the most frequent values of each joined vocabulary."""
        heads = {
            operator.key: table.head(self.head)
            for operator in self.operators
            if isinstance(table := state.kept(operator.key), FileBackedState)
        }
        return replace(state, tables={**state.tables, **heads})

    def look_up_head(
        self,
        features: Features,
        columns: Mapping[str, pa.Array],
        keys: Keys,
        split: npt.NDArray[np.int32] | None = None,
        folds: Keys | None = None,
    ) -> list[pa.Array]:
        if not self.operators:
            return []
        extras = features.extras(columns, keys, split, folds)
        return [
            part
            for operator in self.operators
            for part in operator.look_up_head(features, columns, extras)
        ]

    def join_ids(self, rows: DataFrame, state: FittedState, types: Mapping[str, str]) -> DataFrame:
        """Returns the rows with the ids from the files, after the operators that follow. `types` are those of the
        finished columns."""
        if not self.operators:
            return rows
        for index, operator in enumerate(self.operators):
            table = state.kept(operator.key)
            assert isinstance(table, FileBackedState)
            known = _read_ids(rows, table, self.head, FIRST + operator.op.oov)
            rows = (_join_lists if operator.is_list else _join_values)(
                rows, operator.column.name, f"_value{index}", known
            )
        if all(operator.finished for operator in self.operators):
            return rows
        kinds = [types.get(name, f"`{name}` {kind} not null") for name, kind in rows.dtypes]
        return rows.mapInArrow(partial(_finish_columns, self), ", ".join(kinds))


def _kind(spec: Spec, column: ColumnSpec, number: int) -> str:
    """Returns the kind of a column before its operator with this number."""
    kind = spec.kinds[column.sources[0]] if len(column.sources) == 1 else "row"
    for op in column.ops[:number]:
        kind = follow(op, kind) or kind
    return kind


def _read_ids(rows: DataFrame, table: FileBackedState, head: int, first: int) -> DataFrame:
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
    index = offsets[sql.col("_metadata.file_name")] + sql.col("_metadata.row_index")
    return files.select(
        sql.col("value").alias("_known"), (index + first).cast("int").alias("_id")
    ).where(sql.col("_id") >= first + head)


def spread_missing_keys(rows: DataFrame, keys: list[str]) -> DataFrame:
    """Adds a column `_salt`: 0 if a row has all keys, otherwise one of many numbers. A join or window by the keys and
    the salt then does not put all rows without a key into one task."""
    from pyspark.sql import functions as sql

    missing = " or ".join(f"`{key}` is null" for key in keys)
    return rows.withColumn(
        "_salt",
        sql.when(sql.expr(missing), sql.monotonically_increasing_id() % _SALTS + 1).otherwise(0),
    )


def _join_with_files(rows: DataFrame, value: str, known: DataFrame) -> DataFrame:
    """Adds `_id` to the rows whose value is known."""
    from pyspark.sql import functions as sql

    side = known.withColumn("_no_salt", sql.lit(0)).hint("merge")
    return (
        spread_missing_keys(rows, [value])
        .join(
            side,
            (sql.col(value) == sql.col("_known")) & (sql.col("_salt") == sql.col("_no_salt")),
            "left",
        )
        .drop("_salt", "_no_salt", "_known")
    )


def _join_values(rows: DataFrame, name: str, value: str, known: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sql

    joined = _join_with_files(rows, value, known)
    return joined.withColumn(name, sql.coalesce("_id", f"`{name}`")).drop("_id", value)


def _join_lists(rows: DataFrame, name: str, value: str, known: DataFrame) -> DataFrame:
    """Joins lists element by element. The first element of a list carries the other columns of its row."""
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
        _join_with_files(one, "_left", known)
        .groupBy("_row")
        .agg(
            sql.first("_others", ignorenulls=True).alias("_others"),
            sql.sort_array(sql.collect_list(found)).alias("_ids"),
        )
    )
    return rows.select("_others.*", sql.col("_ids.id").alias(name))


def _finish_columns(joins: VocabularyJoins, batches: Batches) -> Batches:
    """Yields the columns as they are stored, after the operators that follow the ids. Runs in a worker."""
    operators = {operator.column.name: operator for operator in joins.operators}
    for batch in batches:
        columns = []
        for name in batch.schema.names:
            values = batch[name]
            if operator := operators.get(name):
                for op in operator.column.ops[operator.number + 1 :]:
                    values = step(op, values, None, {})
                values = stored(values, joins.spec, operator.column)
                if operator.column.role in NUMBERS and len(
                    unfit(values.to_numpy(zero_copy_only=False), operator.column)
                ):
                    raise FeatureError(
                        f"column {name!r}: its vocabulary is in files, and the operators after it make a number "
                        f"that may not be published ({reason(operator.column)}); clip it before, or fill it"
                    )
            columns.append(values)
        yield pa.record_batch(columns, batch.schema.names)
