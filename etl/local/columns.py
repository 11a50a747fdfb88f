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
from sluice.etl.apply.lines import Flags
from sluice.etl.apply.parse import ARROW_TYPES
from sluice.etl.common.errors import InputError
from sluice.etl.local.input_paths import InputFile
from sluice.etl.spec.spec import Input

_PIECE_ROWS, _BATCH_BYTES = 1 << 17, 64 << 20
_SPARK = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "uint8": "smallint",
          "uint16": "int", "uint32": "bigint", "uint64": "decimal(20,0)", "halffloat": "float", "bool": "boolean",
          "large_string": "string", "string_view": "string", "date32[day]": "date"}
_NUMBERS = ("boolean", "tinyint", "smallint", "int", "bigint")
_READ = {"int": _NUMBERS, "float": (*_NUMBERS, "float", "double", "decimal(20,0)"),
         "text": (*_NUMBERS, "decimal(20,0)", "string", "date"), "texts": ("array<string>",),
         "floats": tuple(f"array<{kind}>" for kind in (*_NUMBERS[1:], "float", "double"))}


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Some row groups of a Parquet file."""

    file: InputFile
    number: int  # of the first of them
    groups: tuple[int, ...]
    size: int  # in rows
    source: Input
    constant: Mapping[str, Any]  # the values that a Delta table's log, not the file, has for its rows

    def batches(self, _headers: tuple[bytes, ...]) -> Iterator[pa.RecordBatch]:
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
            known = batch[name] if name in batch.schema.names else pa.array([self.constant.get(name)] * batch.num_rows)
            values, lost = converted(known, kind)
            columns.append(values)
            if lost is not None:
                bad[lost & (bad == "")] = name
        return pa.record_batch([*columns, pa.array(bad, pa.string(), mask=bad == "")], [*self.source.columns, "_bad"])


def row_groups_of(files: Iterable[InputFile], source: Input, constants: Mapping[str, Mapping[str, Any]]
                  ) -> Iterator[RowGroups]:
    for file in files:
        footer = pq.read_metadata(file.open())
        rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        step = max(1, _PIECE_ROWS // max([1, *rows]))
        for first in range(0, len(rows), step):
            groups = range(first, min(first + step, len(rows)))
            yield RowGroups(file, first, tuple(groups), sum(rows[g] for g in groups), source,
                            constants.get(file.path, {}))


def check_columns(named: str, schemas: Mapping[str, pa.Schema], source: Input, constant: Iterable[str]) -> None:
    """Refuses files whose columns do not agree, or are not those of the spec, or cannot become them here."""
    types = {file: {field.name: spark_name(field.type) for field in schema} for file, schema in schemas.items()}
    everywhere = dict.fromkeys([*(name for found in types.values() for name in found), *constant])
    if source.format == "parquet":
        refuse_differences(types, source.columns, source.optional)
    refuse_missing(named, everywhere, [name for name in source.columns if name not in source.optional])
    for file, schema in schemas.items():
        for name in source.columns.keys() & types[file].keys():
            kind = source.columns[name]
            try:
                converted(pa.array([], schema.field(name).type), kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise InputError(f"{file}: column {name!r} holds {types[file][name]}, which the local engine does not "
                                 f"read as {kind}; run it with --engine spark") from None


def spark_name(kind: pa.DataType) -> str:
    """The name that Spark has for a type in a Parquet file."""
    if pa.types.is_dictionary(kind):
        return spark_name(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"array<{spark_name(kind.value_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return _SPARK.get(str(kind), str(kind).replace("decimal128", "decimal").replace(", ", ","))


def converted(values: pa.Array, kind: str) -> tuple[pa.Array, Flags | None]:
    """The values in the type of a spec's column, and which of them do not fit it, if any may not; ArrowInvalid if this
    kind of values is not read here."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    have, want, name = values.type, ARROW_TYPES[kind], spark_name(values.type)
    if kind == "int" and (pa.types.is_floating(have) or have == pa.uint64()):
        return _whole(values)
    if name == "timestamp" and kind in ("int", "float"):  # seconds, of microseconds in UTC
        micros = values.cast(pa.timestamp("us", have.tz), safe=False).cast(pa.int64())
        seconds = pc.divide(micros.cast(pa.float64()), 1e6)
        return (pc.floor(seconds).cast(want) if kind == "int" else seconds), None
    if have == want or pa.types.is_null(have) or name in _READ[kind]:
        return values.cast(want, safe=not kind.startswith("float")), None  # a float rounds large whole numbers
    raise pa.ArrowInvalid(f"{name} is not read as {kind}")


def _whole(values: pa.Array) -> tuple[pa.Array, Flags]:
    """Numbers cut to whole ones; those that no 64 bits hold do not fit."""
    nulls = pc.is_null(values).to_numpy(zero_copy_only=False)
    numbers = pc.fill_null(values, pa.scalar(0, values.type)).to_numpy(zero_copy_only=False)
    fits = numbers < np.uint64(2**63) if values.type == pa.uint64() else (numbers >= -(2.0**63)) & (numbers < 2.0**63)
    return pa.array(np.trunc(np.where(fits, numbers, 0)).astype(np.int64), mask=nulls | ~fits), ~fits & ~nulls
