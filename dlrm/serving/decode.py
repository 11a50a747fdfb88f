"""Decodes requests for predictions: `Decoder` turns JSON into rows of raw features, or refuses the request.

Values are accepted, converted and rejected by the rules of the ETL job. So a row has the same features here as in
training.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from sluice.common.suggest import nearest
from sluice.etl.apply.cells import JSON, WRONG, TextCells, has_infinity, json_column
from sluice.etl.apply.lookups import Problems, needed_columns
from sluice.etl.apply.parse import LONG_TEXT
from sluice.etl.ops.hashing import MOST_TEXT_BYTES, rows_of_long_texts
from sluice.etl.spec.input_section import ARROW_TYPES, NUMBERS
from sluice.etl.spec.spec import Spec

TOGETHER_BYTES = 2**15
"""From this size on, one call of Arrow's reader takes less time than Python's."""
_ODD = re.compile(rb"\\\\u[dD][89a-fA-F]|-0(?![.eE])(?<![eE]-0)")
"""Halves of surrogate pairs, of which some versions of Arrow read any, and -0, of which Arrow keeps the sign."""


class Refusal(Exception):
    """A request gets no predictions. The answer is an HTTP status and one line that says why."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        """`headers` are those of the answer."""
        super().__init__(text)
        self.status = status
        self.headers = headers or {}


Arrays = dict[str, pa.Array]


class Decoder:
    """Reads requests for one spec."""

    def __init__(self, spec: Spec, fingerprint: str, *, most_rows: int) -> None:
        needed = needed_columns(spec)
        self.kinds = {name: kind for name, kind in spec.input.columns.items() if name in needed}
        """The type of each raw feature that a request should have."""
        row = pa.struct([(name, ARROW_TYPES[kind]) for name, kind in self.kinds.items()])
        self._body_schema = pa.schema([("rows", pa.list_(row)), ("fingerprint", pa.string())])
        self._known, self._names = spec.input.column_of, spec.input.names
        self._times = spec.input.times
        self._texts = TextCells(spec.input)
        self._may_be_texts = {
            name
            for name, kind in self.kinds.items()
            if name in self._times or (spec.input.number_texts and kind in NUMBERS)
        }
        """The numbers that a request may write as texts, as the input does."""
        self._fingerprint = fingerprint
        self._row_limit = most_rows
        # In TSV an empty text and a missing one look the same. In CSV a missing number is an empty text.
        self._empty_is_none = {
            name
            for name, kind in self.kinds.items()
            if spec.input.format in (("tsv",) if kind == "text" else ("tsv", "csv"))
            and (kind == "text" or name in self._may_be_texts)
        }

    def read(
        self, bodies: Sequence[bytes], problems: Problems
    ) -> tuple[list[int | Refusal], Arrays]:
        """Reads the bodies of requests. Returns the number of rows of each, or why it is refused, and the features of
        all rows that are not refused. Adds rows with a value that does not fit to `problems`."""
        sizes = list(map(len, bodies))
        longest = max(sizes)
        if (
            sum(sizes) >= TOGETHER_BYTES
            and longest <= MOST_TEXT_BYTES
            and all(map(_is_usual, bodies))
        ):
            with suppress(pa.ArrowException, ValueError):
                return self._read_by_arrow(bodies)
        counts: list[int | Refusal] = []
        objects: list[dict[str, Any]] = []
        for body in bodies:
            try:
                own = self._json(body)
            except Refusal as refusal:
                counts.append(refusal)
            else:
                counts.append(len(own))
                objects += own
        columns = {name: self._column(name, objects, problems) for name in self.kinds}
        if longest > MOST_TEXT_BYTES:
            for name, values in columns.items():
                for row in rows_of_long_texts(values):
                    problems.setdefault(row, f"feature {name!r} is {LONG_TEXT}; shorten it")
            places = [None if row in problems else row for row in range(len(objects))]
            columns = {
                n: values.take(pa.array(places, pa.int64())) for n, values in columns.items()
            }
        return counts, columns

    def _read_by_arrow(self, bodies: Sequence[bytes]) -> tuple[list[Any], Arrays]:
        """Reads bodies of JSON by one call. Raises a ValueError or ArrowException if a body may be one to refuse.

        Arrow's reader sees one text of many objects. Each body begins and ends with a brace, and no JSON text goes over
        a line's end. So a body ends inside an object only if the whole is no JSON."""
        text = b"\n".join(bodies)
        text.decode()
        table = pyarrow.json.read_json(
            pa.py_buffer(text),
            pyarrow.json.ReadOptions(use_threads=False, block_size=1 << 30),
            pyarrow.json.ParseOptions(
                explicit_schema=self._body_schema, unexpected_field_behavior="error"
            ),
        )
        [lists] = table["rows"].chunks
        rows = lists.flatten()
        counts = lists.value_lengths()
        columns = dict(zip(self.kinds, rows.flatten(), strict=True))
        if (
            len(lists) != len(bodies)
            or lists.null_count
            or rows.null_count
            or pc.max(counts).as_py() > self._row_limit
            or set(table["fingerprint"].drop_null().to_pylist()) - {self._fingerprint}
            or has_infinity(pa.table(columns))
        ):
            raise ValueError("a body may be one to refuse")
        if b'""' in text:
            for name in self._empty_is_none:
                if self.kinds[name] == "text":
                    columns[name] = pc.if_else(pc.equal(columns[name], ""), None, columns[name])
        return counts.to_pylist(), columns

    def _json(self, body: bytes) -> list[dict[str, Any]]:
        try:
            text = body.decode("utf-8-sig")
            document = JSON.decode(text)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {str(error)[:200]}") from None
        if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
            raise Refusal(400, 'the body is not {"rows": [{feature: value, …}, …]}')
        if unknown := document.keys() - {"rows", "fingerprint"}:
            raise Refusal(
                400, f'the body has {min(unknown)[:60]!r} beside "rows" and "fingerprint"'
            )
        fingerprint = document.get("fingerprint")
        if fingerprint not in (None, self._fingerprint):
            raise Refusal(
                409,
                f"the request is for features {str(fingerprint)[:40]!r}, the model's are "
                f"{self._fingerprint!r}; /model says what it takes",
            )
        rows: list[dict[str, Any]] = document["rows"]
        if len(rows) > self._row_limit:
            raise Refusal(
                413,
                f"{len(rows)} rows are more than the {self._row_limit} that one request may have",
            )
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise Refusal(400, f"rows[{number}] is not an object of features")
            if not row.keys() <= self._known.keys():
                name = next(name for name in row if name not in self._known)
                raise Refusal(
                    422,
                    f"rows[{number}]: feature {name[:60]!r} is none of the model's"
                    f"{nearest(name[:60], self._known)}; /model says what it takes",
                )
        # A colon follows each key. If there are more colons than keys, texts have colons, or a key is a duplicate.
        # Readers differ in which value of a duplicate key they take.
        if text.count(":") != len(document) + sum(map(len, rows)):
            json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_int=str)
        return rows

    def _column(self, name: str, rows: Sequence[dict[str, Any]], problems: Problems) -> pa.Array:
        """Makes one feature's values from JSON objects. A value that does not fit is null, and a problem of its row."""
        values = [row.get(name) for row in rows]
        for other in self._names[name][1:]:
            values = [
                row.get(other) if value is None else value
                for row, value in zip(rows, values, strict=True)
            ]
        if name in self._empty_is_none and "" in values:
            values = [None if value == "" else value for value in values]
        texts = partial(self._texts.column, name) if name in self._may_be_texts else None
        column, bad = json_column(values, self.kinds[name], texts)
        for row in bad:
            why = self._why_unfit(name, values[row])
            problems.setdefault(row, f"feature {name!r} is {why}")
        return column

    def _why_unfit(self, name: str, value: Any) -> str:
        """Returns a value that does not fit, why, and what to send."""
        kind, shown = self.kinds[name], json.dumps(value, ensure_ascii=False)[:60]
        hint = ""
        if isinstance(value, str) and name in self._may_be_texts:
            shown, hint = repr(value[:60]), "; write it as the spec's input does, or without quotes"
            if name in self._times:
                form = self._times[name].format
                hint = (
                    f", and no time in its format {form!r}; write it so, or as seconds since 1970"
                )
        elif kind in NUMBERS and isinstance(value, str):
            hint = "; write a number without quotes, or null"
        return f"{shown}, {WRONG[kind]}{hint}"


def _reject_duplicate_keys(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in members).items():
        if times > 1:
            raise Refusal(422, f"key {key[:60]!r} is there twice in one object; send it once")
    return dict(members)


def _is_usual(body: bytes) -> bool:
    """Whether Arrow reads a body as Python does, if both can read it."""
    return (
        body[:1] == b"{"
        and body[-1:] == b"}"
        and b"NaN" not in body
        and not ((b"\\u" in body or b"-0" in body) and _ODD.search(body))
    )
