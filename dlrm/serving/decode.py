"""Decodes requests for predictions: `Decoder` turns JSON or Arrow into rows of raw features, or refuses the request.

Values are accepted, converted and rejected by the rules of the ETL job. So a row has the same features here as in
training.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from sluice.common.suggest import nearest
from sluice.etl.apply.cells import WRONG, TextCells, json_cell
from sluice.etl.apply.features import MODEL_ROLES
from sluice.etl.apply.parse import LONG_TEXT
from sluice.etl.ops.hashing import MOST_TEXT_BYTES, rows_of_long_texts
from sluice.etl.spec.input_section import NUMBERS
from sluice.etl.spec.input_values import ARROW_TYPES, converted
from sluice.etl.spec.spec import Spec

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
_PLAIN_TYPES = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_null,
)
_WHOLE_MINUS_ZERO = re.compile(rb"-0(?![.eE])(?<![eE]-0)")
_TOGETHER_BYTES = 2**15
"""From this size on, one call of Arrow's reader takes less time than Python's."""
# The numbers of fields in Arrow's messages.
_HEADER = 2
_COMPRESSION = 3


class Refusal(Exception):
    """A request gets no predictions. The answer is an HTTP status and one line that says why."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        """`headers` are those of the answer."""
        super().__init__(text)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of one request: as JSON objects, or as columns, which may be those of several requests."""

    count: int
    objects: Sequence[dict[str, Any]] = ()
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    first: int = 0
    """The request's first row in `columns`."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """For each feature, the number of rows without it. These rows get the spec's default."""


class Decoder:
    """Reads requests for one spec."""

    def __init__(
        self,
        spec: Spec,
        fingerprint: str,
        *,
        most_rows: int,
        together_bytes: int = _TOGETHER_BYTES,
    ) -> None:
        """Requests of `together_bytes` or more are read by one call of Arrow, if all of their values are usual."""
        # What the model's columns are made from, and the keys of joins and histories.
        needed = {
            name for column in spec.columns if column.role in MODEL_ROLES for name in column.sources
        }
        for history in spec.rows.histories:
            if history.name in needed:
                needed |= {history.by, history.of}
        for join in reversed(spec.rows.joins):  # a join's key may come from an earlier join
            needed |= set(join.on)
        self.kinds = {name: kind for name, kind in spec.input.columns.items() if name in needed}
        """The type of each raw feature that a request should have."""
        self._known = spec.input.columns
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
        self._together_bytes = together_bytes
        row = pa.struct([(name, ARROW_TYPES[kind]) for name, kind in self.kinds.items()])
        self._body_schema = pa.schema([("rows", pa.list_(row)), ("fingerprint", pa.string())])
        self._can_join = bool(self.kinds) and not self._times.keys() & self.kinds.keys()
        self._can_join &= all(kind in ("int", "float", "text") for kind in self.kinds.values())
        # In TSV an empty text and a missing one look the same. The other formats distinguish them.
        self._empty_is_none = spec.input.format == "tsv"

    def read(self, content_type: str, body: bytes) -> RequestRows:
        """Reads a request's body. Raises Refusal if it cannot be answered."""
        kind = content_type.partition(";")[0].strip().lower()
        if kind == JSON:
            for parameter in content_type.split(";")[1:]:
                name, _, value = parameter.partition("=")
                charset = value.strip(' \t"').lower()
                if name.strip().lower() == "charset" and charset not in (
                    "utf-8",
                    "utf8",
                    "us-ascii",
                ):
                    raise Refusal(
                        415,
                        f"charset {charset[:60]!r}: JSON is read as UTF-8 alone; encode the body so, and "
                        "leave the charset out",
                    )
            rows = self._json(body)
        elif kind == ARROW:
            rows = self._arrow(body)
        else:
            raise Refusal(
                415,
                f"Content-Type {kind[:60]!r} is neither {JSON} nor {ARROW}; say which of them the "
                f"rows are, as curl does with -H 'content-type: {JSON}'",
            )
        if len(body) > MOST_TEXT_BYTES:
            for name, values in self.columns([rows]).items():
                for row in rows_of_long_texts(values):
                    raise Refusal(422, f"rows[{row}]: feature {name!r} is {LONG_TEXT}; shorten it")
        return rows

    def read_all(self, requests: Sequence[tuple[str, bytes]]) -> list[RequestRows | Refusal]:
        """Reads requests, each given by its content type and body. Gives what `read` returns or raises for each."""
        usual = [
            number
            for number, (kind, body) in enumerate(requests)
            if kind == JSON and _is_usual(body)
        ]
        joined = dict(
            zip(usual, self._read_together([requests[number][1] for number in usual]), strict=False)
        )
        read: list[RequestRows | Refusal] = []
        for number, request in enumerate(requests):
            try:
                read.append(joined[number] if number in joined else self.read(*request))
            except Refusal as refusal:
                read.append(refusal)
        return read

    def _read_together(self, bodies: Sequence[bytes]) -> list[RequestRows]:
        """Reads bodies of JSON with Arrow. Returns nothing if a body may be one to refuse.

        Arrow's reader sees one text of many objects. Each body begins and ends with a brace, and no JSON text goes over
        a line's end. So a body ends inside an object only if the whole is no JSON."""
        # A longer body may have a text that is too long.
        fits = max(map(len, bodies), default=0) <= MOST_TEXT_BYTES
        if not (self._can_join and fits) or sum(map(len, bodies)) < self._together_bytes:
            return []
        text = b"\n".join(bodies)
        try:
            text.decode()
            table = pyarrow.json.read_json(
                pa.py_buffer(text),
                pyarrow.json.ReadOptions(use_threads=False, block_size=1 << 30),
                pyarrow.json.ParseOptions(
                    explicit_schema=self._body_schema, unexpected_field_behavior="error"
                ),
            )
            [requests] = table["rows"].chunks
        except (pa.ArrowException, ValueError):
            return []
        rows = requests.flatten()
        offsets = requests.offsets.to_numpy()
        counts = np.diff(offsets)
        columns = dict(zip(self.kinds, rows.flatten(), strict=True))
        if (
            len(requests) != len(bodies)
            or requests.null_count
            or counts.max() > self._row_limit
            or set(table["fingerprint"].drop_null().to_pylist()) - {self._fingerprint}
            or any(
                kind == "float" and pc.all(pc.is_finite(columns[name])).as_py() is False
                for name, kind in self.kinds.items()
            )
        ):
            return []
        missing: list[dict[str, int]] = [{} for _ in bodies]
        for name, array in columns.items():
            if array.null_count:
                nulls = array.is_null().to_numpy(zero_copy_only=False)
                before = np.concatenate(([0], nulls.cumsum()))[offsets]
                absent = np.diff(before)
                for number in np.flatnonzero(absent).tolist():
                    missing[number][name] = int(absent[number])
        if b'""' in text:
            columns = {name: self._without_empty(array) for name, array in columns.items()}
        return [
            RequestRows(count, columns=columns, first=first, missing=absent)
            for count, first, absent in zip(
                counts.tolist(), offsets.tolist(), missing, strict=False
            )
        ]

    def columns(self, requests: Sequence[RequestRows]) -> dict[str, pa.Array]:
        """Joins the rows of several requests. Raises Refusal if a value does not fit its column."""
        parts: list[dict[str, pa.Array]] = []
        for _, group in itertools.groupby(requests, lambda rows: rows.columns and id(rows.columns)):
            some = list(group)
            if some[0].columns:
                first, count = some[0].first, sum(rows.count for rows in some)
                parts.append({n: a.slice(first, count) for n, a in some[0].columns.items()})
            else:
                parts.append(self._to_arrays([row for rows in some for row in rows.objects]))
        if len(parts) == 1:
            return parts[0]
        return {name: pa.concat_arrays([part[name] for part in parts]) for name in self.kinds}

    def _to_arrays(self, objects: Sequence[dict[str, Any]]) -> dict[str, pa.Array]:
        arrays = {}
        for name, kind in self.kinds.items():
            values = list(map(dict.get, objects, itertools.repeat(name)))
            if kind == "text" and self._empty_is_none and "" in values:
                values = [value or None for value in values]
            try:
                if name in self._may_be_texts:
                    empty = None if name in self._times else ""
                    texts = [value or empty if isinstance(value, str) else None for value in values]
                    values = [None if isinstance(value, str) else value for value in values]
                    arrays[name] = pc.coalesce(
                        _make_array(values, kind),
                        self._read_texts(name, pa.array(texts, pa.string())),
                    )
                else:
                    arrays[name] = _make_array(values, kind)
            except (ValueError, OverflowError):
                # The value is for example a lone surrogate, or an integer beyond any float.
                raise Refusal(422, f"feature {name!r}: {WRONG[kind]}") from None
        return arrays

    def _read_texts(self, name: str, texts: pa.Array) -> pa.Array:
        """Parses numbers and times that are written as in the input, as the ETL job does."""
        values, bad = self._texts.column(name, texts)
        if bad:
            what = (
                f"which is no time in its format {self._times[name].format!r}; write it so, or as seconds since 1970"
                if name in self._times
                else f"{WRONG[self.kinds[name]]}; write it as the spec's input does, or without quotes"
            )
            raise Refusal(
                422, f"rows[{bad[0]}]: feature {name!r} is {texts[bad[0]].as_py()[:60]!r}, {what}"
            )
        return values

    def _json(self, body: bytes) -> RequestRows:
        try:
            text = body.decode("utf-8-sig")
            document = json.loads(text, parse_constant=_reject_constant)
            # A colon follows each key. If there are more colons than keys, texts have colons, or a key is a duplicate.
            # Readers differ in which value of a duplicate key they take.
            if text.count(":") != _count_keys(document):
                json.loads(text, object_pairs_hook=_reject_duplicate_keys)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {_first_line(error)}") from None
        if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
            raise Refusal(400, 'the body is not {"rows": [{feature: value, …}, …]}')
        if unknown := document.keys() - {"rows", "fingerprint"}:
            raise Refusal(
                400, f'the body has {min(unknown)[:60]!r} beside "rows" and "fingerprint"'
            )
        if "fingerprint" in document:
            self._check_fingerprint(document["fingerprint"])
        rows = document["rows"]
        self._check_row_count(len(rows))
        self._check_rows(rows)
        absent = (self.kinds.keys() - row.keys() for row in rows if row)
        missing = Counter(itertools.chain.from_iterable(absent))
        if unnamed := rows.count({}):
            missing.update(dict.fromkeys(self.kinds, unnamed))
        return RequestRows(len(rows), rows, missing=missing)

    def _check_rows(self, rows: Sequence[Any]) -> None:
        """Raises Refusal for the first row, and its first feature, that is unknown or does not fit."""
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise Refusal(400, f"rows[{number}] is not an object of features")
            for name, value in row.items():
                kind = self.kinds.get(name)
                if kind is None:
                    self._check_known(name, f"rows[{number}]: ")
                    continue
                is_text = isinstance(value, str) and name in self._may_be_texts
                try:
                    json_cell(value, "text" if is_text else kind)
                except (ValueError, OverflowError):
                    shown = json.dumps(value, ensure_ascii=False)[:60]
                    is_number = kind == "text" and isinstance(value, int | float)
                    hint = f'; write "{shown}"' if is_number else ""
                    if kind in ("int", "float") and isinstance(value, str):
                        hint = "; write a number without quotes, or null"
                    what = f"feature {name!r} is {shown}, {WRONG[kind]}{hint}"
                    raise Refusal(422, f"rows[{number}]: {what}") from None

    def _arrow(self, body: bytes) -> RequestRows:
        try:
            for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(body)):
                # A stream may grow when it is read, by compression or by dictionaries.
                if message.type not in ("schema", "record batch"):
                    raise Refusal(415, "Arrow columns must not be dictionary-encoded")
                if message.type == "record batch" and _is_compressed(message):
                    raise Refusal(415, "Arrow batches must not be compressed")
            batches = []
            rows = 0
            with pa.ipc.open_stream(body) as stream:
                for batch in stream:
                    rows += batch.num_rows
                    self._check_row_count(rows)
                    batch.validate(full=True)  # the stream may be invalid
                    batches.append(batch)
                table = pa.Table.from_batches(batches, stream.schema)
            names = table.schema.names  # this fails if a name is not valid text
        except (
            pa.ArrowException,
            OSError,
            ValueError,
            IndexError,
            struct.error,
            MemoryError,
        ) as error:
            raise Refusal(
                400, f"the body is not an Arrow IPC stream: {_first_line(error)}"
            ) from None
        if (fingerprint := (table.schema.metadata or {}).get(b"fingerprint")) is not None:
            self._check_fingerprint(fingerprint.decode(errors="replace"))
        for name in names:
            self._check_known(name)
        if len(set(names)) < len(names):
            raise Refusal(422, "two columns have one name")
        columns = {}
        missing = {}
        for name, kind in self.kinds.items():
            if name in names:
                columns[name] = self._cast(name, kind, table[name])
            else:
                columns[name] = pa.nulls(table.num_rows, ARROW_TYPES[kind])
                missing[name] = table.num_rows
        return RequestRows(table.num_rows, columns=columns, missing=missing)

    def _cast(self, name: str, kind: str, values: pa.ChunkedArray) -> pa.Array:
        inner = values.type.value_type if pa.types.is_list(values.type) else values.type
        # Times, decimals and other types are converted as in the ETL job.
        if not any(is_kind(inner) for is_kind in _PLAIN_TYPES):
            try:
                array, lost = converted(values.combine_chunks(), kind)
            except pa.ArrowException:
                raise Refusal(
                    422, f"feature {name!r} is {values.type}, where the spec has {kind}"
                ) from None
            if lost is not None and lost.any():
                raise Refusal(422, f"feature {name!r}: {WRONG[kind]}")
            return array
        if name in self._may_be_texts and pa.types.is_string(values.type):
            return self._read_texts(name, values.combine_chunks())
        if pa.types.is_floating(inner) and kind == "int":
            raise Refusal(422, f"feature {name!r} is {values.type}, where the spec has int")
        try:
            array = values.cast(
                ARROW_TYPES[kind], safe=not kind.startswith("float")
            ).combine_chunks()
        except pa.ArrowException:
            raise Refusal(
                422, f"feature {name!r} is {values.type}, where the spec has {kind}"
            ) from None
        return self._without_empty(array)

    def _without_empty(self, array: pa.Array) -> pa.Array:
        """Returns texts with null for an empty one, if the input's format has no empty texts."""
        if self._empty_is_none and pa.types.is_string(array.type):
            return pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.string()), array)
        return array

    def _check_row_count(self, rows: int) -> None:
        if rows > self._row_limit:
            raise Refusal(
                413, f"{rows} rows are more than the {self._row_limit} that one request may have"
            )

    def _check_fingerprint(self, fingerprint: object) -> None:
        if fingerprint != self._fingerprint:
            raise Refusal(
                409,
                f"the request is for features {str(fingerprint)[:40]!r}, the model's are "
                f"{self._fingerprint!r}; /model says what it takes",
            )

    def _check_known(self, name: str, where: str = "") -> None:
        if name not in self._known:
            raise Refusal(
                422,
                f"{where}feature {name[:60]!r} is none of the model's{nearest(name[:60], self._known)}; "
                "/model says what it takes",
            )


def _is_usual(body: bytes) -> bool:
    """Whether Arrow reads a body as Python does, if both can read it. Arrow keeps the sign of -0, and some versions
    read halves of surrogate pairs. After Arrow, null is the same as a feature that is not named."""
    return (
        body[:1] == b"{"
        and body[-1:] == b"}"
        and not (b"\\" in body and b"\\u" in body)  # a single byte is found much faster
        and not (b"u" in body and b"null" in body)
        and not (b"-" in body and _WHOLE_MINUS_ZERO.search(body))
    )


def _count_keys(document: Any) -> int:
    """Returns the number of keys of a request: those of the document and of its rows."""
    if not isinstance(document, dict):
        return 0
    rows = document.get("rows")
    return (
        len(document) + sum(len(row) for row in rows if isinstance(row, dict))
        if isinstance(rows, list)
        else 0
    )


def _reject_duplicate_keys(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in members).items():
        if times > 1:
            raise Refusal(422, f"key {key[:60]!r} is there twice in one object; send it once")
    return dict(members)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number; send null for a missing one")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _is_compressed(message: pa.Message) -> bool:
    """Whether a record batch's flatbuffer has the field that Arrow's Python reader does not show."""
    metadata = message.metadata.to_pybytes()
    header = _find_field(metadata, struct.unpack_from("<I", metadata, 0)[0], _HEADER)
    if not header:
        return False
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _find_field(metadata, batch, _COMPRESSION) > 0


def _find_field(message: bytes, table: int, number: int) -> int:
    """Returns the position of a field in a flatbuffer's table. 0: the field is missing."""
    vtable = table - struct.unpack_from("<i", message, table)[0]
    size = struct.unpack_from("<H", message, vtable)[0]
    position = 4 + 2 * number
    offset = struct.unpack_from("<H", message, vtable + position)[0] if position < size else 0
    return table + offset if offset else 0


def _make_array(values: Sequence[Any], kind: str) -> pa.Array:
    try:
        return pa.array(values, ARROW_TYPES[kind])
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        # There are booleans among integers, or integers beyond 64 bits.
        return pa.array([json_cell(value, kind) for value in values], ARROW_TYPES[kind])
