"""What a cell of a declared type is, in each form in which it comes.

`TextCells` reads texts as the input writes them, `json_column` values of JSON, and `stored_column` a column of Parquet
or of a table. Jobs use them for the input and for side tables, loaders for plain files, and servers for requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.hashing import Flags
from sluice.etl.spec.input_section import ARROW_TYPES, NUMBERS, Input
from sluice.etl.spec.nested_columns import is_bytes, is_list, is_text

_SECONDS_OF_A_DAY = 86_400
_EXACT_DIGITS = 15
"""Whole numbers of up to so many digits become floats without rounding."""
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
        self._grouped = rf"^[ \t]*[+-]?[1-9][0-9]{{0,2}}(?:{re.escape(source.thousands)}[0-9]{{3}})+{fraction}[ \t]*$"
        missing = "|".join(map(re.escape, source.null_values))
        self._missing = rf"^[ \t]*(?:{missing})[ \t]*$" if source.null_values else None
        self.quoted_missing = f'"(?:{missing})"' if source.null_values else None
        """A pattern of the texts for missing numbers in JSON."""

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


def json_column(
    values: Sequence[Any],
    kind: str,
    read_texts: Callable[[pa.Array], tuple[pa.Array, list[int]]] | None = None,
) -> tuple[pa.Array, list[int]]:
    """Returns values of JSON in a type of the spec, and the rows that do not fit it: their value is null. With
    `read_texts`, a number may be a text."""
    cells, bad, texts = list[Any](), list[int](), dict[int, str]()
    for row, value in enumerate(values):
        cell = None
        try:
            if read_texts and isinstance(value, str):
                texts[row] = json_cell(value, "text")
            else:
                cell = json_cell(value, kind)
        except (ValueError, OverflowError):
            bad.append(row)
        cells.append(cell)
    column = pa.array(cells, ARROW_TYPES[kind])
    if read_texts and texts:
        rows = np.array([*texts])
        read, wrong = read_texts(pa.array(texts.values(), pa.string()))
        bad += rows[wrong].tolist()
        is_text = np.zeros(len(cells), bool)
        is_text[rows] = True
        column = pc.replace_with_mask(column, is_text, read)
    return column, sorted(bad)


class WrittenFloat(float):
    """A number of JSON that is no whole number. Its `str` is the text that it was written as."""

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __str__(self) -> str:
        return self.text


class _MinusZero(int):
    """The whole number -0. Only its text has a sign."""

    def __str__(self) -> str:
        return "-0"


def _read_whole(digits: str) -> int | float:
    """Reads a whole number. Python refuses to read numbers of thousands of digits, which are beyond any float, too."""
    try:
        return _MinusZero() if digits == "-0" else int(digits)
    except ValueError:
        return WrittenFloat(digits)


JSON = json.JSONDecoder(
    parse_int=_read_whole, parse_float=WrittenFloat, parse_constant=WrittenFloat
)
"""Reads the JSON of lines and requests, so that `json_cell` knows how numbers were written."""


def json_cell(value: Any, kind: str) -> Any:
    """Returns a value of JSON as Arrow reads it in a column of that type. Raises a ValueError or an OverflowError if it
    does not fit.

    As numbers, true and false are 1 and 0. As texts, numbers and booleans are what was written."""
    if value is None:
        return None
    if isinstance(value, list) and kind in _ELEMENT:
        return [json_cell(item, _ELEMENT[kind]) for item in value]
    if isinstance(value, str | int | float) and kind == "text":
        text = str(value).lower() if isinstance(value, bool) else str(value)
        text.encode()  # fails for half of a surrogate pair
        return text
    if isinstance(value, int) and kind == "int" and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, (int, float)) and kind == "float" and not math.isinf(value):
        return float(value)
    raise ValueError(f"{value!r} is no {kind}")


def _can_cast(have: pa.DataType, kind: str) -> bool:
    """Returns whether Arrow makes values of a type of the spec from those of a stored type."""
    t = pa.types
    if kind in _ELEMENT:
        return is_list(have) and _can_cast(have.value_type, _ELEMENT[kind])
    if t.is_integer(have) or t.is_boolean(have):
        return True
    if kind == "float":
        return bool(t.is_floating(have))
    return kind == "text" and (is_text(have) or t.is_string_view(have) or t.is_date32(have))


_STORED_TEXTS = TextCells(Input(columns={}))


def stored_column(values: pa.Array, kind: str) -> tuple[pa.Array, Flags | None]:
    """Returns the values of a stored column in a type of the spec, and which do not fit it, or None if all do. Raises
    ArrowInvalid for types that are not read. A fraction does not fit `int`. A number may be stored as a text, and a
    text as bytes. Times become seconds since 1970. Times without a zone are in UTC."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    have = values.type
    if (is_text(have) and kind in NUMBERS) or (is_bytes(have) and kind == "text"):
        read, bad = _STORED_TEXTS.convert(values, kind)
        lost: Flags = np.zeros(len(values), bool)
        lost[bad] = True
        return read, lost
    want = ARROW_TYPES[kind]
    if pa.types.is_decimal(have) and kind in ("int", "float"):
        if kind == "float":
            return _floats(values), None
        # Without floats, which would miss the last digits of a long id.
        whole = values.cast(pa.int64(), safe=False)
        exact = pa.decimal256(76, max(0, have.scale))
        lost = pc.fill_null(pc.not_equal(whole.cast(exact), values.cast(exact)), False)
        kept = pc.if_else(lost, pa.scalar(None, pa.int64()), whole)
        return kept, np.asarray(lost)
    if kind == "int" and (pa.types.is_floating(have) or have == pa.uint64()):
        return _whole(values)
    if kind in ("int", "float") and (pa.types.is_timestamp(have) or pa.types.is_date32(have)):
        seconds = _seconds(values)
        return (pc.floor(seconds).cast(want) if kind == "int" else seconds), None
    if pa.types.is_decimal(have) and kind == "text" and have.scale == 0:
        return values.cast(want), None
    if have == want or pa.types.is_null(have) or _can_cast(have, kind):
        # A float rounds large whole numbers.
        return values.cast(want, safe=not kind.startswith("float")), None
    raise pa.ArrowInvalid(f"{have} is not read as {kind}")


def _floats(values: pa.Array) -> pa.Array:
    """Returns the nearest float to each decimal. Arrow's own cast misses the last digit of some."""
    kind, end = values.type, values.offset + len(values)
    if not (
        len(values)
        and pa.types.is_decimal128(kind)
        and kind.precision <= _EXACT_DIGITS
        and kind.scale >= 0
    ):
        return values.cast(pa.string()).cast(pa.float64())
    # These are the lower halves of 128 bits.
    whole = np.frombuffer(values.buffers()[1], np.int64)[2 * values.offset : 2 * end : 2]
    return pa.array(whole / 10.0**kind.scale, mask=np.asarray(values.is_null()))


def _seconds(values: pa.Array) -> pa.Array:
    if not pa.types.is_timestamp(values.type):
        return pc.multiply(values.cast(pa.int32()).cast(pa.float64()), float(_SECONDS_OF_A_DAY))
    unit = values.type.unit
    try:
        micros = values.cast(pa.timestamp("us", values.type.tz), safe=unit != "ns").cast(pa.int64())
    except pa.ArrowInvalid:  # thousands of years after any log, microseconds do not fit 64 bits
        return pc.divide(
            values.cast(pa.int64()).cast(pa.float64(), safe=False), {"s": 1.0, "ms": 1e3}[unit]
        )
    # From the year 2255 on, this is the nearest float.
    return pc.divide(micros.cast(pa.float64(), safe=False), 1e6)


def _whole(values: pa.Array) -> tuple[pa.Array, Flags]:
    """Returns numbers as int64, and which of them do not fit: fractions, and numbers beyond 64 bits."""
    nulls = np.asarray(pc.is_null(values))
    numbers = np.asarray(pc.fill_null(values, pa.scalar(0, values.type)))
    fits = (
        numbers < np.uint64(2**63)
        if values.type == pa.uint64()
        else (numbers >= -(2.0**63)) & (numbers < 2.0**63) & (np.trunc(numbers) == numbers)
    )
    return pa.array(np.where(fits, numbers, 0).astype(np.int64), mask=nulls | ~fits), ~fits & ~nulls


def column_or_nulls(rows: pa.RecordBatch, name: str) -> pa.Array:
    """Returns a column of stored rows. If they lack it, it is null."""
    return rows[name] if name in rows.schema.names else pa.nulls(rows.num_rows)


def stored_cells(rows: pa.RecordBatch, source: Input) -> pa.RecordBatch:
    """Returns the spec's columns of stored rows, and `_bad`, the name of the first column whose value does not fit its
    type."""
    columns, bad = [], np.full(rows.num_rows, "", object)
    for name, kind in source.read_as.items():
        there = [own for own in source.names[name] if own in rows.schema.names]
        read = [stored_column(column_or_nulls(rows, own), kind) for own in there or [name]]
        columns.append(pc.coalesce(*(values for values, _ in read)))
        known: Flags = np.zeros(rows.num_rows, bool)
        for values, lost in read:
            if lost is not None:
                bad[lost & ~known & (bad == "")] = name
            known |= np.asarray(pc.is_valid(values))
    return pa.record_batch(
        [*columns, pa.array(bad, pa.string(), mask=bad == "")], [*source.columns, "_bad"]
    )
