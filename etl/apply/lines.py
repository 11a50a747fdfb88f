"""`Delimited`: splits delimited text into cells. A malformed line never affects other lines.

A line feed ends a line. Carriage returns directly before it belong to the end, and any other byte to the line. Arrow
reads all lines of a batch together, and would find other line ends in some lines. `find_irregular` finds these lines,
which are then read one by one.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from sluice.etl.spec.input_section import Input

Flags = npt.NDArray[np.bool_]
OPEN_QUOTE, FIELDS = "a quote that does not end", "wrong number of fields"
_RETURNS, _INNER_RETURN = re.compile(rb"\r+\n"), r"\r[^\r\n]"
_MARK = b"\xef\xbb\xbf"
_LOOK = 1 << 16
_SHORT = 2
"""The most bytes of an empty line with a usual end."""
_BLOCK = 1 << 19
"""The bytes that Arrow parses together. The result of more bytes does not stay in a core's cache."""


def join_lines(lines: pa.Array) -> pa.Buffer:
    """Returns the bytes of all lines with their ends, without carriage returns in the ends. Copies them only if there
    are carriage returns."""
    _, offsets, data = lines.buffers()
    if data is None:
        return pa.py_buffer(b"")
    width = np.int64 if pa.types.is_large_binary(lines.type) else np.int32
    bounds = np.frombuffer(offsets, width)[lines.offset : lines.offset + len(lines) + 1]
    content = data.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    return pa.py_buffer(_RETURNS.sub(b"\n", content)) if _has_return(content) else content


def _has_return(content: pa.Buffer) -> bool:
    text = np.frombuffer(content, np.uint8)
    return any(
        (text[start : start + _LOOK] == ord("\r")).any() for start in range(0, len(text), _LOOK)
    )


def find_irregular(lines: pa.Array) -> Flags:
    """Returns which lines Arrow would split or change: those that are not UTF-8, begin with a byte order mark, or
    contain a carriage return."""
    found: Flags = np.zeros(len(lines), bool)
    content = join_lines(lines)
    if _has_return(content):
        found |= pc.match_substring_regex(lines, _INNER_RETURN).to_numpy(zero_copy_only=False)
    # Arrow removes a byte order mark only from the first line.
    if content[:3].to_pybytes() == _MARK:
        found |= pc.starts_with(lines, _MARK).to_numpy(zero_copy_only=False)
    if not is_utf8(content):
        found |= np.array([has_other_bytes(line) for line in lines.to_pylist()], bool)
    return found


def is_utf8(content: pa.Buffer) -> bool:
    ends = pa.py_buffer(np.array([0, content.size], np.int64))
    try:
        pa.Array.from_buffers(pa.large_string(), 1, [None, ends, content]).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def has_other_bytes(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return False


def strip_end(line: bytes) -> bytes:
    """Returns a line without its end."""
    return line.removesuffix(b"\n").rstrip(b"\r")


def are_headers(lines: pa.Array, headers: Collection[bytes]) -> Flags:
    """Returns which lines equal a header, apart from their ends. If empty lines are no rows, `headers` has the empty
    line."""
    found: Flags = np.zeros(len(lines), bool)
    candidates = set[int]()
    if b"" in headers:
        short = pc.or_(pc.less_equal(pc.binary_length(lines), _SHORT), pc.starts_with(lines, b"\r"))
        candidates.update(np.flatnonzero(short.to_numpy(zero_copy_only=False)).tolist())
    named = [header for header in headers if header]
    for header in named:
        # A header that begins with another one needs no search: that search finds its lines, too.
        if not any(header != other and header.startswith(other) for other in named):
            candidates.update(
                np.flatnonzero(
                    pc.starts_with(lines, header).to_numpy(zero_copy_only=False)
                ).tolist()
            )
    found[[number for number in candidates if strip_end(lines[number].as_py()) in headers]] = True
    return found


def merge_rows(
    first: pa.Table,
    places: Sequence[int] | npt.NDArray[np.intp],
    second: pa.Table,
    others: Sequence[int],
) -> pa.Table:
    """Returns the rows of two tables as one, ordered by the given places of the rows."""
    if not len(others):
        return first
    return pa.concat_tables([first, second]).take(
        np.argsort(np.concatenate([places, others]), kind="stable")
    )


class Delimited:
    """Cuts lines into cells.

    In `quoted` lines, a field that begins with a quote ends at the next quote that is not doubled. Text between this
    quote and the delimiter belongs to the field. Any other quote is an ordinary character."""

    def __init__(self, source: Input) -> None:
        """A line may end before the input's optional columns. These are then null."""
        self._schema, self._decimal = source.schema, source.decimal
        self._least = len(self._schema) - len(source.optional)
        self._quoted = source.format == "csv"
        self._delimiter = source.delimiter.encode()
        self._options: dict[str, Any] = {
            "delimiter": source.delimiter,
            "quote_char": '"' if self._quoted else False,
            "ignore_empty_lines": False,
        }
        end = rf"\x{ord(source.delimiter):02x}"
        field = rf'(?:"(?:[^"]|"")*"|(?:[^"\n{end}][^\n{end}]*)?)'
        self._closed = rf"^{field}(?:{end}{field})*\r*\n$"
        """Lines that Arrow reads as we do: each quoted field ends with its closing quote."""
        one = rf'(?:"((?:[^"]|"")*+)"([^{end}]*)|((?:[^"{end}][^{end}]*)?))({end}|\Z)'
        self._field = re.compile(one.encode(), re.S)

    def find_irregular(self, lines: pa.Array) -> Flags:
        """Returns which lines must be cut alone."""
        found = find_irregular(lines)
        if self._quoted and pc.any(quotes := pc.match_substring(lines, '"')).as_py():
            odd = pc.and_not(quotes, pc.match_substring_regex(lines, self._closed))
            found |= odd.to_numpy(zero_copy_only=False)
        return found

    def read(self, lines: pa.Array) -> tuple[pa.Table, list[tuple[int, str]]]:
        """Reads lines that are not irregular, as columns of their types. Raises ArrowInvalid if a cell is not of its
        column's type."""
        return self._read(lines, {f.name: f.type for f in self._schema})

    def cut(self, lines: pa.Array, irregular: Flags) -> tuple[pa.Table, list[tuple[int, str]]]:
        """Reads any lines as columns of bytes, without the rejected lines. An empty field is null."""
        table, rejected = self._read(
            lines.filter(pa.array(~irregular)), dict.fromkeys(self._schema.names, pa.binary())
        )
        numbers = np.flatnonzero(~irregular)
        rejected = [(int(numbers[number]), reason) for number, reason in rejected]
        rows, there = [], []
        for number in np.flatnonzero(irregular):
            cells = self._cells(strip_end(lines[int(number)].as_py()))
            if cells is None or not self._least <= len(cells) <= len(self._schema):
                rejected.append((int(number), OPEN_QUOTE if cells is None else FIELDS))
            else:
                rows.append([*cells, *[None] * (len(self._schema) - len(cells))])
                there.append(int(number))
        more = pa.Table.from_pylist(
            [dict(zip(table.column_names, cells, strict=True)) for cells in rows], table.schema
        )
        read = np.setdiff1d(np.arange(len(lines)), [*there, *(number for number, _ in rejected)])
        return merge_rows(table, read, more, there), rejected

    def _read(
        self, lines: pa.Array, types: Mapping[str, pa.DataType]
    ) -> tuple[pa.Table, list[tuple[int, str]]]:
        table, wrong = self._of_width(lines, types)
        short: dict[int, list[int]] = defaultdict(list)
        for number, width in wrong:
            if self._least <= width < len(types):
                short[width].append(number)
        places = np.setdiff1d(np.arange(len(lines)), [number for number, _ in wrong])
        for width, numbers in short.items():
            some, _ = self._of_width(
                lines.take(pa.array(numbers)), dict(list(types.items())[:width])
            )
            for name, kind in list(types.items())[width:]:
                some = some.append_column(name, pa.nulls(len(numbers), kind))
            table = merge_rows(table, places, some, numbers)
            places = np.sort(np.concatenate([places, numbers]))
        kept = set(itertools.chain(*short.values()))
        return table, [(number, FIELDS) for number, _ in wrong if number not in kept]

    def _of_width(
        self, lines: pa.Array, types: Mapping[str, pa.DataType]
    ) -> tuple[pa.Table, list[tuple[int, int]]]:
        """Reads the lines that have as many fields as there are types. For each other line it returns the number of
        fields."""
        wrong: list[tuple[int, int]] = []
        if not len(lines):
            return pa.table({name: pa.array([], kind) for name, kind in types.items()}), wrong

        def short_or_long(row: pyarrow.csv.InvalidRow) -> str:
            wrong.append((row.number - 1, row.actual_columns))
            return "skip"

        content, longest = join_lines(lines), pc.max(pc.binary_length(lines)).as_py()
        table = pyarrow.csv.read_csv(
            pa.BufferReader(content),
            pyarrow.csv.ReadOptions(
                use_threads=False, block_size=max(_BLOCK, longest + 1), column_names=list(types)
            ),
            pyarrow.csv.ParseOptions(**self._options, invalid_row_handler=short_or_long),
            # Lines that are not UTF-8 are irregular, and are not among these.
            pyarrow.csv.ConvertOptions(
                column_types=types,
                null_values=[""],
                strings_can_be_null=True,
                decimal_point=self._decimal,
                quoted_strings_can_be_null=False,
                check_utf8=False,
            ),
        )
        return table, wrong

    def _cells(self, line: bytes) -> Sequence[bytes | None] | None:
        """Returns the cells of one line. None if a quote does not end."""
        if not line:  # Arrow also reads all fields as empty
            return [None] * len(self._schema)
        if not self._quoted:
            return [cell or None for cell in line.split(self._delimiter)]
        cells: list[bytes | None] = []
        place, more = 0, True
        while more:
            field = self._field.match(line, place)
            if field is None:
                return None
            quoted, rest, plain, delimiter = field.groups()
            cells.append(plain or None if quoted is None else quoted.replace(b'""', b'"') + rest)
            place, more = field.end(), bool(delimiter)
        return cells
