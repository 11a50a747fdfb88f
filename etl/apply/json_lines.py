"""Reads lines that each hold a JSON object: `JsonObjects` reads them together where that is safe, otherwise one by one.

Arrow reads objects, not lines. It takes two objects on one line for two rows, and one object on two lines for one. So
only lines that are certainly one object each are read together. Python's reader reads any other line alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from sluice.etl.apply.cells import JSON, TextCells, has_infinity, is_whole_number, json_column
from sluice.etl.apply.lines import (
    ReadLines,
    Unfit,
    find_irregular,
    join_lines,
    strip_end,
)
from sluice.etl.ops.base import Columns
from sluice.etl.ops.hashing import Flags
from sluice.etl.spec.input_section import NUMBERS, Input
from sluice.etl.spec.nested_columns import flattened, join_chunks

MAX_DEPTH = 100
_LOOKED_AT = 100
"""The number of lines that `JsonObjects.read` searches for true and false."""


def _plain(depth: int = 2) -> str:
    """Returns a pattern of lines that are one object each, with at most `depth` levels. If a line matches and is no
    JSON, Arrow refuses it. Lines that the two readers read differently do not match (NaN, the sign of -0, halves of
    surrogate pairs)."""
    unicode = (
        r"u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}|"
        r"[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    )
    inside = within = (
        r"[+.0-9eEtrufalsn,: \t]|-[1-9]|-0[.eE]|[eE]-[0-9]|"
        rf'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|{unicode}))*"'
    )
    for _ in range(depth):
        within = rf"{inside}|\{{(?:{within})*\}}|\[(?:{within})*\]"
    return rf"^[ \t]*\{{(?:{within})*\}}[ \t\r]*\n$"


_PLAIN = _plain()
_ESCAPED_NAME = r'\\.(?:[^"\\]|\\.)*"[ \t]*:'
"""A name of a member from its first escape on."""
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.S)


class JsonObjects:
    """Reads the members that are columns, and skips the others.

    - If a name occurs twice, the last one counts.
    - A column with a dotted name is a part of an object, unless a line has a member with this full name.
    - `json_column` says which values fit a column."""

    def __init__(self, source: Input) -> None:
        self._kinds, self._names, self._times = source.read_as, source.names, source.times
        self._schema = pa.schema(
            [(name, field.type) for field in source.schema for name in self._names[field.name]]
        )
        """The members that are read. A column may have several names."""
        members = {*self._schema.names}
        self._texts = TextCells(source) if source.number_texts else None
        self._parts = {
            name: name.split(".")
            for name in self._schema.names
            if _outer(name) and not _outer(name) & members
        }
        self._written_as: dict[str, pa.DataType] = {}
        """The columns that the last lines wrote as another type: true, false or texts for numbers, whole numbers or
        true and false for texts. The next lines probably do the same."""

    def find_irregular(self, lines: pa.Array) -> Flags:
        """Returns which lines must be read alone."""
        plain = np.asarray(pc.match_substring_regex(lines, _PLAIN))
        irregular: Flags = find_irregular(lines) | ~plain
        for name in self._parts:
            irregular |= np.asarray(pc.match_substring(lines, json.dumps(name, ensure_ascii=False)))
        if self._parts:  # an escaped name may be a full one
            irregular |= np.asarray(pc.match_substring_regex(lines, _ESCAPED_NAME))
        if self._texts and self._texts.quoted_missing:
            missing = pc.match_substring_regex(lines, self._texts.quoted_missing)
            irregular |= np.asarray(missing)
        return irregular

    def read(self, lines: pa.Array) -> ReadLines:
        """Reads lines that are not irregular together. Raises ArrowInvalid if a line is no object, or a value is not of
        its column's type."""
        if not len(lines):
            return self._columns(self._schema.empty_table())
        try:
            return self._read(lines)
        except pa.ArrowInvalid:
            written_as = {
                name: kind
                for line in map(self.values, lines[:_LOOKED_AT].to_pylist())
                if isinstance(line, dict)
                for column, value in line.items()
                if column not in self._times
                if (kind := self._written_kind(value, self._kinds[column])) is not None
                for name in self._names[column]
            }
            if written_as == self._written_as:
                raise
            self._written_as = written_as
            return self._read(lines)

    def _read(self, lines: pa.Array) -> ReadLines:
        nested: dict[str, Any] = {}
        for field in self._schema:
            *outer, last = self._parts.get(field.name, [field.name])
            inner = nested
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = self._written_as.get(field.name, field.type)
        table = pyarrow.json.read_json(
            pa.BufferReader(join_lines(lines)),
            pyarrow.json.ReadOptions(use_threads=False, block_size=1 << 30),
            pyarrow.json.ParseOptions(
                explicit_schema=pa.schema(_fields(nested)), unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != len(lines):
            raise pa.ArrowInvalid(f"{len(lines)} lines were read as {table.num_rows} objects")
        read = flattened(table).select(self._schema.names)
        for place, (name, kind) in enumerate(
            zip(self._schema.names, self._schema.types, strict=True)
        ):
            if not pa.types.is_string(kind) and pa.types.is_string(read[name].type):
                assert self._texts
                number = "int" if pa.types.is_integer(kind) else "float"
                numbers, bad = self._texts.convert(join_chunks(read[name]), number)
                if bad:
                    raise pa.ArrowInvalid(f"{name} has a text that is no number")
                read = read.set_column(place, name, numbers)
        read = read.cast(self._schema)
        # Arrow reads some numbers that are a little too large as infinite.
        if has_infinity(read):
            raise pa.ArrowInvalid("a number is too large")
        return self._columns(read)

    def _columns(self, read: pa.Table) -> ReadLines:
        """Returns the columns, each the first of its members that has a value."""
        columns = {
            column: join_chunks(
                pc.coalesce(*(read[name] for name in names)) if len(names) > 1 else read[names[0]]
            )
            for column, names in self._names.items()
        }
        return columns, {}, {}

    def _value(self, value: Any, column: str) -> Any:
        """Returns the first value that a line has for a column."""
        members = (self._member(value, name) for name in self._names[column])
        return next((member for member in members if member is not None), None)

    def _member(self, value: Any, name: str) -> Any:
        """Returns the member with that name. For a dotted name without a member, it returns the part of an object."""
        if name in value or name not in self._parts:
            return value.get(name)
        for part in self._parts[name]:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def values(self, line: bytes) -> dict[str, Any] | str:
        """Returns the values of the columns in any one line, or why it is no row."""
        try:
            text = strip_end(line).decode()
            if _is_too_deep(text):
                return f"nested more than {MAX_DEPTH} levels deep"
            value = JSON.decode(text)
        except ValueError:
            return "not a JSON object"
        if not isinstance(value, dict):
            return "not a JSON object"
        return {name: self._value(value, name) for name in self._kinds}

    def read_alone(self, lines: pa.Array) -> ReadLines:
        """Reads any lines, one by one."""
        rows = [self.values(line) for line in lines.to_pylist()]
        reasons = {number: row for number, row in enumerate(rows) if isinstance(row, str)}
        columns, unfit = Columns(), Unfit()
        for name, kind in self._kinds.items():
            texts = partial(self._texts.column, name) if self._texts and kind in NUMBERS else None
            values = [row[name] if isinstance(row, dict) else None for row in rows]
            columns[name], unfit[name] = json_column(values, kind, texts)
            if name in self._times:  # a server takes a number for seconds
                odd = (row for row, v in enumerate(values) if not isinstance(v, str | None))
                unfit[name] = sorted({*unfit[name], *odd})
        return columns, reasons, unfit

    def _written_kind(self, value: Any, kind: str) -> pa.DataType | None:
        """Returns the type of a value that a line may write in place of one of that kind. None: there is none."""
        if kind in (*NUMBERS, "text") and isinstance(value, bool):
            return pa.bool_()
        if kind in NUMBERS and isinstance(value, str) and self._texts:
            return pa.string()
        if kind == "text" and is_whole_number(value):
            return pa.int64()
        if kind == "texts" and isinstance(value, list):
            items = {self._written_kind(item, "text") for item in value} - {None}
            return pa.list_(items.pop()) if len(items) == 1 else None
        return None


def _outer(name: str) -> set[str]:
    """Returns the names of the objects that contain a part with this dotted name."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _fields(nested: Mapping[str, Any]) -> list[pa.Field]:
    """Returns the fields of a schema. A mapping becomes a struct."""
    return [
        pa.field(name, pa.struct(_fields(kind)) if isinstance(kind, dict) else kind)
        for name, kind in nested.items()
    ]


def _is_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") > MAX_DEPTH:
        depth = 0
        for token in _TEXT_OR_BRACKET.finditer(text):
            depth += (token[0] in "[{") - (token[0] in "]}")
            if depth > MAX_DEPTH:
                return True
    return False
