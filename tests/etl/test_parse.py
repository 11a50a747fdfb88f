"""RawInput lines: what parses, and why the rest does not."""

import json
import math
import random
import re
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.apply import lines as lines_of_text
from tests.dlrm.serving.stub import decoded
from tests.etl.tables import batch_of, column, write_spec
from tests.product import Decoder, InputParser, Parsed, Spec

SPEC = write_spec(
    "label:int I:int F:float C:text", column("C", "sparse", "hash, size = 10"), form="%s", table=""
)


def rows_of(parsed: Parsed) -> list[tuple]:
    return list(zip(*(c.to_pylist() for c in parsed.columns.values()), strict=True))


def parse(form: str, *lines: bytes):
    padding = pa.array([b"x", *(line + b"\n" for line in lines)], pa.binary()).slice(
        1
    )  # a slice begins anywhere
    parsed = InputParser(Spec.parse(SPEC % form)).parse(pa.record_batch([padding], ["line"]))
    assert parsed.rows + len(parsed.rejected) == len(lines)
    assert all(len(column) == parsed.rows for column in parsed.columns.values())
    return rows_of(parsed), sorted(parsed.rejected)


ODD_LINES = Path(__file__).with_name("odd_lines.toml")
TOO_DEEP = "nested more than 100 levels deep"
GOOD = {
    "tsv": b"1\t%d\t0.5\tgood",
    "csv": b'1,%d,0.5,"go,""od"',
    "json": b'{"label": 1, "I": %d, "F": 0.5, "C": "good"}',
}


@pytest.mark.parametrize(
    ("form", "line", "result"),
    [
        *(
            (form, line.encode("latin-1"), tuple(json.loads(row)) if row.startswith("[") else row)
            for form, line, row in tomllib.loads(ODD_LINES.read_text("utf-8"))["lines"]
        ),
        ("tsv", b"1\t1\t1\t" + b"c" * (2**20 + 1), "C: a text of more than 1,048,576 bytes"),
        ("json", b'{"label":1,"F":1' + b"0" * 400 + b"}", "F: not a number of 64 bits"),
        ("json", b'{"label":1,"more":%b}' % (b"[" * 100 + b"]" * 100), TOO_DEEP),
        ("json", b'{"label":1,"more":%b}' % (b"[" * 99 + b"]" * 99), (1, None, None, None)),
        ("json", b'{"label":1,"C":' + b"[" * 100_000, TOO_DEEP),
    ],
)
def test_an_odd_line_is_the_same_alone_and_beside_others(form, line, result):
    good, bad = GOOD[form] % 7, b"{"
    assert parse(form) == ([], [])
    for beside in ([], [good], [good, bad]):
        for lines in ([line, *beside], [*beside, line]):
            rows, rejected = parse(form, *lines)
            number = lines.index(line)
            if isinstance(result, str):
                assert (number, result) in rejected
                assert len(rows) == len(lines) - 1 - (bad in lines)
            else:
                assert result in rows
                assert len(rejected) == (bad in lines)


def test_flags_and_parts_of_objects_in_json():
    """A log of true and false is read at once, not line by line, and so are parts of objects."""
    text = (
        (SPEC % "json")
        .replace('"C:text"', '"a.b.C:text", "a.n:int"')
        .replace('"C"', '"C"\nfrom = "a.b.C"')
    )
    parser = InputParser(Spec.parse(text))
    lines = [
        b'{"label": true, "I": false, "a": {"b": {"C": "x", "more": 1}, "n": 7}}',
        b'{"label": false, "F": 2, "a": {"b": null}}',
        b'{"label": null, "a": {}}',
        b'{"label": false}',
    ]

    def parsed(*lines: bytes):
        rows = parser.parse(batch_of(lines))
        return rows_of(rows), rows.rejected

    parser._lines._format.read_alone = None  # which nobody may call here
    rows, rejected = parsed(*lines)
    assert rows == [(1, 0, None, "x", 7), (0, None, 2.0, None, None), (0, None, None, None, None)]
    assert rejected == [(2, "label: missing")]
    # They are numbers again.
    assert parsed(b'{"label": 1, "a": {"n": true}}')[0] == [(1, None, None, None, 1)]
    del parser._lines._format.read_alone
    odd = [
        b'{"label": true, "a": {"b": {"C": "inner"}}, "a.b.C": "named so"}',
        b'{"label": 1, "I": false, "a": "text"}',
        b'{"label": 1, "a": {"b": {"C": [true]}}}',
    ]
    rows, rejected = parsed(*odd)
    assert rows == [(1, None, None, "named so", None), (1, 0, None, None, None)]
    assert rejected == [(2, "a.b.C: not UTF-8 text in quotes")]
    assert [parsed(line)[0] for line in odd[:2]] == [[row] for row in rows]


def test_a_name_in_json_is_the_same_however_it_is_escaped():
    draw, names = random.Random(31), ["a", "C", "é", "n", "a.C", "é.n"]
    text = (SPEC % "json").replace('"C:text"', '"C:text", "a.C:text", "é.n:int"')
    parser = InputParser(Spec.parse(text + column("é.n", "sparse", "hash, size = 9")))
    decoder = Decoder(parser._spec, "", most_rows=1)

    def drawn(depth: int) -> object:
        if not depth or draw.random() < 0.4:
            return draw.choice([7, None, '"a.C": 1'])
        return {name: drawn(depth - 1) for name in draw.sample(names, 2)}

    def escaped(row: object) -> bytes:
        def of_name(name: re.Match[str]) -> str:
            return "".join(f"\\u{ord(c):04x}" if draw.random() < 0.2 else c for c in name[0])

        line = json.dumps(row, ensure_ascii=False)
        return re.sub(r'(?<=")[aCén.]+(?=":)', of_name, line).encode()

    for _ in range(200):
        row = {"label": 1} | {name: drawn(2) for name in draw.sample(names, 2)}
        usual = json.dumps(row, ensure_ascii=False).encode()
        assert parser.parse(batch_of([escaped(row)])) == parser.parse(batch_of([usual]))
        assert decoded(decoder, escaped({"rows": [{"é.n": 5}]}))["é.n"].to_pylist() == [5]


AMOUNTS = {
    ('decimal = ","\nthousands = "."', "1.234,50"): 1234.5,
    ('decimal = ","\nthousands = "."', " -1.234.567 "): -1234567.0,
    ('decimal = ","\nthousands = "."', "3,99"): 3.99,
    ('decimal = ","\nthousands = "."', "1.5"): None,
    ('decimal = ","\nthousands = "."', "0.123"): None,
    ('decimal = ","', "3,99"): 3.99,
    ('decimal = ","', "1.5"): None,
    ('thousands = ","', "1,234.50"): 1234.5,
    ('thousands = ","', "12,34.50"): None,
    ('thousands = ","', "1234.50"): 1234.5,
    ('thousands = " "', "1 234"): 1234.0,
    ('thousands = "\u202f"\ndecimal = ","', "1\u202f234,5"): 1234.5,
    ('decimal = "."', "3.99"): 3.99,
    ('null_values = ["N/A", "-", ""]', "N/A"): "missing",
    ('null_values = ["N/A", "-", ""]', " - "): "missing",
    ('null_values = ["N/A", "-", ""]', ""): "missing",
    ('null_values = ["N/A", "-", ""]', "--"): None,
    ('null_values = ["N/A"]\nthousands = ","', "1e3"): 1000.0,
    ('null_values = ["N/A"]\nthousands = ","', "inf"): math.inf,
    ('null_values = ["N/A"]\nthousands = ","', "1e400"): None,
}
"""The keys of an input and a text, with the number that it is. None: it is rejected."""


@pytest.mark.parametrize(("keys", "cell"), AMOUNTS)
@pytest.mark.parametrize("form", ["csv", "tsv", "json"])
def test_amounts_and_texts_for_missing_numbers(form, keys, cell):
    """All formats read a text as the same number, in lines that Arrow reads together and in those read alone. A text
    column keeps its texts."""
    want = AMOUNTS[keys, cell]
    spec = Spec.parse((SPEC % form).replace("columns", f"{keys}\ncolumns", 1))
    line = {
        "csv": f'1,2,"{cell}",-',
        "tsv": f"1\t2\t{cell}\t-",
        "json": json.dumps({"label": 1, "I": 2, "F": cell, "C": "-"}),
    }[form].encode()
    alone = {
        "csv": b'1,,"5"x,',
        "tsv": b"1\t\t\t\r-",
        "json": b'{"label": 1, "C": "\\ud83d\\ude00", "F": 2}',
    }
    for lines in ([line], [line, alone[form]], [line] * 3):
        rows = InputParser(spec).parse(batch_of(lines))
        if want is None:
            there = [row for row, other in enumerate(lines) if other == line]
            assert {row for row, _ in rows.rejected} >= set(there)
            assert dict(rows.rejected)[0] == "F: not a number of 64 bits"
        else:
            assert rows.columns["F"][0].as_py() == (None if want == "missing" else want)
            assert rows.columns["C"][0].as_py() == "-"


def test_texts_for_missing_whole_numbers_and_times():
    text = (SPEC % "csv").replace(
        "columns", 'thousands = "."\ndecimal = ","\nnull_values = "-"\ncolumns', 1
    )
    text = text.replace('"F:float"', '{name = "F:float", format = "%d.%m.%Y"}')
    rows = InputParser(Spec.parse(text)).parse(
        batch_of([b"1,1.234,-,x", b"0,-,01.01.1970,-", b"-,1,-,x", b'1,"1,5",-,x'])
    )
    assert rows_of(rows) == [(1, 1234, None, "x"), (0, None, 0.0, "-")]
    assert sorted(rows.rejected) == [
        (2, "label: missing"),
        (3, "I: not a whole number of 64 bits"),
    ]


def test_lines_of_another_encoding_and_times_in_several_formats():
    time = '{name = "F:float", format = ["%d.%m.%Y", "%H:%M %d/%m/%Y"], zone = "Europe/Berlin"}'
    text = SPEC.replace('"%s"', '"csv"\nencoding = "cp1252"\nplace = "P"').replace(
        '"F:float"', time
    )
    lines = [
        "1,2,03.01.2024,Müller€",
        '0,,10:00 03/07/2024,"é, è"',
        "1,2,,ü",
        "1,2,31.02.2024,ü",
        "0,2,2024-01-03,",
        "1,x,,ü",
    ]
    lines = [*(line.encode("cp1252") for line in lines), b"1,2,,\xc3\x81"]  # text in UTF-8 alone
    parsed = InputParser(Spec.parse(text)).parse(batch_of(lines), np.arange(7.0))
    assert rows_of(parsed) == [
        (1, 2, 1704236400.0, "Müller€", 0.0),
        (0, None, 1719993600.0, "é, è", 1.0),
        (1, 2, None, "ü", 2.0),
    ]
    assert sorted(parsed.rejected) == [
        (3, "F: not a time as its format says"),
        (4, "F: not a time as its format says"),
        (5, "I: not a whole number of 64 bits"),
        (6, "C: not CP1252 text"),
    ]


def test_a_row_without_the_time_that_splits_rows_is_set_aside():
    by_time = 'split_time = "F"\nsplit = {train = 0, test = 5}'
    text = write_spec("label:int F:float", column("F", "dense", "fill"), form="csv", table=by_time)
    rows = InputParser(Spec.parse(text)).parse(batch_of([b"1,2", b"0,", b"1,nan"]))
    assert rows.columns["F"].to_pylist() == [2.0]
    assert [(number, reason[:11]) for number, reason in rows.rejected] == [
        (1, "F: missing,"),
        (2, "F: missing,"),
    ]


@pytest.mark.parametrize("block", [1, 1 << 19])
def test_lines_may_end_before_optional_columns_in_any_mixture(block, monkeypatch):
    """And whatever number of lines Arrow works on together; those that are wrong keep their numbers."""
    monkeypatch.setattr(lines_of_text, "_BLOCK", block)
    spec = Spec.parse(
        write_spec(
            "click:int a:text b:int c:text",
            column("b", "dense", "fill"),
            form="csv",
            head='optional = ["c", "b"]\n',
            table="",
        )
    )
    lines = [
        b"1,x,5,y",
        b"0,x",
        b"1",
        b"1,x,6",
        b'0,"a,b"',
        b'1,"odd"s,7',
        b"0,x,z",
        b"1,x,1,y,",
        b"0,q",
    ]
    parsed = InputParser(spec).parse(batch_of(lines))
    assert sorted(parsed.rejected) == [
        (2, "wrong number of fields"),
        (6, "b: not a whole number of 64 bits"),
        (7, "wrong number of fields"),
    ]
    assert [parsed.columns[name].to_pylist() for name in ("a", "b", "c")] == [
        ["x", "x", "x", "a,b", "odds", "q"],
        [5, None, 6, None, 7, None],
        ["y", None, None, None, None, None],
    ]
