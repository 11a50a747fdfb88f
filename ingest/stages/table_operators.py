"""Applies the operators that a table leaves to the loader.

They run where a row group is decoded. There, a number still has 64 bits, a text that is stored once is processed once,
and results that wait for the shuffle take four bytes a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from sluice.etl import ops
from sluice.etl.schema import Field
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.stages.number_types import to_batch_type


class Operators:
    """A table's online operators. Any thread may apply them."""

    def __init__(self, fields: Sequence[Field], state: Any):
        """`state` is the table's fitted state."""
        self._functions = {f.name: ops.online(f, state) for f in fields if f.online}

    def filled(self, columns: Columns) -> Columns:
        """Returns the columns with a fill only for columns without online operators."""
        fill = {n: value for n, value in columns.fill.items() if n not in self._functions}
        return replace(columns, fill=fill)

    def made(self, columns: Columns, names: Sequence[str] = ()) -> OperatorColumns | None:
        """Returns what makes these columns, or only those in `names`, from a decoded row group. None: no operator makes
        one of them."""
        names = names or columns.names
        changed = [name for name in self._functions if name in names]
        return OperatorColumns(self, changed, columns, names) if changed else None

    def apply(self, name: str, values: pa.Array) -> npt.NDArray[Any] | pa.Array:
        """Applies the operators of a column to its stored values."""
        return to_batch_type(self._functions[name](values))


class OperatorColumns:
    """A table's columns as they are loaded: online operators change some, and the others stay as they are stored."""

    selection = None
    typed: Mapping[str, pa.DataType] = MappingProxyType({})
    optional = frozenset[str]()
    more_bytes = 0  # the stored columns of operators are texts or have eight bytes a value

    def __init__(
        self, operators: Operators, changed: Sequence[str], columns: Columns, names: Sequence[str]
    ):
        self._operators, self.sources = operators, tuple(names)
        kinds = {name: pa.from_numpy_dtype(columns.id_kind(name)) for name in columns.sparse}
        self._types = {
            name: pa.list_(kinds[name]) if name in columns.bags else kinds.get(name, pa.float32())
            for name in changed
        }
        self.row_bytes = round(sum(4 + 4 * columns.bags.get(name, 0.0) for name in changed))

    def schema(self, stored: pa.Schema) -> pa.Schema:
        """Returns the schema of `table`'s result for a stored table of this schema."""
        return pa.schema(
            [
                pa.field(f.name, self._types.get(f.name, f.type))
                for f in map(stored.field, self.sources)
            ]
        )

    def dictionary_columns(self, stored: pa.Schema, _footer: Any) -> list[str]:
        """Returns the columns to read as dictionaries: texts, so that each distinct text is processed once."""
        return [f.name for f in stored if pa.types.is_string(f.type)]

    def table(self, stored: pa.Table) -> pa.Table:
        """Makes the columns of a row group. Raises ColumnError if an operator fails."""
        made = {}
        for name in self.sources:
            made[name] = stored.column(name)
            if name in self._types:
                try:
                    made[name] = pa.chunked_array(
                        [
                            pa.array(self._operators.apply(name, chunk))
                            for chunk in made[name].chunks
                        ],
                        self._types[name],
                    )
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    raise ColumnError(
                        f"the operators of column {name!r} failed: {type(error).__name__}: {error}"
                    ) from error
        return pa.table(made)
