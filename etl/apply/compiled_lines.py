"""`CompiledLines`: cuts regular lines of delimited text into columns, in one compiled pass.

It pays for large inputs only, because numba takes a second to load. A line with anything unusual is left to
`sluice.etl.apply.lines`: another number of fields, a quote at the start of a field, an inner carriage return, or a
whole number that is not just up to 18 digits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.etl.apply.lines import is_utf8
from sluice.etl.ops.compiled import compile_function
from sluice.etl.ops.hashing import A, Flags, G
from sluice.etl.spec.input_section import Input

LEAST_BYTES = 128 << 20
"""The input from which on the compiled functions are loaded."""
_END, _RETURN, _QUOTE, _MINUS, _ZERO, _NINE, _MARK = b'\n\r"-09\xef'
_MOST_DIGITS = 18
_SHIFT = np.uint64(32)


class CompiledLines:
    """Cuts the lines of one input."""

    def __init__(self, source: Input) -> None:
        self._kinds = source.read_as
        self._is_int = np.array([kind == "int" for kind in self._kinds.values()])
        self._marks = (ord(source.delimiter), _QUOTE if source.format == "csv" else -1)

    @staticmethod
    def may_read(source: Input) -> bool:
        """Returns whether an input has only whole numbers and texts, in their usual form, and numba is installed."""
        return (
            source.format in ("tsv", "csv")
            and {*source.read_as.values()} <= {"int", "text"}
            and not (source.thousands or source.null_values)
            and importlib.util.find_spec("numba") is not None
        )

    def read(self, lines: pa.Array) -> tuple[dict[str, pa.Array], Flags]:
        """Returns the columns of the regular lines, and which lines are irregular. A column is of whole numbers, or of
        texts with a dictionary."""
        _, offsets, content = lines.buffers()
        bounds = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
        data = np.frombuffer(content, np.uint8)
        shape = (len(self._kinds), len(lines))
        starts, sizes = np.empty(shape, np.int32), np.empty(shape, np.int32)
        values, irregular = np.empty(shape, np.int64), np.zeros(len(lines), bool)
        cut, encode, gather = _functions()
        # If some bytes are not UTF-8, all lines that are not ASCII are irregular.
        marks = (
            *self._marks,
            256 if is_utf8(content.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))) else 128,
        )
        cells = (starts, sizes, values)
        rows = cut((data, bounds), self._is_int, marks, cells, irregular)
        columns: dict[str, pa.Array] = {}
        for number, (name, kind) in enumerate(self._kinds.items()):
            size, value = sizes[number, :rows], values[number, :rows]
            if kind == "int":
                columns[name] = pa.array(value, mask=size == 0)
                continue
            codes, first = np.empty(rows, np.int32), np.empty(rows, np.int32)
            start = starts[number, :rows]
            count = encode(data, (start, size, value.view(np.uint64)), codes, first)
            ends = np.zeros(count + 1, np.int32)
            np.cumsum(size[first[:count]], out=ends[1:])
            texts = np.empty(ends[-1], np.uint8)
            gather(data, start[first[:count]], ends, texts)
            buffers = [None, pa.py_buffer(ends), pa.py_buffer(texts)]
            distinct = pa.Array.from_buffers(pa.string(), count, buffers)
            indices = pa.array(codes, mask=size == 0)
            columns[name] = pa.DictionaryArray.from_arrays(indices, distinct)
        return columns, irregular


def _cut(lines: Any, is_int: Any, marks: Any, cells: Any, irregular: Any) -> int:
    """Finds the cells of each line, and returns the number of regular lines. A cell's value is its whole number, or the
    hash of its text. A missing cell has the size 0."""
    data, bounds = lines
    starts, sizes, values = cells
    delimiter, quote, other = marks
    row = 0
    for line in range(len(bounds) - 1):
        at, column = bounds[line], 0
        good = data[at] != _MARK
        while good and column < len(is_int):
            start, byte = at, data[at]
            good = byte != quote
            if is_int[column]:
                if byte == _MINUS:
                    at += 1
                    byte = data[at]
                first, number = at, np.int64(0)
                while _ZERO <= byte <= _NINE:
                    number = number * 10 + np.int64(byte - _ZERO)
                    at += 1
                    byte = data[at]
                good = good and (first < at <= first + _MOST_DIGITS or at == start)
                values[column, row] = number if first == start else -number
            else:
                value, word, shift, most = np.uint64(0), np.uint64(0), np.uint64(0), byte
                while byte != delimiter and byte != _END and byte != _RETURN:  # noqa: PLR1714  a tuple is slow here
                    most = max(most, byte)
                    word |= np.uint64(byte) << shift
                    shift += np.uint64(8)
                    if shift == np.uint64(64):
                        value = (value ^ word) * A
                        value ^= value >> _SHIFT
                        word = shift = np.uint64(0)
                    at += 1
                    byte = data[at]
                good = good and most < other
                value = ((value ^ word) + shift + np.uint64(1)) * G
                values[column, row] = np.int64(value ^ (value >> _SHIFT))
            starts[column, row], sizes[column, row] = start, at - start
            column += 1
            if column < len(is_int):
                good = good and byte == delimiter
            else:
                if byte == _RETURN:
                    at += 1
                good = good and data[at] == _END and at + 1 == bounds[line + 1]
            at += 1
        irregular[line] = not good
        row += good
    return row


def _encode(data: Any, cells: Any, codes: Any, first: Any) -> int:
    """Gives each distinct text a code, in the order of their first rows, and returns their number."""
    starts, sizes, hashes = cells
    slots, known = np.full(4096, -1, np.int32), np.empty(len(starts), np.uint64)
    count = 0
    for row in range(len(starts)):
        size, value = sizes[row], hashes[row]
        codes[row] = -1
        if not size:
            continue
        slot = np.int64(value) & (len(slots) - 1)
        while slots[slot] >= 0 and codes[row] < 0:
            code = slots[slot]
            same = known[code] == value and sizes[first[code]] == size
            # A hash of up to 8 bytes has only one text of that size.
            place = 0 if size > 8 else size
            while same and place < size:
                same = data[starts[row] + place] == data[starts[first[code]] + place]
                place += 1
            if same:
                codes[row] = code
            slot = (slot + 1) & (len(slots) - 1)
        if codes[row] >= 0:
            continue
        slots[slot], known[count], first[count], codes[row] = count, value, row, count
        count += 1
        if 2 * count > len(slots):
            slots = np.full(2 * len(slots), -1, np.int32)
            for code in range(count):
                slot = np.int64(known[code]) & (len(slots) - 1)
                while slots[slot] >= 0:
                    slot = (slot + 1) & (len(slots) - 1)
                slots[slot] = code
    return count


def _gather(data: Any, starts: Any, ends: Any, texts: Any) -> None:
    for number in range(len(starts)):
        for place in range(ends[number + 1] - ends[number]):
            texts[ends[number] + place] = data[starts[number] + place]


def load() -> None:
    """Loads the compiled functions, so that processes that are forked from this one have them."""
    CompiledLines(Input(columns={"number": "int", "text": "text"})).read(pa.array([b"1\ta\n"]))


@cache
def _functions() -> tuple[Callable[..., Any], ...]:
    return tuple(compile_function(function) for function in (_cut, _encode, _gather))
