"""`LineReader` reads lines as typed columns. `InputParser` does this with raw input, and rejects a row that does not
parse with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.cells import WRONG, TextCells, find_false
from sluice.etl.apply.compiled_lines import CompiledLines
from sluice.etl.apply.json_lines import JsonObjects
from sluice.etl.apply.lines import Delimited, ReadLines, Reasons, Unfit
from sluice.etl.apply.number_limits import NUMBERS, early_unfit, is_late, reason
from sluice.etl.ops.base import Columns, as_number, plain
from sluice.etl.ops.hashing import MOST_TEXT_BYTES, Flags, Floats, rows_of_long_texts
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec

Batches = Iterator[pa.RecordBatch]
LONG_TEXT = f"a text of more than {MOST_TEXT_BYTES:,} bytes"
NO_TIME = "not a time as its format says"
LATE = "older than values of the same key in the table"
NO_SPLIT = "missing, or not a number, and rows are split by it (table.split_time)"
ADDED_COLUMNS = ("_bad", "_late", *TIES)
"""Columns that readers add to those of the input."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed batch: its good rows as columns, and its rejected rows."""

    columns: Columns
    rows: int
    """The number of good rows."""
    rejected: list[tuple[int, str]]
    """The number of each rejected row in the batch, and the reason. A reason names a column but no value, so there are
    few different ones."""


class LineReader:
    """Reads the lines of an input, or of a side table, as columns of their types. Times are read as texts."""

    def __init__(self, source: Input, *, compiled: bool = False) -> None:
        """With `compiled`, compiled functions cut the regular lines, if the input has only whole numbers and texts."""
        self._source = source
        self.texts = TextCells(source)
        is_json = source.format == "json"
        self._format = JsonObjects(source) if is_json else Delimited(source)
        no_text = f"{WRONG['text']} in quotes" if is_json else f"not {source.encoding.upper()} text"
        self.wrong = {
            name: no_text if kind == "text" else WRONG[kind]
            for name, kind in source.read_as.items()
        }
        """For each column, why a value does not fit."""
        is_compiled = compiled and CompiledLines.may_read(source)
        self._compiled = CompiledLines(source) if is_compiled else None

    def read(self, lines: pa.Array) -> ReadLines:
        """Returns the columns, the lines that are no rows, and the values that do not fit."""
        name = self._source.encoding
        if name != "utf-8":
            # Bytes that are invalid in the encoding become invalid UTF-8.
            lines = pa.array(
                [
                    line.decode(name, "surrogateescape").encode("utf-8", "surrogatepass")
                    for line in lines.to_pylist()
                ],
                lines.type,
            )
        if self._compiled is None:
            return self._read(lines)
        columns, irregular = self._compiled.read(lines)
        return _with_irregular((columns, {}, {}), lines, irregular, self._read)

    def _read(self, lines: pa.Array) -> ReadLines:
        """Reads the regular lines together, by Arrow, and the others one by one."""
        irregular = self._format.find_irregular(lines)
        try:
            regular = self._format.read(lines.filter(pa.array(~irregular)))
        except pa.ArrowInvalid:
            regular, irregular = self._format.read(lines[:0]), np.ones(len(lines), bool)
        return _with_irregular(regular, lines, irregular, self._format.read_alone)


def _with_irregular(
    regular: ReadLines, lines: pa.Array, irregular: Flags, read: Callable[[pa.Array], ReadLines]
) -> ReadLines:
    """Returns what was read of the regular lines, with the other lines, which it reads, at their places."""
    if not irregular.any():
        return regular
    sides = regular, read(lines.filter(pa.array(irregular)))
    numbers = np.flatnonzero(~irregular), np.flatnonzero(irregular)
    order = pa.array(np.argsort(np.concatenate(numbers)))
    columns, reasons, unfit = Columns(), Reasons(), Unfit()
    for name, values in regular[0].items():
        more = sides[1][0][name]
        more = more.dictionary_encode() if pa.types.is_dictionary(values.type) else more
        columns[name] = pa.concat_arrays([values, more]).take(order)
    for places, (_, refused, lost) in zip(numbers, sides, strict=True):
        reasons |= {int(places[row]): reason for row, reason in refused.items()}
        for name, rows in lost.items():
            unfit[name] = sorted([*unfit.get(name, ()), *places[rows].tolist()])
    return columns, reasons, unfit


class InputParser:
    """Parses batches of one spec's input. A batch has a column `line` (each line with its end), or columns of cells."""

    def __init__(self, spec: Spec, *, compiled: bool = False) -> None:
        """With `compiled`, compiled functions cut the regular lines, if the input has only whole numbers and texts."""
        self._spec, self.label = spec, spec.label
        self._lines = LineReader(spec.input, compiled=compiled)
        self._numbers = [
            column for column in spec.columns if column.role in NUMBERS and not is_late(column)
        ]

    def parse(self, batch: pa.RecordBatch, places: Floats | None = None) -> Parsed:
        """Returns the good and the rejected rows of a batch. `places` has the values of the column `input.place` for
        all rows of the batch, if the spec has that column."""
        names = batch.schema.names
        is_short = False
        if "line" in names:
            columns, reasons, unfit = self._lines.read(batch["line"])
            for name, rows in unfit.items():
                _reject(reasons, rows, f"{name}: {self._lines.wrong[name]}")
            # In UTF-8, a text is at most three times as long as its line.
            is_short = 3 * (pc.max(pc.binary_length(batch["line"])).as_py() or 0) <= MOST_TEXT_BYTES
        else:
            columns, reasons = self._read_marked(batch)
        if not is_short:
            for name, values in columns.items():
                _reject(reasons, rows_of_long_texts(values), f"{name}: {LONG_TEXT}")
        for name in self._spec.input.times:
            texts = plain(columns[name])
            # After joins and histories, the times are numbers already.
            if pa.types.is_string(texts.type):
                columns[name], bad = self._lines.texts.column(name, texts)
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

    def _read_marked(self, batch: pa.RecordBatch) -> tuple[Columns, Reasons]:
        """Reads typed columns. `_bad` names the first column of a row whose value does not fit its type, and `_late`
        the history that has newer values."""
        names, types = batch.schema.names, self._spec.input.read_as
        columns = {name: batch[name] for name in names if name not in ADDED_COLUMNS}
        reasons: Reasons = {}
        for mark in ("_bad", "_late"):
            for row, name in enumerate(batch[mark].to_pylist() if mark in names else ()):
                if name is not None:
                    reasons[row] = f"{name}: {LATE if mark == '_late' else WRONG[types[name]]}"
        return columns, reasons

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
