"""Turns raw lines into typed columns: `InputParser`. A line that does not parse is rejected with a reason, never
dropped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.json_lines import JsonObjects, fits, has_infinity
from sluice.etl.apply.lines import FIELDS, Delimited, in_order
from sluice.etl.apply.number_limits import NUMBERS, early_unfit, is_late, reason
from sluice.etl.ops.base import as_number
from sluice.etl.spec.input_values import ARROW_TYPES
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec

__all__ = ["ABOUT_ROWS", "INFINITY", "WRONG", "Batches", "InputParser", "Parsed", "fits"]

Batches = Iterator[pa.RecordBatch]
WRONG = {
    "int": "not a whole number of 64 bits",
    "float": "not a number of 64 bits",
    "text": "not UTF-8 text",
    "texts": "not a list of texts",
    "floats": "not a list of numbers of 64 bits",
}
NO_TIME = "not a time as its format says"
NO_SPLIT = "missing, or not a number, and rows are split by it (table.split_time)"
ABOUT_ROWS = ("_bad", "_file", "_from", "_at", *TIES)
_SPACE = " \t"  # spaces around a number are not part of it
_PLAIN = {
    "int": r"^[ \t]*-?[0-9]{1,18}[ \t]*$",
    "float": r"^[ \t]*-?[0-9]{1,18}(\.[0-9]{1,18})?[ \t]*$",
    "text": r"^[\x00-\x7f]*$",
}
"""Patterns of cells of bytes that surely convert."""
INFINITY = r"(?i)^[ \t]*[+-]?inf(inity)?[ \t]*$"
"""Cells that name an infinity. Any other cell that is read as one holds a number that is too large."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """One parsed batch: its good rows as columns, and the rejected ones."""

    columns: dict[str, pa.Array]
    rows: int
    rejected: list[tuple[int, str]]
    """The number of the row in the batch, and the reason. There are few reasons: they name a column, not a value."""


class InputParser:
    """Reads batches of one spec's input: a `line` column (each line with its end), or the columns themselves."""

    def __init__(self, spec: Spec) -> None:
        self.types = spec.input.read_as
        self._spec, self.label = spec, spec.label
        self._wrong = {**WRONG, "text": f"not {spec.input.encoding.upper()} text"}
        self.schema = pa.schema([(name, ARROW_TYPES[kind]) for name, kind in self.types.items()])
        self._delimited = Delimited(
            self.schema,
            spec.input.delimiter,
            quoted=spec.input.format == "csv",
            optional=len(spec.input.optional),
            decimal=spec.input.decimal,
        )
        self._objects = JsonObjects(self.schema, self.types, WRONG)
        self._numbers = [
            column for column in spec.columns if column.role in NUMBERS and not is_late(column)
        ]
        self._lines = self._json_lines if spec.input.format == "json" else self._csv_lines

    def parse(self, batch: pa.RecordBatch, places: npt.NDArray[np.float64] | None = None) -> Parsed:
        """Splits a batch into good rows and rejects; `places` are those of all its rows, if the spec has a column of
        them."""
        names = batch.schema.names
        if "line" in names:
            parsed = self._lines(self._in_utf8(batch["line"]))
        elif "_broken" in names:
            parsed = self._records(batch)
        else:
            parsed = self._without_bad(batch)
        parsed = self._with_splits(self._with_good_labels(self._with_times(parsed)))
        if places is not None:
            parsed.columns[self._spec.input.place or ""] = pa.array(
                np.delete(places, [n for n, _ in parsed.rejected])
            )
        return self._with_good_numbers(parsed)

    def _in_utf8(self, lines: pa.Array) -> pa.Array:
        """The lines in UTF-8; bytes that their encoding does not know become some that are no UTF-8 either."""
        name = self._spec.input.encoding
        return (
            lines
            if name == "utf-8"
            else pa.array(
                [
                    line.decode(name, "surrogateescape").encode("utf-8", "surrogatepass")
                    for line in lines.to_pylist()
                ],
                lines.type,
            )
        )

    def _csv_lines(self, lines: pa.Array) -> Parsed:
        irregular = self._delimited.find_irregular(lines)
        if not irregular.any():
            try:
                table, rejected = self._delimited.read(lines)
            except pa.ArrowInvalid:
                pass
            else:
                if not has_infinity(table):
                    return Parsed(self._columns(table), table.num_rows, rejected)
        return self._cell_by_cell(*self._delimited.cut(lines, irregular), len(lines))

    def _columns(self, table: pa.Table) -> dict[str, pa.Array]:
        return {name: _whole(table[name]) for name in self.types}

    def _records(self, batch: pa.RecordBatch) -> Parsed:
        """Parses cells that were cut already, as bytes; `_broken` is the text of a record with too few or too many."""
        whole = pc.is_null(batch["_broken"])
        rejected = [
            (int(number), FIELDS)
            for number in np.flatnonzero(~whole.to_numpy(zero_copy_only=False))
        ]
        cells = pa.Table.from_batches([batch]).select(list(self.types)).filter(whole)
        return self._cell_by_cell(cells, rejected, batch.num_rows)

    def _cell_by_cell(self, table: pa.Table, rejected: list[tuple[int, str]], count: int) -> Parsed:
        """Finds each cell that cannot be converted, in the rare batch that has one."""
        numbers = np.setdiff1d(np.arange(count), [number for number, _ in rejected])
        reasons: dict[int, str] = {}
        columns = {}
        for name, kind in self.types.items():
            cells = _whole(table[name])
            if (
                kind == "float" and self._spec.input.decimal == ","
            ):  # a point is no part of such a number
                cells = pc.replace_substring(pc.replace_substring(cells, ".", "?"), ",", ".")
            values, bad = _converted(cells, kind)
            columns[name] = values
            for place in bad:
                reasons.setdefault(place, f"{name}: {self._wrong[kind]}")
        good = pa.array(np.setdiff1d(np.arange(table.num_rows), list(reasons)))
        rejected += [(int(numbers[place]), reason) for place, reason in reasons.items()]
        return Parsed(
            {name: values.take(good) for name, values in columns.items()}, len(good), rejected
        )

    def _json_lines(self, lines: pa.Array) -> Parsed:
        irregular = self._objects.find_irregular(lines)
        try:
            table = self._objects.read(lines.filter(pa.array(~irregular)))
        except pa.ArrowInvalid:
            table, irregular = self.schema.empty_table(), np.ones(len(lines), bool)
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
        more = pa.Table.from_pylist(list(rows.values()), self.schema)
        table = in_order(table, np.flatnonzero(~irregular), more, list(rows))
        return Parsed(self._columns(table), table.num_rows, rejected)

    def _without_bad(self, batch: pa.RecordBatch) -> Parsed:
        """Sets the rows aside in which `_bad` is not null: it names the first column whose value does not fit its
        type."""
        names = [name for name in batch.schema.names if name not in ABOUT_ROWS]
        if "_bad" not in batch.schema.names or batch["_bad"].null_count == batch.num_rows:
            return Parsed({name: batch[name] for name in names}, batch.num_rows, [])
        bad = batch["_bad"].to_pylist()
        good = pc.is_null(batch["_bad"])
        return Parsed(
            {name: batch[name].filter(good) for name in names},
            bad.count(None),
            [
                (number, f"{name}: {WRONG[self.types[name]]}")
                for number, name in enumerate(bad)
                if name is not None
            ],
        )

    def _with_good_labels(self, parsed: Parsed) -> Parsed:
        label = self._spec.labels(parsed.columns)
        good = pc.fill_null(pc.is_in(label, pa.array([0, 1], label.type)), False)
        missing = pc.is_null(label)
        good = pc.or_(good, missing) if self._spec.table.unlabelled else good
        return _but(
            parsed,
            good,
            lambda i: f"{self.label}: {'missing' if missing[i].as_py() else 'neither 0 nor 1'}",
        )

    def _with_good_numbers(self, parsed: Parsed) -> Parsed:
        """Sets the rows aside of which a number could not be published, as far as that is known before anything is
        learned, and before rows meet others."""
        for column in self._numbers:
            if parsed.rows and all(name in parsed.columns for name in column.sources):
                bad = early_unfit(column, parsed.columns)
                if len(bad):
                    parsed = _but(parsed, pa.array(~bad), partial(_always, reason(column)))
        return parsed

    def _with_splits(self, parsed: Parsed) -> Parsed:
        """Sets the rows aside that a split by time cannot place; one without a label has a split of its own."""
        name = self._spec.table.split_time
        if name is None or name not in parsed.columns:
            return parsed
        good = pc.invert(pc.is_null(as_number(parsed.columns[name]), nan_is_null=True))
        if self._spec.table.unlabelled:
            good = pc.or_(good, pc.is_null(self._spec.labels(parsed.columns)))
        return _but(parsed, good, lambda _: f"{name}: {NO_SPLIT}")

    def _with_times(self, parsed: Parsed) -> Parsed:
        """Reads the times that are texts; a row with a text that is no time is rejected."""
        for name, op in self._spec.input.times.items():
            if pa.types.is_string(
                (texts := parsed.columns[name]).type
            ):  # rows that met others were read before
                found = op.apply(texts, None)
                parsed.columns[name] = found.cast(ARROW_TYPES[self._spec.input.columns[name]])
                good = pc.or_(pc.is_null(texts), pc.is_valid(found))

                parsed = _but(parsed, good, partial(_always, f"{name}: {NO_TIME}"))
        return parsed


def _but(parsed: Parsed, good: pa.Array, reason: Callable[[int], str]) -> Parsed:
    """Sets the rows aside that are not `good`, each with its reason."""
    if pc.all(good).as_py() is not False:
        return parsed
    numbers = np.setdiff1d(
        np.arange(parsed.rows + len(parsed.rejected)), [n for n, _ in parsed.rejected]
    )
    bad = [
        (int(numbers[i]), reason(i))
        for i in np.flatnonzero(~good.to_numpy(zero_copy_only=False)).tolist()
    ]
    return Parsed(
        {name: values.filter(good) for name, values in parsed.columns.items()},
        parsed.rows - len(bad),
        parsed.rejected + bad,
    )


def _always(text: str, _place: int) -> str:
    return text


def _whole(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks:
        return pa.concat_arrays(column.chunks)
    return pa.array([], column.type)


def _converted(column: pa.Array, kind: str) -> tuple[pa.Array, list[int]]:
    """The values converted to a type, null where that fails, and the rows where it fails."""
    try:
        text = column.cast(pa.string())
        values = text if kind == "text" else pc.utf8_trim(text, _SPACE).cast(ARROW_TYPES[kind])
        if kind != "float" or not pc.any(pc.is_inf(values)).as_py():
            return values, []
    except pa.ArrowInvalid:
        pass
    plain = pc.fill_null(pc.match_substring_regex(column, _PLAIN[kind]), True)
    text = pc.if_else(plain, column, None).cast(pa.string())
    values = text if kind == "text" else pc.utf8_trim(text, _SPACE).cast(ARROW_TYPES[kind])
    places = np.flatnonzero(~plain.to_numpy(zero_copy_only=False)).tolist()
    found: list[Any] = []
    bad = []
    for place in places:
        try:
            found.append(_one(column[place].as_py(), kind))
        except ValueError:
            found.append(None)
            bad.append(place)
    return pc.replace_with_mask(values, pc.invert(plain), pa.array(found, ARROW_TYPES[kind])), bad


def _one(cell: bytes, kind: str) -> Any:
    text = cell.decode()
    if kind == "text":
        return text
    value = pa.scalar(text.strip(_SPACE)).cast(ARROW_TYPES[kind]).as_py()
    if kind == "float" and math.isinf(value) and not re.match(INFINITY, text):
        raise ValueError(f"{text!r} is larger than any number of 64 bits")
    return value
