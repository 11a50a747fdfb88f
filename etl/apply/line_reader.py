"""`LineReader`: reads the lines of an input, or of a side table, as columns of their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.etl.apply.cells import WRONG, TextCells, has_infinity
from sluice.etl.apply.compiled_lines import CompiledLines
from sluice.etl.apply.json_lines import JsonObjects
from sluice.etl.apply.lines import Delimited, Part, Reasons, place_rows
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.nested_columns import join_chunks

Columns = dict[str, pa.Array]
Unfit = dict[str, Sequence[int]]
"""For each column, the rows whose value does not fit its type. Their value is null."""


class LineReader:
    """Times are read as texts."""

    def __init__(self, source: Input, *, compiled: bool = False) -> None:
        """With `compiled`, compiled functions cut the regular lines, if the input has only whole numbers and texts."""
        self._source = source
        self._texts = TextCells(source)
        self._delimited, self._objects = Delimited(source), JsonObjects(source)
        is_json = source.format == "json"
        no_text = f"{WRONG['text']} in quotes" if is_json else f"not {source.encoding.upper()} text"
        self.wrong = {
            name: no_text if kind == "text" else WRONG[kind]
            for name, kind in source.read_as.items()
        }
        """For each column, why a value does not fit."""
        self._read = self._read_json if is_json else self._read_delimited
        self._compiled = CompiledLines(source)
        if compiled and CompiledLines.may_read(source):
            self._read = self._read_compiled

    def read(self, lines: pa.Array) -> tuple[Columns, Reasons, Unfit]:
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
        return self._read(lines)

    def _read_delimited(self, lines: pa.Array) -> tuple[Columns, Reasons, Unfit]:
        """Reads lines of csv or tsv. Arrow reads them together unless a line or a cell needs a closer look."""
        irregular = self._delimited.find_irregular(lines)
        if not irregular.any() and not self._texts.are_special:
            try:
                table, reasons = self._delimited.read(lines)
            except pa.ArrowInvalid:
                pass
            else:
                if not has_infinity(table):
                    return self._columns(table), reasons, {}
        cells, reasons = self._delimited.cut(lines, irregular)
        columns, unfit = Columns(), Unfit()
        for name, kind in self._source.read_as.items():
            columns[name], unfit[name] = self._texts.convert(join_chunks(cells[name]), kind)
        return columns, reasons, unfit

    def _read_compiled(self, lines: pa.Array) -> tuple[Columns, Reasons, Unfit]:
        """Reads lines of csv or tsv with compiled functions, and the irregular ones without."""
        columns, irregular = self._compiled.read(lines)
        if not irregular.any():
            return columns, {}, {}
        rest, reasons, unfit = self._read_delimited(lines.filter(pa.array(irregular)))
        numbers = np.flatnonzero(irregular)
        order = pa.array(np.argsort(np.concatenate([np.flatnonzero(~irregular), numbers])))
        for name, values in columns.items():
            more = rest[name]
            more = more.dictionary_encode() if pa.types.is_dictionary(values.type) else more
            columns[name] = pa.concat_arrays([values, more]).take(order)
        return (
            columns,
            {int(numbers[row]): reason for row, reason in reasons.items()},
            {name: numbers[rows].tolist() for name, rows in unfit.items()},
        )

    def _read_json(self, lines: pa.Array) -> tuple[Columns, Reasons, Unfit]:
        """Reads lines of JSON objects. Arrow reads the regular ones together."""
        irregular = self._objects.find_irregular(lines)
        schema = self._source.schema
        try:
            table = self._objects.read(lines.filter(pa.array(~irregular)))
        except pa.ArrowInvalid:
            table, irregular = schema.empty_table(), np.ones(len(lines), bool)
        if not irregular.any():
            return self._columns(table), {}, {}
        reasons: Reasons = {}
        rows: dict[int, dict[str, Any]] = {}
        for number in np.flatnonzero(irregular).tolist():
            values = self._objects.values(lines[number].as_py())
            if isinstance(values, str):
                reasons[number] = values
            else:
                rows[number] = values
        columns, unfit = self._objects.columns(list(rows.values()))
        numbers = np.array([*rows], np.intp)
        parts: list[Part] = [
            (np.flatnonzero(~irregular), table),
            (numbers, pa.table(columns, schema=schema)),
        ]
        return (
            self._columns(place_rows(parts, len(lines))),
            reasons,
            {name: numbers[bad].tolist() for name, bad in unfit.items()},
        )

    def _columns(self, table: pa.Table) -> Columns:
        return {name: join_chunks(table[name]) for name in table.column_names}
