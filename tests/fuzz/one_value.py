"""Compares what a drawn value is in an input, a side table, plain files, a request and a key.

A seed draws a declared type, and a form: csv, JSON or Parquet. Each value must be the same cell in all ways, or be
refused in all. Equal values must have equal keys.
"""

from __future__ import annotations

import datetime
import decimal
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.dlrm.serving.decode import Decoder, Refusal
from sluice.etl.apply.parse import InputParser
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.ops.base import key_texts
from sluice.etl.read.input_files import InputFiles
from sluice.etl.read.side_rows import SideRows, open_side_table
from sluice.etl.spec.input_section import ARROW_TYPES
from sluice.etl.spec.row_rules import Join
from sluice.etl.spec.spec import Spec
from sluice.ingest.columns import ColumnError
from sluice.ingest.plain.recipe import typed
from tests.dlrm.serving.stub import decoded
from tests.etl.tables import column, write_rows, write_spec
from tests.fuzz.drawn_specs import FLOATS, INTS, NOT_FINITE, TEXTS

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
    stored, pool = draw.choice(_STORED[kind])
    pool = {"csv": (*_TEXTS, *TEXTS), "json": _MEMBERS}.get(form, pool)
    drawn = [None if draw.random() < 0.1 else draw.choice(pool) for _ in range(draw.randint(1, 40))]
    if form == "csv":
        drawn = [one and "".join(one.splitlines()) for one in drawn]
    values = pa.array(drawn, stored) if form == "parquet" else drawn
    path = _write(folder / f"side.{form}", form, kind, values)
    cells = _cells_of_job(Spec.own(_spec(form, kind)), path)
    found = _differences(path, kind, drawn, cells)
    if kind not in _PLAIN:  # a list is no key
        return found
    side = pa.array([None if cell == REFUSED else cell for cell in cells], ARROW_TYPES[kind])
    rows = [draw.choice([*side.to_pylist(), *_PLAIN[kind], None]) for _ in range(20)]
    asked = pa.array(rows, ARROW_TYPES[kind])
    keys = key_texts([asked]).to_pylist()
    found += [
        f"{one!r} and {other!r} ({kind}) have the keys {key!r} and {other_key!r}"
        for one, key in zip(rows, keys, strict=True)
        for other, other_key in zip(rows, keys, strict=True)
        if (_same(one) == _same(other)) != (key == other_key)
    ]
    return found


def _same(value: Any) -> str:
    return repr(value + 0.0 if isinstance(value, float) else value)


def _spec(form: str, kind: str) -> str:
    """Of an input with the values. In JSON and in requests, numbers may be texts, unless the form is Parquet."""
    inputs = f"click:int k:{kind} place:int"
    head = "" if form == "parquet" else 'decimal = "."\n'
    role = "sparse" if kind in _PLAIN else "id_list"
    return write_spec(inputs, column("k", role, "hash, size = 9"), form=form, head=head)


def _write(path: Path, form: str, kind: str, drawn: Any) -> Path:
    if form == "parquet":
        return write_rows(path, click=[0] * len(drawn), k=drawn, place=range(len(drawn)))
    lines = []
    for place, value in enumerate(drawn):
        if form == "json":
            lines.append(json.dumps({"click": 0, "k": value, "place": place}))
            continue
        is_quoted = value is not None and (kind == "text" or "," in value or '"' in value)
        cell = '"' + value.replace('"', '""') + '"' if is_quoted else value or ""
        lines.append(f"0,{cell},{place}")
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def _cells_of_job(spec: Spec, path: Path) -> list[Any]:
    parser, cells = InputParser(spec), list[Any]()
    for piece in InputFiles(spec.input, (str(path),)).pieces():
        for batch in piece.batches():
            parsed = parser.parse(batch)
            rejected = {row for row, _ in parsed.rejected}
            good = iter(parsed.columns["k"].to_pylist())
            cells += [REFUSED if row in rejected else next(good) for row in range(len(batch))]
    return cells


def _differences(path: Path, kind: str, drawn: list[Any], cells: list[Any]) -> list[str]:
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
        drawn = cells = [cell for cell in fitting if _same(cell) not in ("nan", "inf", "-inf")]
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
