"""Compares what a drawn value is as a column, in a history, as the key of a join, and in a request.

A seed draws a declared type, and values that a file holds in another one. The conversions of Arrow and of requests must
give equal keys and texts for equal values. One seed in SPARK_EVERY runs a job whose side table has these values, and
compares it with the server and with the conversion of Arrow.
"""

from __future__ import annotations

import datetime
import decimal
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.dlrm.serving.decode import Decoder
from sluice.etl.apply.cells import TextCells
from sluice.etl.apply.features import Features
from sluice.etl.apply.lookups import Serving
from sluice.etl.ops.base import key_texts
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.input_values import ARROW_TYPES, converted
from sluice.etl.spec.spec import Spec
from tests.dlrm.serving.stub import decoded
from tests.etl.jobs import build_table, rows_of, session
from tests.etl.tables import column, section, write_rows, write_spec
from tests.fuzz.drawn_specs import FLOATS, INTS, TEXTS

NAME = "one_value"
SPARK_EVERY = 64
_LONG = (10**10, 10**10 + 7, *INTS)
_DAYS = tuple(datetime.date(2024, 2, day) for day in (1, 2, 29))
_MICROS = (1_700_000_000_000_001, 1_700_000_000_500_000, -1_500_000, 0)
_STORED: dict[str, tuple[tuple[pa.DataType, tuple[Any, ...]], ...]] = {
    "int": (
        (pa.int64(), _LONG),
        (pa.float64(), (*FLOATS, 1e10 + 7)),
        (pa.decimal128(22, 2), tuple(map(decimal.Decimal, (*_LONG, "1.50", "-0.00")))),
        (pa.string(), ("7", "007", " 7", "-1", "1.5", "x", *map(str, _LONG))),
        (pa.timestamp("us"), _MICROS),
        (pa.timestamp("us", "Europe/Berlin"), _MICROS),
        (pa.date32(), _DAYS),
    ),
    "float": (
        (pa.float64(), FLOATS),
        (pa.float32(), (0.0, -0.0, 0.1, 1.5, 1e10)),
        (pa.int64(), _LONG),
        (pa.decimal128(22, 2), tuple(map(decimal.Decimal, (*_LONG, "1.50")))),
        (pa.string(), ("0", "-0", "-0.0", "1.5", "1e10", " 1.50", "x", "0.1")),
        (pa.timestamp("ns"), tuple(stamp * 1000 for stamp in _MICROS)),
        (pa.date32(), _DAYS),
    ),
    "text": (
        (pa.string(), TEXTS),
        (pa.int64(), _LONG),
        (pa.date32(), _DAYS),
    ),
}


def typed(stored: pa.Array, kind: str) -> pa.Array:
    """The values of a file in a declared type; null where they do not fit."""
    if pa.types.is_string(stored.type) and kind != "text":
        return TextCells(Input(format="json", columns={})).convert(stored, kind)[0]
    return converted(stored, kind)[0]


def try_seed(seed: int, folder: Path) -> list[str]:
    """What differs between the ways at this seed."""
    draw = random.Random(seed)
    kind = draw.choice(list(_STORED))
    form, pool = draw.choice(_STORED[kind])
    drawn = [None if draw.random() < 0.1 else draw.choice(pool) for _ in range(draw.randint(1, 40))]
    stored = pa.array(drawn, form)
    side = typed(stored, kind)
    known = [value for value in side.to_pylist() if value is not None]
    others = [value for _, pool in _STORED[kind][:1] for value in pool]
    rows = [draw.choice([*known, *others, None]) for _ in range(20)]
    asked = pa.array(rows, ARROW_TYPES[kind])
    keys = key_texts([asked]).to_pylist()
    found = [
        f"{one!r} and {other!r} ({kind}) have the keys {key!r} and {other_key!r}"
        for one, key in zip(rows, keys, strict=True)
        for other, other_key in zip(rows, keys, strict=True)
        if (one == other) != (key == other_key)
    ]
    text = _spec(folder, kind)
    spec = Spec.own(text)
    body = json.dumps({"rows": [{"k": value} for value in rows]}).encode()
    array = decoded(Decoder(spec, "", most_rows=100), body)["k"]
    if _bits(array) != _bits(asked):
        found.append(f"a request has {array}, not {asked}")
    if seed % SPARK_EVERY == 0:
        found += _job(folder, text, stored, side, asked)
    return found


def _spec(folder: Path, kind: str) -> str:
    return write_spec(
        f"click:int row:int at:int k:{kind}",
        section(
            "join", path=f"{folder}/side.parquet", on="k", their_on="theirs", columns=["place:int"]
        ),
        section("history", name="past", of="k", by="row", order="at", length=2),
        column("row", "time"),
        column("at", "time"),
        column("place", "dense", "fill, value = -1"),
        column("k", "sparse", 'categorify, joint = "k"'),
        column("past", "id_list", 'categorify, joint = "k"'),
    )


def _bits(values: pa.Array) -> list[str]:
    return [repr(value) for value in values.to_pylist()]


def _job(folder: Path, text: str, stored: pa.Array, side: pa.Array, asked: pa.Array) -> list[str]:
    """Each row comes twice, so that the second one has the value in its history."""
    count = len(asked)
    write_rows(folder / "side.parquet", theirs=stored, place=range(len(stored)))
    twice = pa.array(np.repeat(np.arange(count), 2))
    write_rows(
        folder / "rows.parquet",
        click=[0, 1] * count,
        row=twice,
        at=[1, 2] * count,
        k=asked.take(twice),
    )
    places: dict[str, int] = {}
    for place, key in enumerate(key_texts([side]).to_pylist()):
        if key is not None:
            places[key] = max(place, places.get(key, 0))
    want = [places.get(key, -1) for key in key_texts([asked]).to_pylist()]
    table = build_table(session(), folder / "t", folder / "rows.parquet", text=text)
    later = sorted((row for row in rows_of(table) if row["at"] == 2), key=lambda row: row["row"])
    complete = Serving.open(table).complete(
        {"k": asked, "row": pa.array(range(count)), "at": asked}
    )
    served = Features(table.spec(), table.state()).inputs(complete)
    made = {
        "the job's join": [int(row["place"]) for row in later],
        "the server's join": served["place"].cast(pa.int64()).to_pylist(),
    }
    found = [f"{way}: {have}, not {want}" for way, have in made.items() if have != want]
    ids = [row["k"] for row in later]
    bags = [np.frombuffer(row["past"], "<u4").tolist() for row in later]
    own = [
        [one] if value else []
        for one, value in zip(ids, pc.is_valid(asked).to_pylist(), strict=True)
    ]
    found += [f"the job's history: {bags}, not {own}"] if bags != own else []
    lasts = [bag[-1:] for bag in served["past"].to_pylist()]
    found += [f"the server's history: {lasts}, not {own}"] if lasts != own else []
    found += (
        [f"the server's ids: {served['k']}, not {ids}"] if served["k"].to_pylist() != ids else []
    )
    return found
