"""`SideTable`: the side table of a join, in the types of the spec. Workers convert its values as those of the input."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.cells import TextCells, stored_column
from sluice.etl.apply.parse import Batches
from sluice.etl.read.input_files import InputFiles
from sluice.etl.read.row_groups import RowGroups, check_columns
from sluice.etl.spark.columns import SPARK_TYPES, quoted
from sluice.etl.spark.session import frame_bytes
from sluice.etl.spec.input_section import WITH_COLUMNS, Input
from sluice.etl.spec.input_values import spark_name
from sluice.etl.spec.row_rules import Join
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.job_record import MORE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BROADCAST_BYTES = 32 * 2**20
_TASK_BYTES = 32 * 2**20
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_LOST = "name string, rows bigint, lost bigint, example string"


class SideTable:
    """Raises a SpecError if the side table cannot be read, and an InputError if it lacks a column of the join."""

    def __init__(self, spark: SparkSession, join: Join, spec: Spec) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._spark, self.join = spark, join
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
                self.bytes = frame_bytes(self._frame)
        except (InputError, OSError) as error:
            raise SpecError(f"{self._named}: cannot be read ({error})") from None
        for wanted in ({key: self._wanted[key]} for key in self._wanted):
            check_columns(self._named, schemas, self._source_of(wanted))
        self._schemas = list(schemas.values())
        if join.time and spec.types[join.time] == "int" and self._is_whole(str(join.their_time)):
            # Whole seconds would make a side row valid before its time, if it has fractions.
            self._wanted["_since"] = (str(join.their_time), "int")

    def _source_of(self, wanted: Mapping[str, tuple[str, str]]) -> Input:
        columns = {name: kind for name, kind in wanted.values()}
        return Input(format=self.join.format, columns=columns, decimal=self.join.decimal)

    def _is_whole(self, name: str) -> bool:
        return all(
            spark_name(schema.field(name).type) in _WHOLE
            for schema in self._schemas
            if name in schema.names
        )

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
        schema = ", ".join(
            f"{quoted(new)} {SPARK_TYPES[kind]}" for new, (_, kind) in self._wanted.items()
        )
        has_keys = " and ".join(f"_on{i} is not null" for i in range(len(self.join.on)))
        return self._map(_convert, schema).where(has_keys)

    def check_values(self, accepted: Container[str]) -> None:
        """Raises an InputError if a time cannot be read, or if too many values of a column do not fit its type. These
        values would be null in all joined rows. `accepted` are columns that are not checked."""
        texts = TextCells(self._source)
        may_lose = {
            new: (name, kind)
            for new, (name, kind) in self._wanted.items()
            if (new in self.join.columns or new == "_since") and name not in accepted
            for schema in self._schemas
            if name in schema.names
            and stored_column(pa.array([], schema.field(name).type), kind, texts)[1] is not None
        }
        if not may_lose:
            return
        found = self._map(_count_lost, _LOST, may_lose).toArrow()
        sums = found.group_by("name").aggregate(
            [("rows", "sum"), ("lost", "sum"), ("example", "min")]
        )
        for row in sums.to_pylist():
            name, kind = may_lose[row["name"]]
            share = row["lost_sum"] / max(1, row["rows_sum"])
            if row["lost_sum"] and (share >= MORE or row["name"] == "_since"):
                raise InputError(
                    f"{self._named}: column {name!r}: {share:.1%} of its values are not of its type, {kind}, for "
                    f"instance {row['example_min'][:100]!r}; nothing was published; correct them, or accept that they "
                    f"are null with --accept-nulls {name}"
                )

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

    def _map(
        self,
        work: Callable[..., Batches],
        schema: str,
        wanted: Mapping[str, tuple[str, str]] | None = None,
    ) -> DataFrame:
        """Calls a function in the workers on the columns as they are stored."""
        from pyspark.sql import functions as sql

        wanted = self._wanted if wanted is None else wanted
        names = list(dict.fromkeys(name for name, _ in wanted.values()))
        work = partial(work, wanted, self._source)
        if self._frame is not None:
            # pyspark does not quote names with dots for its workers.
            stored = [
                sql.col(quoted(name)).alias(f"_{number}") for number, name in enumerate(names)
            ]
            return self._frame.select(*stored).mapInArrow(partial(_rename, names, work), schema)
        assert self._files is not None
        tasks = self._files.tasks_of_groups(_TASK_BYTES)
        sent = self._spark.sparkContext.broadcast(tasks)
        numbers = self._spark.range(0, len(tasks), 1, max(1, len(tasks)))
        return numbers.mapInArrow(partial(_read_tasks, lambda: sent.value, names, work), schema)


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


def _stored(rows: pa.RecordBatch, name: str) -> pa.Array:
    return rows[name] if name in rows.schema.names else pa.nulls(rows.num_rows)


def _convert(wanted: Mapping[str, tuple[str, str]], source: Input, batches: Batches) -> Batches:
    """Yields the wanted columns, by their new names. A value that does not fit its type is null."""
    texts = TextCells(source)
    for rows in batches:
        yield pa.record_batch(
            {
                new: stored_column(_stored(rows, name), kind, texts)[0]
                for new, (name, kind) in wanted.items()
            }
        )


def _count_lost(wanted: Mapping[str, tuple[str, str]], source: Input, batches: Batches) -> Batches:
    """Counts the values of each column that do not fit its type, with one of them."""
    texts = TextCells(source)
    for rows in batches:
        for new, (name, kind) in wanted.items():
            stored = _stored(rows, name)
            lost = stored_column(stored, kind, texts)[1]
            numbers = [] if lost is None else np.flatnonzero(lost).tolist()
            example = min((str(stored[number].as_py()) for number in numbers), default=None)
            yield pa.record_batch(
                [[new], [rows.num_rows], [len(numbers)], pa.array([example], pa.string())],
                ["name", "rows", "lost", "example"],
            )
