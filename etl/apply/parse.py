"""`InputParser`: turns raw input into typed columns. A row that does not parse is rejected with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.cells import WRONG, TextCells, find_false, has_infinity
from sluice.etl.apply.compiled_lines import CompiledLines
from sluice.etl.apply.json_lines import JsonObjects
from sluice.etl.apply.lines import Delimited, Part, Reasons, place_rows
from sluice.etl.apply.number_limits import NUMBERS, early_unfit, is_late, reason
from sluice.etl.ops.base import as_number, plain
from sluice.etl.ops.hashing import MOST_TEXT_BYTES, Floats, rows_of_long_texts
from sluice.etl.spec.nested_columns import join_chunks
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec

Batches = Iterator[pa.RecordBatch]
Columns = dict[str, pa.Array]
LONG_TEXT = f"a text of more than {MOST_TEXT_BYTES:,} bytes"
NO_TIME = "not a time as its format says"
NO_SPLIT = "missing, or not a number, and rows are split by it (table.split_time)"
ADDED_COLUMNS = ("_bad", *TIES)
"""Columns that readers add to those of the input."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed batch: its good rows as columns, and its rejected rows."""

    columns: dict[str, pa.Array]
    rows: int
    """The number of good rows."""
    rejected: list[tuple[int, str]]
    """The number of each rejected row in the batch, and the reason. A reason names a column but no value, so there are
    few different ones."""


class InputParser:
    """Parses batches of one spec's input. A batch has a column `line` (each line with its end), or columns of cells."""

    def __init__(self, spec: Spec, *, compiled: bool = False) -> None:
        """With `compiled`, compiled functions cut the regular lines, if the input has only whole numbers and texts."""
        self.types = spec.input.read_as
        self._spec, self.label = spec, spec.label
        self._wrong = {**WRONG, "text": f"not {spec.input.encoding.upper()} text"}
        self._delimited, self._objects = Delimited(spec.input), JsonObjects(spec.input)
        self._texts = TextCells(spec.input)
        self._numbers = [
            column for column in spec.columns if column.role in NUMBERS and not is_late(column)
        ]
        self._compiled = None
        self._parse_lines = (
            self._parse_json if spec.input.format == "json" else self._parse_delimited
        )
        if compiled and CompiledLines.may_read(spec.input):
            self._compiled = CompiledLines(spec.input)
            self._parse_lines = self._parse_compiled

    def parse(self, batch: pa.RecordBatch, places: Floats | None = None) -> Parsed:
        """Returns the good and the rejected rows of a batch. `places` has the values of the column `input.place` for
        all rows of the batch, if the spec has that column."""
        names = batch.schema.names
        longest = None
        if "line" in names:
            lines = self._encode_as_utf8(batch["line"])
            columns, reasons = self._parse_lines(lines)
            longest = pc.max(pc.binary_length(lines)).as_py()  # a text is no longer than its line
        else:
            columns, reasons = self._read_marked(batch)
        if longest is None or longest > MOST_TEXT_BYTES:
            for name, values in columns.items():
                _reject(reasons, rows_of_long_texts(values), f"{name}: {LONG_TEXT}")
        for name in self._spec.input.times:
            texts = plain(columns[name])
            # After joins and histories, the times are numbers already.
            if pa.types.is_string(texts.type):
                columns[name], bad = self._texts.column(name, texts)
                _reject(reasons, bad, f"{name}: {NO_TIME}")
        self._reject_labels_and_times(columns, reasons)
        if places is not None:
            columns[self._spec.input.place or ""] = pa.array(places)
        # The numbers of other columns are checked when they are computed.
        for column in self._numbers:
            if all(name in columns for name in column.sources):
                _reject(reasons, np.flatnonzero(early_unfit(column, columns)), reason(column))
        if reasons:
            good = np.ones(batch.num_rows, bool)
            good[list(reasons)] = False
            columns = {name: values.filter(pa.array(good)) for name, values in columns.items()}
        return Parsed(columns, batch.num_rows - len(reasons), list(reasons.items()))

    def _encode_as_utf8(self, lines: pa.Array) -> pa.Array:
        """Returns the lines in UTF-8. Bytes that are invalid in the input's encoding become invalid UTF-8."""
        name = self._spec.input.encoding
        if name == "utf-8":
            return lines
        return pa.array(
            [
                line.decode(name, "surrogateescape").encode("utf-8", "surrogatepass")
                for line in lines.to_pylist()
            ],
            lines.type,
        )

    def _parse_delimited(self, lines: pa.Array) -> tuple[Columns, Reasons]:
        """Parses lines of csv or tsv. Arrow parses them together unless a line or a cell needs a closer look."""
        irregular = self._delimited.find_irregular(lines)
        if not irregular.any() and not self._texts.are_special:
            try:
                table, reasons = self._delimited.read(lines)
            except pa.ArrowInvalid:
                pass
            else:
                if not has_infinity(table):
                    return self._columns(table), reasons
        return self._parse_cells(*self._delimited.cut(lines, irregular))

    def _parse_compiled(self, lines: pa.Array) -> tuple[Columns, Reasons]:
        """Parses lines of csv or tsv with compiled functions, and the irregular ones without."""
        assert self._compiled is not None
        columns, irregular = self._compiled.read(lines)
        if not irregular.any():
            return columns, {}
        rest, reasons = self._parse_delimited(lines.filter(pa.array(irregular)))
        numbers = np.flatnonzero(irregular)
        order = pa.array(np.argsort(np.concatenate([np.flatnonzero(~irregular), numbers])))
        for name, values in columns.items():
            more = rest[name]
            more = more.dictionary_encode() if pa.types.is_dictionary(values.type) else more
            columns[name] = pa.concat_arrays([values, more]).take(order)
        return columns, {int(numbers[row]): reason for row, reason in reasons.items()}

    def _columns(self, table: pa.Table) -> Columns:
        return {name: join_chunks(table[name]) for name in self.types}

    def _parse_cells(self, cells: pa.Table, reasons: Reasons) -> tuple[Columns, Reasons]:
        """Converts cells of bytes. Finds each cell that cannot be converted."""
        columns = {}
        for name, kind in self.types.items():
            columns[name], bad = self._texts.convert(join_chunks(cells[name]), kind)
            _reject(reasons, bad, f"{name}: {self._wrong[kind]}")
        return columns, reasons

    def _parse_json(self, lines: pa.Array) -> tuple[Columns, Reasons]:
        """Parses lines of JSON objects. Arrow parses the regular ones together."""
        irregular = self._objects.find_irregular(lines)
        schema = self._spec.input.schema
        try:
            table = self._objects.read(lines.filter(pa.array(~irregular)))
        except pa.ArrowInvalid:
            table, irregular = schema.empty_table(), np.ones(len(lines), bool)
        reasons: Reasons = {}
        rows: dict[int, dict[str, Any]] = {}
        for number in np.flatnonzero(irregular).tolist():
            found = self._objects.one(lines[number].as_py())
            if isinstance(found, str):
                reasons[number] = found
            else:
                rows[number] = found
        more = pa.Table.from_pylist(list(rows.values()), schema)
        parts: list[Part] = [(np.flatnonzero(~irregular), table), (list(rows), more)]
        return self._columns(place_rows(parts, len(lines))), reasons

    def _read_marked(self, batch: pa.RecordBatch) -> tuple[Columns, Reasons]:
        """Reads typed columns. `_bad` names the first column of a row whose value does not fit its type."""
        names = batch.schema.names
        columns = {name: batch[name] for name in names if name not in ADDED_COLUMNS}
        marks = batch["_bad"].to_pylist() if "_bad" in names else ()
        bad = ((row, name) for row, name in enumerate(marks) if name is not None)
        return columns, {row: f"{name}: {WRONG[self.types[name]]}" for row, name in bad}

    def _reject_labels_and_times(self, columns: Columns, reasons: Reasons) -> None:
        """Rejects rows without a label, or with another one than 0 and 1. If times cut the splits, it rejects rows
        without a time, too. Rows without a label may have a split of their own."""
        label, name = self._spec.labels(columns), self._spec.table.split_time
        missing = pc.is_null(label)
        fits = pc.or_(pc.is_in(label, pa.array([0, 1], label.type)), missing)
        _reject(reasons, find_false(fits), f"{self.label}: neither 0 nor 1")
        if not self._spec.table.unlabelled:
            _reject(reasons, find_false(pc.invert(missing)), f"{self.label}: missing")
            missing = pa.scalar(False)
        if name is not None and name in columns:
            has_time = pc.invert(pc.is_null(as_number(columns[name]), nan_is_null=True))
            _reject(reasons, find_false(pc.or_(has_time, missing)), f"{name}: {NO_SPLIT}")


def _reject(reasons: Reasons, rows: Iterable[int], reason: str) -> None:
    """Rejects rows, unless they have a reason already."""
    for row in rows:
        reasons.setdefault(int(row), reason)
