"""Compares what a drawn value is in an input, a side table, plain files, a request and a key.

A seed draws a declared type, and a form: csv, JSON or Parquet. Each value must be the same cell in all ways, or be
refused in all. Equal values must have equal keys.
"""

import datetime
import decimal
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.etl.read.side_rows import SideRows, open_side_table
from sluice.etl.spec.row_rules import Join
from sluice.ingest.plain.recipe import typed
from tests.dlrm.serving.stub import decoded
from tests.etl.tables import column, write_rows, write_spec
from tests.fuzz.drawn_specs import FLOATS, INTS, NOT_FINITE, TEXTS
from tests.product import (
    ARROW_TYPES,
    ColumnError,
    Decoder,
    InputFiles,
    InputParser,
    JobFailure,
    Refusal,
    Spec,
    key_texts,
)

NAME = "one_value"
REFUSED = "refused"
_LONG = (10**10, 10**10 + 7, *INTS)
_DAYS = tuple(datetime.date(2024, 2, day) for day in (1, 2, 29))
_MICROS = (1_700_000_000_000_001, 1_700_000_000_500_000, -1_500_000, 0)
_NUMBERS = "7 007 +7 -1 1.5 1. .5 1e3 1E400 -inf nan 0x1f 1_000 1,5 0 -0 -0.0 0.1 x ٣ true"
_TEXTS = (
    *(*_NUMBERS.split(), "", " ", " 7", "7\t", "\u00a07", "NA", '7"', "1.000,5"),
    *(str(whole) for whole in (*_LONG, 2**63, -(2**63), -(2**63) - 1, 10**400)),
)
_BEYOND = 2**1024 - 2**970
"""The least whole number whose nearest float is infinite."""
_MEMBERS = (
    *(True, False, 7.0, -0.0, 1e308, 2**63, 2**64, -(2**63), 10**400, 2**53 + 1, {}, {"a": 1}),
    *([], [1], [1.5, None], ["a", 7, None], [[1]], ["\ud800"], "\ud800", [True], *_LONG),
    *([whole, None] for whole in (2**53 + 1, 2**64, _BEYOND - 1, _BEYOND, 10**400)),
    *(_BEYOND - 1, _BEYOND),
    *(*FLOATS, *NOT_FINITE * 5),
    *_TEXTS,
    *TEXTS,
)
_STORED: dict[str, tuple[tuple[pa.DataType, tuple[Any, ...]], ...]] = {
    "int": (
        (pa.int64(), _LONG),
        (pa.uint64(), (0, 7, 2**63 - 1, 2**63)),
        (pa.float64(), (*FLOATS, 1e10 + 7)),
        (pa.decimal128(22, 2), tuple(map(decimal.Decimal, (*_LONG, "1.50", "-0.00")))),
        (pa.string(), _TEXTS),
        (pa.timestamp("us"), _MICROS),
        (pa.date32(), _DAYS),
    ),
    "float": (
        (pa.float64(), FLOATS),
        (pa.float32(), (0.0, -0.0, 0.1, 1.5, 1e10)),
        (pa.int64(), _LONG),
        (pa.decimal128(22, 2), tuple(map(decimal.Decimal, (*_LONG, "1.50")))),
        (pa.string(), _TEXTS),
        (pa.timestamp("ns"), tuple(stamp * 1000 for stamp in _MICROS)),
    ),
    "text": (
        (pa.string(), TEXTS),
        (pa.binary(), (b"", b"7", b"\xff", "é".encode())),
        (pa.int64(), _LONG),
    ),
    "texts": ((pa.list_(pa.string()), (["a", None], [])), (pa.list_(pa.int64()), ([7, None],))),
    "floats": ((pa.list_(pa.float32()), ([0.1, None],)), (pa.list_(pa.int64()), ([2**53 + 1],))),
}
_PLAIN: dict[str, tuple[Any, ...]] = {"int": _LONG, "float": FLOATS, "text": TEXTS}


def try_seed(seed: int, folder: Path) -> list[str]:
    """What differs between the ways at this seed."""
    draw = random.Random(seed)
    kind = draw.choice(list(_STORED))
    form = draw.choice(["json", "parquet", "csv"][: 2 + (kind in _PLAIN)])
    values = drawn_values(draw, form, kind, draw.randint(1, 40), 99)
    columns = {"click": [0] * len(values), "k": values, "place": range(len(values))}
    path = write(folder / f"side.{form}", {"k": kind}, columns)
    rows = parsed_rows(Spec.own(_spec(form, kind)), path)
    cells = [REFUSED if row is None else row["k"] for row in rows]
    findings = _differences(path, kind, values, cells)
    if kind not in _PLAIN:  # a list is no key
        return findings
    side = pa.array([None if cell == REFUSED else cell for cell in cells], ARROW_TYPES[kind])
    asked = [draw.choice([*side.to_pylist(), *_PLAIN[kind], None]) for _ in range(20)]
    keys = key_texts([pa.array(asked, ARROW_TYPES[kind])]).to_pylist()
    findings += [
        f"{value!r} and {other!r} ({kind}) have the keys {key!r} and {other_key!r}"
        for value, key in zip(asked, keys, strict=True)
        for other, other_key in zip(asked, keys, strict=True)
        if (same(value) == same(other)) != (key == other_key)
    ]
    return findings


def drawn_values(draw: random.Random, form: str, kind: str, count: int, variety: int) -> Any:
    """Returns values of a column, some of them null. At most `variety` of them differ."""
    stored, pool = draw.choice(_STORED[kind])
    pool = {"csv": (*_TEXTS, *TEXTS), "json": _MEMBERS}.get(form, pool)
    pool = draw.sample(pool, min(variety, len(pool)))
    drawn = [None if draw.random() < 0.1 else draw.choice(pool) for _ in range(count)]
    if form == "csv":
        return [text and "".join(text.splitlines()) for text in drawn]
    return pa.array(drawn, stored) if form == "parquet" else drawn


def same(value: Any) -> str:
    """Returns a text that equal keys have in common."""
    return repr(value + 0.0 if isinstance(value, float) else value)


def _spec(form: str, kind: str) -> str:
    """Of an input with the values. In JSON and in requests, numbers may be texts, unless the form is Parquet."""
    inputs = f"click:int k:{kind} place:int"
    head = "" if form == "parquet" else 'decimal = "."\n'
    role = "sparse" if kind in _PLAIN else "id_list"
    return write_spec(inputs, column("k", role, "hash, size = 9"), form=form, head=head)


def write(path: Path, kinds: Mapping[str, str], columns: Mapping[str, Any]) -> Path:
    """Writes columns, of which some have values of these types."""
    if path.suffix == ".parquet":
        return write_rows(path, **columns)
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    lines = (
        json.dumps(row)
        if path.suffix == ".json"
        else ",".join(_csv_cell(value, kinds.get(name)) for name, value in row.items())
        for row in rows
    )
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def _csv_cell(value: Any, kind: str | None) -> str:
    text = "" if value is None else str(value)
    is_quoted = value is not None and (kind == "text" or "," in text or '"' in text)
    return '"' + text.replace('"', '""') + '"' if is_quoted else text


def parsed_rows(spec: Spec, *paths: Path) -> list[dict[str, Any] | None]:
    """Returns the rows of files as the job's parser has them. A rejected row is None."""
    parser, rows = InputParser(spec), list[dict[str, Any] | None]()
    for piece in InputFiles(spec.input, tuple(map(str, paths))).pieces():
        for batch in piece.batches():
            parsed = parser.parse(batch)
            rejected = {row for row, _ in parsed.rejected}
            good = iter(pa.table(parsed.columns).to_pylist())
            rows += [None if row in rejected else next(good) for row in range(len(batch))]
    return rows


def _differences(path: Path, kind: str, drawn: Any, cells: list[Any]) -> list[str]:
    form = path.suffix[1:]
    fields = ("click", "k", "place") if form == "csv" else ()
    join = Join(path=str(path), format=form, on=("k",), columns={}, fields=fields)
    fitting = [None if cell == REFUSED else cell for cell in cells]
    whole: Any = REFUSED if REFUSED in cells else fitting
    ways = {
        "a side table": (_of_side_table(SideRows(join, {"new": ("k", kind)}, ())), fitting),
        "a strict one": (_of_side_table(SideRows(join, {"new": ("k", kind)}, ("new",))), whole),
    }
    if form == "parquet":
        ways["a loader"] = _loaded(pq.read_table(path)["k"].combine_chunks(), kind), whole
        drawn = cells = [cell for cell in fitting if same(cell) not in ("nan", "inf", "-inf")]
    decoder = Decoder(Spec.own(_spec(form, kind)), "", most_rows=100)
    ways["requests"] = [_asked(decoder, value) for value in drawn], cells
    return [
        f"{way} of {form}, {kind}: {have}, not {want}, of {drawn}"
        for way, (have, want) in ways.items()
        if repr(have) != repr(want)
    ]


def _of_side_table(side: SideRows) -> Any:
    rows, files = open_side_table(side)
    try:
        return [cell for rows in rows.batches(files.pieces()) for cell in rows["new"].to_pylist()]
    except JobFailure:
        return REFUSED


def _loaded(stored: pa.Array, kind: str) -> Any:
    try:
        return typed("k", stored, kind).to_pylist()
    except ColumnError:
        return REFUSED


def _asked(decoder: Decoder, value: Any) -> Any:
    try:
        return decoded(decoder, json.dumps({"rows": [{"k": value}]}).encode())["k"][0].as_py()
    except Refusal:
        return REFUSED
