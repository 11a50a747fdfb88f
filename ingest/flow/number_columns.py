"""Where row groups of one form have the columns of numbers: `NumberColumns`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.columns import Columns
from sluice.ingest.flow.decoded import others_of
from sluice.ingest.flow.place_rows import (
    COLUMN,
    CONVERTED,
    DOUBLES_TO_FLOATS,
    IDS,
    LONGS_TO_FLOATS,
    LONGS_TO_IDS,
    WORDS,
    WORDS_TO_FLOATS,
)

_KINDS = (
    {
        pa.float32(): (WORDS, WORDS),
        pa.float64(): (DOUBLES_TO_FLOATS, DOUBLES_TO_FLOATS),
        pa.int64(): (LONGS_TO_FLOATS, LONGS_TO_FLOATS),
        pa.int8(): (CONVERTED, WORDS_TO_FLOATS),
    },
    {
        pa.int32(): (IDS, IDS),
        pa.int64(): (LONGS_TO_IDS, LONGS_TO_IDS),
    },
)
"""What happens to floats and to ids, by their type: in Arrow's memory, and in stored pages."""


class NumberColumns:
    """Which columns of numbers are stored pages, and which are in Arrow's memory."""

    def __init__(self, schema: pa.Schema, columns: Columns, stored: tuple[str, ...] = ()):
        self.schema, self.stored = schema, stored
        wanted = [
            (name, kinds.get(schema.field(name).type, (CONVERTED, CONVERTED))[name in stored])
            for names, kinds in zip((columns.floats, columns.scalars), _KINDS, strict=True)
            for name in names
            if name not in columns.added
        ]
        self.kinds = np.array([kind for _, kind in wanted], np.int64)
        """What happens to each column: floats, then ids."""
        for n, (name, _) in enumerate(wanted):
            if self.kinds[n] == LONGS_TO_IDS and columns.id_kind(name) is not np.int32:
                self.kinds[n] = CONVERTED
        at = [n for n, (name, _) in enumerate(wanted) if name in stored]
        self._in_pages = at, [stored.index(wanted[n][0]) for n in at]
        """The indices of the columns that are stored pages, among all columns and among the stored ones."""
        self._in_arrow = {
            name: n
            for n, (name, _) in enumerate(wanted)
            if name not in stored and self.kinds[n] != CONVERTED
        }
        """The index of each column that is moved from Arrow's memory."""

    def describe(self, rows: Any) -> tuple[npt.NDArray[np.void], Any]:
        """Returns all columns of some rows in the form that the compiled function takes, and what owns them. `rows` are
        an Arrow table, or rows of which some columns are stored pages (`StoredRows`). The kind of a column is
        CONVERTED also where values are missing."""
        described = np.zeros(len(self.kinds), COLUMN)
        table = others_of(rows)
        if table is not rows:
            at, number = self._in_pages
            described[at] = rows.pages[number]
        described["kind"] = self.kinds
        if not self._in_arrow:
            return described, rows
        batches = table.to_batches()
        if len(batches) != 1:
            batches = table.select([*self._in_arrow]).combine_chunks().to_batches()
        for name, column in self._in_arrow.items() if batches else ():
            array = batches[0].column(name)
            if array.null_count:
                described["kind"][column] = CONVERTED
            width = array.type.bit_width // 8
            described["values"][column] = array.buffers()[1].address + width * array.offset
        return described, (rows, batches)


def count_converted(schema: pa.Schema, columns: Columns) -> int:
    """Returns how many columns of numbers must be converted before they are moved."""
    return int(np.count_nonzero(NumberColumns(schema, columns).kinds == CONVERTED))
