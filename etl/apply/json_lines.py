"""Reads lines that each hold a JSON object: `JsonObjects` reads them together where that is safe, otherwise one by one.

Arrow reads objects, not lines. It takes two objects on one line for two rows, and one object on two lines for one. So
only lines that are certainly one object each are read together. Python's reader reads any other line alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from sluice.etl.apply.lines import Flags, find_irregular, join_lines, strip_end
from sluice.etl.apply.number_texts import NumberTexts
from sluice.etl.spec.input_section import NUMBERS
from sluice.etl.spec.nested_columns import flattened, join_chunks

MAX_DEPTH = 100
_ELEMENT = {"texts": "text", "floats": "float"}
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
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.S)


class JsonObjects:
    """Reads the members that are columns, and skips the others.

    - If a name occurs twice, the last one counts.
    - A column with a dotted name is a part of an object, unless a line has a member with this full name.
    - As numbers, true and false are 1 and 0.
    - In a list of texts, a whole number becomes the text of its digits.
    - With `texts`, a number may be a text."""

    def __init__(
        self,
        schema: pa.Schema,
        kinds: Mapping[str, str],
        wrong: Mapping[str, str],
        texts: NumberTexts | None = None,
    ) -> None:
        self._schema, self._kinds = schema, kinds
        self._texts = texts
        self._wrong = {**wrong, "text": f"{wrong['text']} in quotes"}
        self._parts = {
            name: name.split(".")
            for name in kinds
            if _outer(name) and not _outer(name) & kinds.keys()
        }
        self._written_as: dict[str, pa.DataType] = {}
        """The columns that the last lines wrote as another type: true, false or texts for numbers, whole numbers for
        texts of lists. The next lines probably do the same."""

    def find_irregular(self, lines: pa.Array) -> Flags:
        """Returns which lines must be read alone."""
        plain = pc.match_substring_regex(lines, _PLAIN).to_numpy(zero_copy_only=False)
        found: Flags = find_irregular(lines) | ~plain
        for name in self._parts:
            found |= pc.match_substring(lines, json.dumps(name, ensure_ascii=False)).to_numpy(
                zero_copy_only=False
            )
        if self._texts and self._texts.quoted_missing:
            missing = pc.match_substring_regex(lines, self._texts.quoted_missing)
            found |= missing.to_numpy(zero_copy_only=False)
        return found

    def read(self, lines: pa.Array) -> pa.Table:
        """Reads lines that are not irregular. Raises ArrowInvalid if a line is no object, or a value is not of its
        column's type."""
        if not len(lines):
            return self._schema.empty_table()
        try:
            return self._read(lines)
        except pa.ArrowInvalid:
            found = {
                name: kind
                for line in lines[:_LOOKED_AT].to_pylist()
                for name, value in self._values(line).items()
                if (kind := self._written_kind(value, self._kinds[name])) is not None
            }
            if found == self._written_as:
                raise
            self._written_as = found
            return self._read(lines)

    def _read(self, lines: pa.Array) -> pa.Table:
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
        for place, (name, kind) in enumerate(self._kinds.items()):
            if kind in NUMBERS and pa.types.is_string(read[name].type):
                assert self._texts
                numbers, bad = self._texts.convert(join_chunks(read[name]), kind)
                if bad:
                    raise pa.ArrowInvalid(f"{name} has a text that is no number")
                read = read.set_column(place, name, numbers)
        read = read.cast(self._schema)
        # Arrow reads some numbers that are a little too large as infinite.
        if has_infinity(read):
            raise pa.ArrowInvalid("a number is too large")
        return read

    def _values(self, line: bytes) -> dict[str, Any]:
        """Returns the values of a line's columns, or none if the line is no object."""
        try:
            value = _DECODER.decode(strip_end(line).decode())
        except ValueError:
            return {}
        return (
            {name: self._value(value, name) for name in self._kinds}
            if isinstance(value, dict)
            else {}
        )

    def _value(self, value: Any, name: str) -> Any:
        """Returns the member with that name. For a dotted name without a member, it returns the part of an object."""
        if name in value or name not in self._parts:
            return value.get(name)
        for part in self._parts[name]:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def one(self, line: bytes) -> dict[str, Any] | str:
        """Reads the values of any one line, or returns why it is rejected."""
        try:
            text = strip_end(line).decode()
            if _is_too_deep(text):
                return f"nested more than {MAX_DEPTH} levels deep"
            value = _DECODER.decode(text)
        except ValueError:
            return "not a JSON object"
        if not isinstance(value, dict):
            return "not a JSON object"
        found = {}
        for name, kind in self._kinds.items():
            member = self._value(value, name)
            try:
                if self._texts and kind in NUMBERS and isinstance(member, str):
                    found[name] = self._texts.number(member, kind)
                    continue
            except ValueError:
                pass
            if not fits(member, kind):
                return f"{name}: {self._wrong[kind]}"
            found[name] = as_kind(member, kind)
        return found

    def _written_kind(self, value: Any, kind: str) -> pa.DataType | None:
        if self._texts and kind in NUMBERS and isinstance(value, str):
            return pa.string()
        return _written_as(value, kind)


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


def _whole(digits: str) -> int | float:
    """Reads a whole number. Python refuses to read numbers of thousands of digits, which are beyond any float, too."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


def _is_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") > MAX_DEPTH:
        depth = 0
        for token in _TEXT_OR_BRACKET.finditer(text):
            depth += (token[0] in "[{") - (token[0] in "]}")
            if depth > MAX_DEPTH:
                return True
    return False


def has_infinity(table: pa.Table) -> bool:
    """Returns whether a column of numbers, or of lists of them, has an infinity."""
    columns = (
        pc.list_flatten(column) if pa.types.is_list(column.type) else column
        for column in table.columns
    )
    return any(
        pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py()
        for column in columns
    )


def as_kind(value: Any, kind: str) -> Any:
    """Converts a value that fits as Arrow does. A whole number that no float holds exactly stays a whole number."""
    if isinstance(value, bool):
        value = int(value)
    if value is None or kind in ("int", "text"):
        return value
    one = str if kind == "texts" else float
    return (
        one(value) if kind == "float" else [None if item is None else one(item) for item in value]
    )


def _written_as(value: Any, kind: str) -> pa.DataType | None:
    """Returns the type of a value that a line may write in place of one of that kind. None: there is none."""
    if isinstance(value, bool) and kind in ("int", "float"):
        return pa.bool_()
    if (
        kind == "texts"
        and isinstance(value, list)
        and any(_is_whole_number(item) for item in value)
    ):
        return pa.list_(pa.int64())
    return None


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def fits(value: Any, kind: str) -> bool:
    """Returns whether a value from JSON fits a column of that type. None always does."""
    if value is None:
        return True
    if kind in _ELEMENT:
        return isinstance(value, list) and all(
            fits(item, _ELEMENT[kind]) or (kind == "texts" and _is_whole_number(item))
            for item in value
        )
    if kind == "text":
        return isinstance(value, str) and _is_whole(value)
    if not isinstance(value, (int, float)):
        return False
    if kind == "float":
        try:
            return not math.isinf(value)
        except OverflowError:  # a whole number whose nearest float is infinite
            return False
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _is_whole(text: str) -> bool:
    """Returns whether a text can be written as UTF-8. Half of a surrogate pair cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
