"""Input that has columns, Parquet and Delta, in pieces that threads take: `RowGroups`, and `check_columns`.

Values become what Spark's `try_cast` makes of them; a kind of column for which that is not built here is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.etl.apply.input_checks import refuse_differences, refuse_missing
from sluice.etl.apply.parse import ARROW_TYPES
from sluice.etl.common.errors import InputError
from sluice.etl.local.places import InputFile
from sluice.etl.spec.spec import Input

_PIECE_ROWS = 1 << 17
_BATCH_BYTES = 64 << 20
_SPARK = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "uint8": "smallint",
          "uint16": "int", "uint32": "bigint", "uint64": "decimal(20,0)", "halffloat": "float", "bool": "boolean",
          "large_string": "string", "string_view": "string", "large_binary": "binary", "date32[day]": "date"}


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Some row groups of a Parquet file."""

    file: InputFile
    number: int
    """The first of them: its number in its file."""
    groups: tuple[int, ...]
    size: int
    """Their rows."""
    source: Input
    constant: Mapping[str, Any]
    """The values that a Delta table's log, not the file, has for its rows."""

    def batches(self, _header: bytes) -> Iterator[pa.RecordBatch]:
        """The spec's columns, and `_bad`, the name of the first that does not fit its type."""
        with self.file.open() as stream:
            reader = pq.ParquetFile(stream)
            there = [name for name in self.source.columns if name in reader.schema_arrow.names]
            width = sum(reader.metadata.row_group(g).total_byte_size for g in self.groups) // max(1, self.size)
            rows = max(1024, min(_PIECE_ROWS, _BATCH_BYTES // max(1, width)))
            for batch in reader.iter_batches(rows, list(self.groups), there, use_threads=False):
                yield self._typed(batch)

    def _typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns, bad = [], np.full(batch.num_rows, "", object)
        for name, kind in self.source.columns.items():
            if name in batch.schema.names:
                values, lost = converted(batch[name], kind)
            else:
                value = self.constant.get(name)
                values, lost = converted(pa.array([value] * batch.num_rows, None if value is not None else
                                                  ARROW_TYPES[kind]), kind)
            columns.append(values)
            if lost is not None:
                bad[lost & (bad == "")] = name
        return pa.record_batch([*columns, pa.array(bad, pa.string(), mask=bad == "")], [*self.source.columns, "_bad"])


def row_groups_of(files: Iterable[InputFile], source: Input, constants: Mapping[str, Mapping[str, Any]]
                  ) -> Iterator[RowGroups]:
    for file in files:
        with file.open() as stream:
            footer = pq.read_metadata(stream)
        held: list[int] = []
        rows = 0
        for group in range(footer.num_row_groups):
            held.append(group)
            rows += footer.row_group(group).num_rows
            if rows >= _PIECE_ROWS or group == footer.num_row_groups - 1:
                yield RowGroups(file, held[0], tuple(held), rows, source, constants.get(file.path, {}))
                held, rows = [], 0


def check_columns(named: str, schemas: Mapping[str, pa.Schema], source: Input, constant: Iterable[str]) -> None:
    """Refuses files whose columns do not agree, or are not those of the spec, or cannot become them here."""
    types = {file: {field.name: spark_name(field.type) for field in schema} for file, schema in schemas.items()}
    everywhere = list(dict.fromkeys([name for found in types.values() for name in found] + list(constant)))
    if source.format == "parquet":
        refuse_differences(types, source.columns, source.optional)
    refuse_missing(named, everywhere, [name for name in source.columns if name not in source.optional])
    for file, schema in schemas.items():
        for name, kind in source.columns.items():
            place = schema.get_field_index(name)
            if place >= 0:
                try:
                    converted(pa.array([], schema.field(place).type), kind)
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                    raise InputError(f"{file}: column {name!r} holds {types[file][name]}, which the local engine does "
                                     f"not read as {kind}; run it with --engine spark") from None


def spark_name(kind: pa.DataType) -> str:
    """The name that Spark has for a type in a Parquet file."""
    if pa.types.is_dictionary(kind):
        return spark_name(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"array<{spark_name(kind.value_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return _SPARK.get(str(kind), str(kind).replace("decimal128", "decimal").replace(", ", ","))


def converted(values: pa.Array, kind: str) -> tuple[pa.Array, np.ndarray | None]:
    """The values in the type of a spec's column, and which of them do not fit it, if any may not; ArrowInvalid if this
    kind of values is not read here."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    have, want = values.type, ARROW_TYPES[kind]
    name = spark_name(have)
    if have == want:
        return values, None
    if pa.types.is_null(have):
        return values.cast(want), None
    if kind == "int" and pa.types.is_floating(have):
        return _whole(values)
    number = pa.types.is_boolean(have) or (pa.types.is_integer(have) and have != pa.uint64())
    if (kind in ("int", "float") and number) or (kind == "float" and pa.types.is_floating(have)) or (
            kind == "text" and (number or name in ("string", "date"))):
        return values.cast(want), None
    if kind in ("int", "float") and name == "timestamp":
        micros = values.cast(pa.timestamp("us", have.tz), safe=False).cast(pa.int64())
        return (pc.cast(pc.floor(pc.divide(micros.cast(pa.float64()), 1e6)), pa.int64()) if kind == "int" else
                pc.divide(micros.cast(pa.float64()), 1e6)), None
    inner = {"texts": ("string",), "floats": ("tinyint", "smallint", "int", "bigint", "float", "double")}.get(kind, ())
    if name.startswith("array<") and name[6:-1] in inner:
        return values.cast(want), None
    raise pa.ArrowInvalid(f"{name} is not read as {kind}")


def _whole(values: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Numbers cut to whole ones; those that no 64 bits hold do not fit."""
    wide = values.cast(pa.float64())
    nulls = pc.is_null(wide).to_numpy(zero_copy_only=False)
    numbers = pc.fill_null(wide, 0.0).to_numpy(zero_copy_only=False)
    fits = (numbers >= -(2.0**63)) & (numbers < 2.0**63)
    return pa.array(np.trunc(np.where(fits, numbers, 0.0)).astype(np.int64), mask=nulls | ~fits), ~fits & ~nulls
