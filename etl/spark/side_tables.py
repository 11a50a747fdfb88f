"""`SideTable`: the side table of a join, in the types of the spec. Workers convert its values as those of the input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.cells import TextCells, stored_column
from sluice.etl.apply.parse import Batches
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.read.input_files import InputFiles
from sluice.etl.read.row_groups import RowGroups, check_columns
from sluice.etl.spark.columns import SPARK_TYPES, quoted
from sluice.etl.spark.session import number_tasks
from sluice.etl.spec.input_section import WITH_COLUMNS, Input
from sluice.etl.spec.input_values import spark_name
from sluice.etl.spec.row_rules import Join
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BROADCAST_BYTES = 32 * 2**20
_TASK_BYTES = 32 * 2**20
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_SHOWN = 100
"""The most characters of a value in a message."""


class SideTable:
    """Raises a SpecError if the side table cannot be read, and an InputError if it lacks a column of the join."""

    def __init__(
        self, spark: SparkSession, join: Join, spec: Spec, accepted: Collection[str]
    ) -> None:
        """In the `accepted` columns, a value that does not fit its type is null."""
        from pyspark.sql.pandas.types import to_arrow_schema

        self._spark, self.join, self._accepted = spark, join, accepted
        self._named = f"join.path = {join.path!r}"
        keys = zip(join.their_on or join.on, join.on, strict=True)
        self._wanted = {f"_on{i}": (name, spec.types[ours]) for i, (name, ours) in enumerate(keys)}
        self._wanted |= {name: (name, kind) for name, kind in join.columns.items()}
        if join.time and join.their_time:
            self._wanted["_since"] = (join.their_time, "float")
        self._source = self._source_of(self._wanted)
        self._files: InputFiles | None = None
        self._frame: DataFrame | None = None
        try:
            if join.format in WITH_COLUMNS:
                self._files = InputFiles(self._source, (join.path,))
                schemas, self.bytes = self._files.schemas, self._files.bytes
            else:
                self._frame = self._read_frame()
                schemas = {join.path: to_arrow_schema(self._frame.schema)}
                plan = self._frame._jdf.queryExecution().optimizedPlan()
                self.bytes = int(str(plan.stats().sizeInBytes()))  # Spark's estimate
        except (InputError, OSError) as error:
            raise SpecError(f"{self._named}: cannot be read ({error})") from None
        for wanted in ({key: self._wanted[key]} for key in self._wanted):
            check_columns(self._named, schemas, self._source_of(wanted))
        if join.time and join.their_time and spec.types[join.time] == "int":
            have = [kinds for kinds in schemas.values() if join.their_time in kinds.names]
            if all(spark_name(kinds.field(join.their_time).type) in _WHOLE for kinds in have):
                # Whole seconds would make a side row valid before its time, if it has fractions.
                self._wanted["_since"] = (join.their_time, "int")

    def _source_of(self, wanted: Mapping[str, tuple[str, str]]) -> Input:
        columns = {name: kind for name, kind in wanted.values()}
        return Input(format=self.join.format, columns=columns, decimal=self.join.decimal)

    def _read_frame(self) -> DataFrame:
        """Reads CSV or JSON with Spark."""
        from pyspark.errors import AnalysisException, IllegalArgumentException

        join = self.join
        options = {}
        if join.format == "csv":
            options = {
                "header": str(not join.fields).lower(),
                "sep": join.delimiter,
                "encoding": join.encoding,
            }
        try:
            side = self._spark.read.options(**options).format(join.format).load(join.path)
        except (AnalysisException, IllegalArgumentException) as error:
            raise InputError(str(error).splitlines()[0]) from None
        if not join.fields:
            return side
        if len(side.columns) != len(join.fields):
            raise InputError(
                f"it has {len(side.columns)} columns, and join.fields names {len(join.fields)}; name all of them, in "
                "order"
            )
        return side.toDF(*join.fields)

    @property
    def way(self) -> str:
        """How the rows are joined: `window` if by time, `broadcast` if the side table is small, otherwise `shuffle`."""
        if self.join.time is not None:
            return "window"
        return "broadcast" if self.bytes <= _BROADCAST_BYTES else "shuffle"

    @cached_property
    def rows(self) -> DataFrame:
        """The columns that the join uses, of rows with all keys. The keys `_on0`, `_on1`, and so on have the types of
        the columns that they are compared with. `_since` is the time."""
        from pyspark.sql import functions as sql

        schema = ", ".join(
            f"{quoted(new)} {SPARK_TYPES[kind]}" for new, (_, kind) in self._wanted.items()
        )
        has_keys = " and ".join(f"_on{i} is not null" for i in range(len(self.join.on)))
        names = list(dict.fromkeys(name for name, _ in self._wanted.values()))
        refused = [
            new
            for new, (name, _) in self._wanted.items()
            if (new in self.join.columns or new == "_since") and name not in self._accepted
        ]
        work = partial(_convert, self._wanted, self._source, refused, self._named)
        if self._frame is not None:
            # pyspark does not quote names with dots for its workers.
            stored = [sql.col(quoted(name)).alias(f"_{at}") for at, name in enumerate(names)]
            rows = self._frame.select(*stored).mapInArrow(partial(_rename, names, work), schema)
        else:
            assert self._files is not None
            tasks, numbers = number_tasks(self._spark, self._files.tasks_of_groups(_TASK_BYTES))
            rows = numbers.mapInArrow(partial(_read_tasks, tasks, names, work), schema)
        return rows.where(has_keys)

    def newest_rows(self) -> DataFrame:
        """Returns the side row of each key that later rows get, with the columns `key` and those of the side table."""
        from pyspark.sql import functions as sql

        join, side = self.join, self.rows
        values = sql.struct(*map(quoted, join.columns))
        if join.time is not None:
            side = side.where("_since is not null")
            values = sql.struct("_since", values.alias("_values"))
        parts = [sql.col(f"_on{i}") for i in range(len(join.on))]
        key = parts[0] if len(parts) == 1 else sql.struct(*parts)
        one = side.groupBy(key.alias("key")).agg(sql.max(values).alias("_side"))
        path = "_side._values" if join.time is not None else "_side"
        return one.select(
            "key", *[sql.col(f"{path}.{quoted(name)}").alias(name) for name in join.columns]
        )


def _rename(names: Sequence[str], work: Callable[[Batches], Batches], batches: Batches) -> Batches:
    yield from work(batch.rename_columns(names) for batch in batches)


def _read_tasks(
    tasks: Callable[[], Sequence[Sequence[RowGroups]]],
    names: Sequence[str],
    work: Callable[[Batches], Batches],
    numbers: Batches,
) -> Batches:
    yield from work(
        rows
        for batch in numbers
        for number in batch["id"].to_pylist()
        for groups in tasks()[number]
        for rows in groups.stored(names)
    )


def _convert(
    wanted: Mapping[str, tuple[str, str]],
    source: Input,
    refused: Collection[str],
    named: str,
    batches: Batches,
) -> Batches:
    """Yields the wanted columns, by their new names. A value that does not fit its type is null, or fails the job in
    the `refused` columns."""
    texts = TextCells(source)
    for rows in batches:
        columns = {}
        for new, (name, kind) in wanted.items():
            stored = rows[name] if name in rows.schema.names else pa.nulls(rows.num_rows)
            columns[new], lost = stored_column(stored, kind, texts)
            if lost is not None and lost.any() and new in refused:
                value = str(stored[int(np.argmax(lost))].as_py())[:_SHOWN]
                raise JobFailure(
                    f"{named}: column {name!r}: {value!r} is not of its type, {kind}; nothing was published; correct "
                    f"it, or accept that such values are null with --accept-nulls {name}"
                )
        yield pa.record_batch(columns)
