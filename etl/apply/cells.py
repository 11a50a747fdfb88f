"""What a cell of a declared type is, in each form in which it comes.

`TextCells` reads texts as the input writes them, `json_cell` reads a value of JSON, and `stored_column` a column of
Parquet, of a table or of a side table. Jobs and the server use these three."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.spec.input_section import NUMBERS, Input
from sluice.etl.spec.input_values import ARROW_TYPES, converted, grouped_digits, is_text

WRONG = {
    "int": "not a whole number of 64 bits",
    "float": "not a number of 64 bits",
    "text": "not UTF-8 text",
    "texts": "not a list of texts",
    "floats": "not a list of numbers of 64 bits",
}
"""For each type, why a value does not fit it."""
_ELEMENT = {"texts": "text", "floats": "float"}

_SPACE = " \t"
"""The characters that may surround a number."""
_PLAIN = {
    "int": r"^[ \t]*-?[0-9]{1,18}[ \t]*$",
    "float": r"^[ \t]*-?[0-9]{1,18}(\.[0-9]{1,18})?[ \t]*$",
    "text": r"^[\x00-\x7f]*$",
}
"""For each type, a pattern of cells that certainly convert to it."""
INFINITY = r"(?i)^[ \t]*[+-]?inf(inity)?[ \t]*$"
"""A pattern of cells that name an infinity. Any other cell that Arrow reads as infinite has too large a number."""


class TextCells:
    """Reads the texts of one input by its `decimal`, `thousands`, `null_values`, and the formats of its times."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._thousands, self._decimal = source.thousands, source.decimal
        fraction = rf"(?:{re.escape(source.decimal)}[0-9]*)?"
        self._grouped = rf"^[ \t]*[+-]?{grouped_digits(source.thousands)}{fraction}[ \t]*$"
        missing = "|".join(map(re.escape, source.null_values))
        self._missing = rf"^[ \t]*(?:{missing})[ \t]*$" if source.null_values else None
        self.quoted_missing = f'"(?:{missing})"' if source.null_values else None
        """A pattern of the texts for missing numbers in JSON."""
        self.are_special = bool(source.thousands or source.null_values)
        """Whether Arrow's reader of lines cannot read these texts."""

    def column(self, name: str, texts: pa.Array) -> tuple[pa.Array, list[int]]:
        """Returns the numbers, or the times, in a column's texts, and the rows whose text is none. Their value is
        null."""
        kind = self._source.columns[name]
        if name not in self._source.times:
            return self.convert(texts, kind)
        texts = self._drop_missing(texts)
        times = self._source.times[name].apply(texts, None)
        is_none = pc.and_(pc.is_valid(texts), pc.is_null(times))
        return times.cast(ARROW_TYPES[kind]), find_false(pc.invert(is_none))

    def _drop_missing(self, cells: pa.Array) -> pa.Array:
        """Returns the cells with null in place of those that stand for a missing value."""
        if self._missing is None:
            return cells
        is_missing = pc.match_substring_regex(cells, self._missing)
        return pc.if_else(is_missing, pa.scalar(None, cells.type), cells)

    def convert(self, cells: pa.Array, kind: str) -> tuple[pa.Array, list[int]]:
        """Returns the values of a column, and the rows whose cell cannot be converted: their value is null. Arrow
        converts all cells together if it can. Otherwise the unusual ones are converted one by one."""
        cells = cells.cast(pa.binary())
        if kind != "text":
            cells = self._rewrite(self._drop_missing(cells))
        try:
            values = _cast(cells, kind)
            if kind != "float" or not pc.any(pc.is_inf(values)).as_py():
                return values, []
        except pa.ArrowInvalid:
            pass
        plain = pc.fill_null(pc.match_substring_regex(cells, _PLAIN[kind]), True)
        converted, bad = list[Any](), list[int]()
        for row in find_false(plain):
            try:
                converted.append(_convert_cell(cells[row].as_py(), kind))
            except ValueError:
                converted.append(None)
                bad.append(row)
        return pc.replace_with_mask(
            _cast(pc.if_else(plain, cells, None), kind),
            pc.invert(plain),
            pa.array(converted, ARROW_TYPES[kind]),
        ), bad

    def number(self, text: str, kind: str) -> Any:
        """Returns the number in one text, or None. Raises a ValueError if it has none of that type."""
        values, bad = self.convert(pa.array([text.encode()]), kind)
        if bad:
            raise ValueError(f"{text!r} is no {kind}")
        return values[0].as_py()

    def _rewrite(self, cells: pa.Array) -> pa.Array:
        """Returns numbers as Arrow reads them. A wrong mark stays wrong."""
        if self._thousands:
            is_grouped = pc.match_substring_regex(cells, self._grouped)
            cells = pc.if_else(is_grouped, pc.replace_substring(cells, self._thousands, ""), cells)
        if self._decimal == ",":
            # A number with a point must fail.
            cells = pc.replace_substring(pc.replace_substring(cells, ".", "?"), ",", ".")
        return cells


def find_false(flags: pa.Array) -> list[int]:
    return np.flatnonzero(~np.asarray(flags)).tolist()


def _cast(cells: pa.Array, kind: str) -> pa.Array:
    """Converts all cells together. Raises ArrowInvalid if one is not UTF-8 or not of that type."""
    text = cells.cast(pa.string())
    return text if kind == "text" else pc.utf8_trim(text, _SPACE).cast(ARROW_TYPES[kind])


def _convert_cell(cell: bytes, kind: str) -> Any:
    """Converts one cell. Raises a ValueError if it is not of that type, or too large a number."""
    text = cell.decode()
    if kind == "text":
        return text
    value = pa.scalar(text.strip(_SPACE)).cast(ARROW_TYPES[kind]).as_py()
    if kind == "float" and math.isinf(value) and not re.match(INFINITY, text):
        raise ValueError(f"{text!r} is larger than any number of 64 bits")
    return value


def has_infinity(table: pa.Table) -> bool:
    """Returns whether a column of numbers, or of lists of them, has an infinity. Arrow reads numbers that are a little
    too large as infinite."""
    columns = (
        pc.list_flatten(column) if pa.types.is_list(column.type) else column
        for column in table.columns
    )
    return any(
        pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py()
        for column in columns
    )


def is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def json_cell(value: Any, kind: str, texts: TextCells | None = None) -> Any:
    """Returns a value of JSON as Arrow reads it in a column of that type. Raises a ValueError or an OverflowError if it
    does not fit.

    As numbers, true and false are 1 and 0. In a list of texts, a whole number becomes the text of its digits. With
    `texts`, a number may be a text."""
    if value is None:
        return None
    if isinstance(value, list) and kind in _ELEMENT:
        items = (str(one) if kind == "texts" and is_whole_number(one) else one for one in value)
        return [json_cell(item, _ELEMENT[kind]) for item in items]
    if isinstance(value, str) and kind == "text":
        value.encode()  # fails for half of a surrogate pair
        return value
    if isinstance(value, str) and texts and kind in NUMBERS:
        return texts.number(value, kind)
    if isinstance(value, int) and kind == "int" and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, (int, float)) and kind == "float" and not math.isinf(value):
        return float(value)
    raise ValueError(f"{value!r} is no {kind}")


def stored_column(
    values: pa.Array, kind: str, texts: TextCells
) -> tuple[pa.Array, npt.NDArray[np.bool_] | None]:
    """Returns the values of a stored column in a type of the spec, and which do not fit it, or None if all do. Raises
    ArrowInvalid for types that are not read. A number may be stored as a text, and a text as bytes."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    is_bytes = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
    if (is_text(values.type) and kind in NUMBERS) or (is_bytes and kind == "text"):
        found, bad = texts.convert(values, kind)
        lost = np.zeros(len(values), bool)
        lost[bad] = True
        return found, lost
    return converted(values, kind)


def stored_cells(rows: pa.RecordBatch, source: Input) -> pa.RecordBatch:
    """Returns the spec's columns of stored rows, and `_bad`, the name of the first column whose value does not fit its
    type. A column that the rows lack is null."""
    columns, bad = [], np.full(rows.num_rows, "", object)
    texts = TextCells(source)
    for name, kind in source.read_as.items():
        known = rows[name] if name in rows.schema.names else pa.nulls(rows.num_rows)
        values, lost = stored_column(known, kind, texts)
        columns.append(values)
        if lost is not None:
            bad[lost & (bad == "")] = name
    return pa.record_batch(
        [*columns, pa.array(bad, pa.string(), mask=bad == "")], [*source.columns, "_bad"]
    )
