"""The columns of a file, with the parts of structs: `user.id` is the part `id` of the struct `user`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def parts(schema: pa.Schema) -> Iterator[pa.Field]:
    """Yields the columns in order. A struct is replaced by its parts, with dotted names."""
    for field in schema:
        yield from _parts(field.name, field.type)


def _parts(name: str, kind: pa.DataType) -> Iterator[pa.Field]:
    if not pa.types.is_struct(kind) or not kind.num_fields:
        yield pa.field(name, kind)
        return
    for inner in kind:
        yield from _parts(f"{name}.{inner.name}", inner.type)


def flattened(table: Rows) -> Rows:
    """Returns a table, or a batch, with the parts of structs as columns. A part is null where the struct is null."""
    if not any(pa.types.is_struct(kind) for kind in table.schema.types):
        return table
    leaves = [
        part
        for name, column in zip(table.schema.names, table.columns, strict=True)
        for part in _columns(name, column)
    ]
    return type(table).from_arrays([values for _, values in leaves], [name for name, _ in leaves])


def _columns(name: str, column: Any) -> Iterator[tuple[str, Any]]:
    if not pa.types.is_struct(column.type) or not column.type.num_fields:
        yield name, column
        return
    for number, inner in enumerate(column.type):
        yield from _columns(f"{name}.{inner.name}", pc.struct_field(column, [number]))


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def join_chunks(column: pa.ChunkedArray) -> pa.Array:
    """Returns a column as one array. Copies nothing if it has one chunk."""
    if column.num_chunks == 1:
        return column.chunk(0)
    joined = column.combine_chunks()
    return joined if isinstance(joined, pa.Array) else pa.concat_arrays(joined.chunks)
