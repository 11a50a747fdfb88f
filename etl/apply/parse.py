"""`InputParser`: turns raw input into typed columns. A row that does not parse is rejected with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.cells import WRONG, TextCells, find_false, has_infinity
from sluice.etl.apply.compiled_lines import CompiledLines
from sluice.etl.apply.json_lines import JsonObjects
from sluice.etl.apply.lines import FIELDS, Delimited, merge_rows
from sluice.etl.apply.number_limits import NUMBERS, early_unfit, is_late, reason
from sluice.etl.ops.base import as_number, plain
from sluice.etl.ops.hashing import MOST_TEXT_BYTES, rows_of_long_texts
from sluice.etl.spec.nested_columns import join_chunks
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec

Batches = Iterator[pa.RecordBatch]
LONG_TEXT = f"a text of more than {MOST_TEXT_BYTES:,} bytes"
NO_TIME = "not a time as its format says"
NO_SPLIT = "missing, or not a number, and rows are split by it (table.split_time)"
ADDED_COLUMNS = ("_bad", "_file", "_from", *TIES)
"""Columns that readers add to those of the input: what is wrong with a row, and where it comes from."""


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

    def parse(self, batch: pa.RecordBatch, places: npt.NDArray[np.float64] | None = None) -> Parsed:
        """Returns the good and the rejected rows of a batch. `places` has the values of the column `input.place` for
        all rows of the batch, if the spec has that column."""
        names = batch.schema.names
        if "line" in names:
            lines = self._encode_as_utf8(batch["line"])
            parsed = self._parse_lines(lines)
        elif "_broken" in names:
            # The reader has cut rows into cells. If a row has too few or too many, `_broken` is not null.
            complete = pc.is_null(batch["_broken"])
            cells = pa.Table.from_batches([batch]).select(list(self.types)).filter(complete)
            rejected = [(row, FIELDS) for row in find_false(complete)]
            parsed = self._parse_cells(cells, rejected, batch.num_rows)
        else:
            parsed = self._reject_marked(batch)
        # A text is no longer than its line.
        longest = pc.max(pc.binary_length(lines)).as_py() if "line" in names else None
        if longest is None or longest > MOST_TEXT_BYTES:
            for name in parsed.columns:
                long = rows_of_long_texts(parsed.columns[name])
                parsed = _reject(parsed, long, f"{name}: {LONG_TEXT}")
        for name in self._spec.input.times:
            texts = plain(parsed.columns[name])
            # After joins and histories, the times are numbers already.
            if pa.types.is_string(texts.type):
                parsed.columns[name], bad = self._texts.column(name, texts)
                parsed = _reject(parsed, bad, f"{name}: {NO_TIME}")
        parsed = self._reject_without_split(self._reject_bad_labels(parsed))
        if places is not None:
            parsed.columns[self._spec.input.place or ""] = pa.array(
                np.delete(places, [row for row, _ in parsed.rejected])
            )
        # The numbers of other columns are checked when they are computed.
        for column in self._numbers:
            if parsed.rows and all(name in parsed.columns for name in column.sources):
                unfit = np.flatnonzero(early_unfit(column, parsed.columns))
                parsed = _reject(parsed, unfit, reason(column))
        return parsed

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

    def _parse_delimited(self, lines: pa.Array) -> Parsed:
        """Parses lines of csv or tsv. Arrow parses them together unless a line or a cell needs a closer look."""
        irregular = self._delimited.find_irregular(lines)
        if not irregular.any() and not self._texts.are_special:
            try:
                table, rejected = self._delimited.read(lines)
            except pa.ArrowInvalid:
                pass
            else:
                if not has_infinity(table):
                    return Parsed(self._columns(table), table.num_rows, rejected)
        return self._parse_cells(*self._delimited.cut(lines, irregular), len(lines))

    def _parse_compiled(self, lines: pa.Array) -> Parsed:
        """Parses lines of csv or tsv with compiled functions, and the irregular ones without."""
        assert self._compiled is not None
        columns, irregular = self._compiled.read(lines)
        if not irregular.any():
            return Parsed(columns, len(lines), [])
        rest = self._parse_delimited(lines.filter(pa.array(irregular)))
        numbers = np.flatnonzero(irregular)
        rejected = [(int(numbers[number]), reason) for number, reason in rest.rejected]
        numbers = np.delete(numbers, [number for number, _ in rest.rejected])
        order = pa.array(np.argsort(np.concatenate([np.flatnonzero(~irregular), numbers])))
        for name, values in columns.items():
            more = rest.columns[name]
            more = more.dictionary_encode() if pa.types.is_dictionary(values.type) else more
            columns[name] = pa.concat_arrays([values, more]).take(order)
        return Parsed(columns, len(order), rejected)

    def _columns(self, table: pa.Table) -> dict[str, pa.Array]:
        return {name: join_chunks(table[name]) for name in self.types}

    def _parse_cells(self, table: pa.Table, rejected: list[tuple[int, str]], count: int) -> Parsed:
        """Parses the cells of a batch of `count` rows; `table` lacks the rejected ones. Finds each cell that cannot be
        converted."""
        numbers = np.setdiff1d(np.arange(count), [number for number, _ in rejected])
        columns, reasons = {}, dict[int, str]()
        for name, kind in self.types.items():
            columns[name], bad = self._texts.convert(join_chunks(table[name]), kind)
            for row in bad:
                reasons.setdefault(row, f"{name}: {self._wrong[kind]}")
        good = pa.array(np.setdiff1d(np.arange(table.num_rows), list(reasons)))
        rejected += [(int(numbers[row]), reason) for row, reason in reasons.items()]
        return Parsed(
            {name: values.take(good) for name, values in columns.items()}, len(good), rejected
        )

    def _parse_json(self, lines: pa.Array) -> Parsed:
        """Parses lines of JSON objects. Arrow parses the regular ones together."""
        irregular = self._objects.find_irregular(lines)
        try:
            table = self._objects.read(lines.filter(pa.array(~irregular)))
        except pa.ArrowInvalid:
            table, irregular = self._spec.input.schema.empty_table(), np.ones(len(lines), bool)
        if not irregular.any():
            return Parsed(self._columns(table), table.num_rows, [])
        rejected: list[tuple[int, str]] = []
        rows: dict[int, dict[str, Any]] = {}
        for number in np.flatnonzero(irregular).tolist():
            found = self._objects.one(lines[number].as_py())
            if isinstance(found, str):
                rejected.append((number, found))
            else:
                rows[number] = found
        more = pa.Table.from_pylist(list(rows.values()), self._spec.input.schema)
        table = merge_rows(table, np.flatnonzero(~irregular), more, list(rows))
        return Parsed(self._columns(table), table.num_rows, rejected)

    def _reject_marked(self, batch: pa.RecordBatch) -> Parsed:
        """Rejects the rows in which `_bad` is not null: it names the first column whose value does not fit its type."""
        names = batch.schema.names
        columns = {name: batch[name] for name in names if name not in ADDED_COLUMNS}
        parsed = Parsed(columns, batch.num_rows, [])
        if "_bad" not in names:
            return parsed
        marks = batch["_bad"]

        def describe(row: int) -> str:
            name = marks[row].as_py()
            return f"{name}: {WRONG[self.types[name]]}"

        return _reject(parsed, find_false(pc.is_null(marks)), describe)

    def _reject_bad_labels(self, parsed: Parsed) -> Parsed:
        label = self._spec.labels(parsed.columns)
        good = pc.fill_null(pc.is_in(label, pa.array([0, 1], label.type)), False)
        missing = pc.is_null(label)
        good = pc.or_(good, missing) if self._spec.table.unlabelled else good
        return _reject(
            parsed,
            find_false(good),
            lambda row: f"{self.label}: {'missing' if missing[row].as_py() else 'neither 0 nor 1'}",
        )

    def _reject_without_split(self, parsed: Parsed) -> Parsed:
        """Rejects the rows without a time if splits are cut by time. Rows without a label have a split of their own."""
        name = self._spec.table.split_time
        if name is None or name not in parsed.columns:
            return parsed
        good = pc.invert(pc.is_null(as_number(parsed.columns[name]), nan_is_null=True))
        if self._spec.table.unlabelled:
            good = pc.or_(good, pc.is_null(self._spec.labels(parsed.columns)))
        return _reject(parsed, find_false(good), f"{name}: {NO_SPLIT}")


def _reject(
    parsed: Parsed,
    bad: Sequence[int] | npt.NDArray[np.int64],
    reason: str | Callable[[int], str],
) -> Parsed:
    """Returns the batch without the `bad` rows, which are now rejected, too."""
    if not len(bad):
        return parsed
    numbers = np.setdiff1d(
        np.arange(parsed.rows + len(parsed.rejected)), [number for number, _ in parsed.rejected]
    )
    rejected = [
        (int(numbers[row]), reason if isinstance(reason, str) else reason(int(row))) for row in bad
    ]
    good = np.ones(parsed.rows, bool)
    good[bad] = False
    return Parsed(
        {name: values.filter(pa.array(good)) for name, values in parsed.columns.items()},
        parsed.rows - len(rejected),
        parsed.rejected + rejected,
    )
