"""Where Arrow has the numbers of a table in memory: `Layout` of a schema, and `Addresses` in one table of it, taken by
one call for all columns."""

from __future__ import annotations

import ctypes

import numpy as np
import pyarrow as pa

from ingest.columns import Columns
from ingest.placing import BYTES_TO_FLOATS, BYTES_TO_WORDS, CONVERTED, WORDS, children

_KINDS = ({pa.float32(): WORDS, pa.int8(): BYTES_TO_FLOATS}, {pa.int32(): WORDS, pa.int8(): BYTES_TO_WORDS})
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Layout:
    """How the numbers of tables of one schema can be taken from where they lie."""

    def __init__(self, schema: pa.Schema, columns: Columns):
        self.schema = schema
        wanted = [(name, _KINDS[0]) for name in columns.floats] + [(name, _KINDS[1]) for name in columns.scalars]
        types = [schema.field(name).type for name, _ in wanted]
        self.kinds = np.array([of.get(kind, CONVERTED) for kind, (_, of) in zip(types, wanted, strict=True)], np.int64)
        """Of each column of floats, then of ids."""
        self.names = tuple(name for (name, _), kind in zip(wanted, self.kinds, strict=True) if kind != CONVERTED)
        self.at = np.cumsum(self.kinds != CONVERTED) - 1
        """Where a column is among `names`, if it is."""
        self.widths = np.array([schema.field(name).type.bit_width // 8 for name in self.names], np.int64)


def converted(schema: pa.Schema, columns: Columns) -> int:
    """Columns of one number a row whose values are not taken as they lie."""
    return int(np.count_nonzero(Layout(schema, columns).kinds == CONVERTED))


class Addresses:
    """They hold while this object lives."""

    def __init__(self, table: pa.Table, layout: Layout):
        part = table.select(layout.names)
        batches = part.to_batches()
        [batch] = batches if len(batches) == 1 else part.combine_chunks().to_batches()
        _, self._owner = batch.__arrow_c_array__()
        self.values = np.empty(len(layout.names), np.uint64)
        """Of the first value of each of the layout's columns."""
        self.nulls = np.empty(len(layout.names), np.int64)
        """How many of its values are empty; -1: not known yet."""
        children(np.uint64(_pointer(self._owner, b"arrow_array")), layout.widths, self.values, self.nulls)
