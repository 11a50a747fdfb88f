"""`CompiledLines`: cuts regular lines of delimited text into columns, in one compiled pass.

A line with anything unusual is left to `sluice.etl.apply.lines`: another number of fields, a quote at the start of a
field, an inner carriage return, or a whole number that is not just up to 18 digits."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sluice.common.native import call_kernel, has_kernel
from sluice.etl.apply.lines import is_utf8
from sluice.etl.ops.base import Columns
from sluice.etl.ops.hashing import Flags, offsets_and_bytes
from sluice.etl.spec.input_section import Input

_QUOTE = ord('"')


class CompiledLines:
    """Cuts the lines of one input."""

    def __init__(self, source: Input) -> None:
        self._kinds = source.read_as
        self._is_int = np.array([kind == "int" for kind in self._kinds.values()])
        self._marks = (ord(source.delimiter), _QUOTE if source.format == "csv" else -1)

    @staticmethod
    def may_read(source: Input) -> bool:
        """Returns whether an input has only whole numbers and texts, in their usual form, and the kernel is there."""
        return (
            source.format in ("tsv", "csv")
            and {*source.read_as.values()} <= {"int", "text"}
            and not (source.thousands or source.null_values)
            and has_kernel()
        )

    def read(self, lines: pa.Array) -> tuple[Columns, Flags]:
        """Returns the columns of the regular lines, and which lines are irregular. A column is of whole numbers, or of
        texts with a dictionary."""
        bounds, data = offsets_and_bytes(lines)
        shape = (len(self._kinds), len(lines))
        starts, sizes = np.empty(shape, np.int32), np.empty(shape, np.int32)
        values, irregular = np.empty(shape, np.int64), np.zeros(len(lines), bool)
        # If some bytes are not UTF-8, all lines that are not ASCII are irregular.
        largest = 256 if is_utf8(pa.py_buffer(data[bounds[0] : bounds[-1]])) else 128
        shape_of_cells = self._is_int, len(self._is_int), *self._marks, largest
        cells = starts, sizes, values, irregular
        rows = call_kernel("cut_lines", data, bounds, len(lines), *shape_of_cells, *cells)
        columns = Columns()
        for number, (name, kind) in enumerate(self._kinds.items()):
            size, value = sizes[number, :rows], values[number, :rows]
            if kind == "int":
                columns[name] = pa.array(value, mask=size == 0)
                continue
            codes, first = np.empty(rows, np.int32), np.empty(rows, np.int32)
            start = starts[number, :rows]
            count = call_kernel("encode_texts", data, start, size, value, rows, codes, first)
            if count < 0:
                raise MemoryError("the distinct texts of a part do not fit into memory")
            ends = np.zeros(count + 1, np.int32)
            np.cumsum(size[first[:count]], out=ends[1:])
            texts = np.empty(ends[-1], np.uint8)
            call_kernel("gather_texts", data, start[first[:count]], ends, count, texts)
            buffers = [None, pa.py_buffer(ends), pa.py_buffer(texts)]
            distinct = pa.Array.from_buffers(pa.string(), count, buffers)
            indices = pa.array(codes, mask=size == 0)
            columns[name] = pa.DictionaryArray.from_arrays(indices, distinct)
        return columns, irregular
