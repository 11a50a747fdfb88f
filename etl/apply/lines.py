"""`Delimited`: reads delimited text as typed columns. A malformed line never affects other lines.

A line feed ends a line. Carriage returns directly before it belong to the end, and any other byte to the line. Arrow
reads all lines of a batch together, and would find other line ends in some lines. `find_irregular` finds these lines,
which are then read one by one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from sluice.etl.apply.cells import TextCells
from sluice.etl.ops.base import Columns
from sluice.etl.ops.hashing import Flags, offsets_and_bytes
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.nested_columns import join_chunks

Reasons = dict[int, str]
"""The number of each rejected row of a batch, and why it is rejected."""
Unfit = dict[str, list[int]]
"""For each column, the rows whose value does not fit its type. Their value is null."""
ReadLines = tuple[Columns, Reasons, Unfit]
"""What is read of lines: the columns, the lines that are no rows, and the values that do not fit."""
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
    bounds, data = offsets_and_bytes(lines)
    content = pa.py_buffer(data[bounds[0] : bounds[-1]])
    return pa.py_buffer(_RETURNS.sub(b"\n", content)) if _has_return(content) else content


def _has_return(content: pa.Buffer) -> bool:
    text = np.frombuffer(content, np.uint8)
    return any(
        (text[start : start + _LOOK] == ord("\r")).any() for start in range(0, len(text), _LOOK)
    )


def find_irregular(lines: pa.Array) -> Flags:
    """Returns which lines Arrow would split or change: those that are not UTF-8, begin with a byte order mark, or
    contain a carriage return."""
    content = join_lines(lines)
    # Arrow removes a byte order mark from the first line that it reads, which any line may be.
    irregular: Flags = np.array(pc.starts_with(lines, _MARK))
    if _has_return(content):
        irregular |= np.asarray(pc.match_substring_regex(lines, _INNER_RETURN))
    if not is_utf8(content):
        irregular |= np.array([has_other_bytes(line) for line in lines.to_pylist()], bool)
    return irregular


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
    flags: Flags = np.zeros(len(lines), bool)
    candidates = set[int]()
    if b"" in headers:
        short = pc.or_(pc.less_equal(pc.binary_length(lines), _SHORT), pc.starts_with(lines, b"\r"))
        candidates.update(np.flatnonzero(np.asarray(short)).tolist())
    for header in filter(None, headers):
        candidates.update(np.flatnonzero(np.asarray(pc.starts_with(lines, header))).tolist())
    flags[[number for number in candidates if strip_end(lines[number].as_py()) in headers]] = True
    return flags


def record_pattern(delimiter: str) -> re.Pattern[bytes]:
    """Returns the pattern of a csv record with its line end. Line ends between quotes belong to a field."""
    end = _escaped(delimiter)
    field = _field(end, r"\n")
    return re.compile(rf"{field}(?:{end}{field})*+\n".encode())


def _escaped(delimiter: str) -> str:
    return rf"\x{ord(delimiter):02x}"


def _field(end: str, line_end: str = "") -> str:
    """Returns the pattern of a csv field, with three groups: the text between quotes, what follows it, and a field
    without quotes."""
    other = rf"[^{end}{line_end}]*+"
    return rf'(?:"((?:[^"]|"")*+)"({other})|((?:[^"{end}{line_end}]{other})?))'


def _bytes_of(names: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, pa.binary()) for name in names])


def _place_rows(
    rows: Sequence[npt.NDArray[np.intp]], tables: Sequence[pa.Table], count: int
) -> pa.Table:
    """Returns a table of `count` rows that has the `rows` of each table, and nulls elsewhere."""
    if len(rows[0]) == count:
        return tables[0]
    numbers = np.concatenate(rows)
    places = np.full(count, -1)
    places[numbers] = np.arange(len(numbers))
    table = pa.concat_tables(tables, promote_options="default")
    return table.take(pa.array(places, mask=places < 0))


class Delimited:
    """Reads lines of csv and tsv.

    In `quoted` lines, a field that begins with a quote ends at the next quote that is not doubled. Text between this
    quote and the delimiter belongs to the field. Any other quote is an ordinary character."""

    def __init__(self, source: Input) -> None:
        """A line may end before the input's optional columns. These are then null."""
        self._kinds, self._texts = source.read_as, TextCells(source)
        self._names = list(source.columns)
        self._least = len(self._names) - len(source.optional)
        self._quoted, self._multiline = source.format == "csv", source.multiline
        self._delimiter = source.delimiter.encode()
        self._options: dict[str, Any] = {
            "delimiter": source.delimiter,
            "quote_char": '"' if self._quoted else False,
            "ignore_empty_lines": False,
        }
        end = _escaped(source.delimiter)
        field = rf'(?:"(?:[^"]|"")*"|(?:[^"\n{end}][^\n{end}]*)?)'
        self._closed = rf"^{field}(?:{end}{field})*\r*\n$"
        """Lines that Arrow reads as we do: each quoted field ends with its closing quote."""
        self._field = re.compile(rf"{_field(end)}({end}|\Z)".encode(), re.S)

    def find_irregular(self, lines: pa.Array) -> Flags:
        """Returns which lines must be read alone."""
        irregular = find_irregular(lines)
        if self._multiline:
            inner = pc.less(
                pc.find_substring(lines, b"\n"), pc.subtract(pc.binary_length(lines), 1)
            )
            irregular |= np.asarray(inner)
        if self._quoted and pc.any(quotes := pc.match_substring(lines, '"')).as_py():
            odd = pc.and_not(quotes, pc.match_substring_regex(lines, self._closed))
            irregular |= np.asarray(odd)
        return irregular

    def read(self, lines: pa.Array) -> ReadLines:
        """Reads lines that are not irregular together. A line may lack optional columns."""
        table, others = self._of_width(lines, self._names)
        short: dict[int, list[int]] = defaultdict(list)
        reasons = Reasons()
        for row, width in others:
            if self._least <= width < len(self._names):
                short[width].append(row)
            else:
                reasons[row] = FIELDS
        rows = [np.delete(np.arange(len(lines)), [row for row, _ in others])]
        tables = [table]
        for width, some in short.items():
            rows.append(np.array(some))
            tables.append(self._of_width(lines.take(pa.array(some)), self._names[:width])[0])
        return self._convert(_place_rows(rows, tables, len(lines)), reasons)

    def read_alone(self, lines: pa.Array) -> ReadLines:
        """Reads any lines, one by one."""
        rows, reasons = list[dict[str, bytes | None]](), Reasons()
        for number, line in enumerate(lines.to_pylist()):
            cells = self.cells(strip_end(line))
            if cells is None or not self._least <= len(cells) <= len(self._names):
                reasons[number] = OPEN_QUOTE if cells is None else FIELDS
                cells = ()
            rows.append(dict(zip(self._names, cells, strict=False)))
        return self._convert(pa.Table.from_pylist(rows, _bytes_of(self._names)), reasons)

    def _convert(self, cells: pa.Table, reasons: Reasons) -> ReadLines:
        """Makes typed columns of cells. An empty cell, and those of a rejected line, are null."""
        columns, unfit = Columns(), Unfit()
        for name, kind in self._kinds.items():
            columns[name], unfit[name] = self._texts.convert(join_chunks(cells[name]), kind)
        return columns, reasons, unfit

    def _of_width(
        self, lines: pa.Array, names: list[str]
    ) -> tuple[pa.Table, list[tuple[int, int]]]:
        """Cuts the lines that have as many fields as there are names. For each other line it returns the number of
        fields."""
        schema, wrong = _bytes_of(names), list[tuple[int, int]]()
        if not len(lines):
            return schema.empty_table(), wrong

        def short_or_long(row: pyarrow.csv.InvalidRow) -> str:
            wrong.append((row.number - 1, row.actual_columns))
            return "skip"

        content, longest = join_lines(lines), pc.max(pc.binary_length(lines)).as_py()
        table = pyarrow.csv.read_csv(
            pa.BufferReader(content),
            pyarrow.csv.ReadOptions(
                use_threads=False, block_size=max(_BLOCK, longest + 1), column_names=names
            ),
            pyarrow.csv.ParseOptions(**self._options, invalid_row_handler=short_or_long),
            # Lines that are not UTF-8 are irregular, and are not among these.
            pyarrow.csv.ConvertOptions(
                column_types=schema,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                check_utf8=False,
            ),
        )
        return table, wrong

    def cells(self, line: bytes) -> Sequence[bytes | None] | None:
        """Returns the cells of one line. None if a quote does not end."""
        if not line:  # Arrow also reads all fields as empty
            return [None] * len(self._names)
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
