"""Any bytes between good lines: each line is judged by itself, and all at once as one by one."""

import base64
import random

import numpy as np
import pytest

from sluice.etl.apply.lines import has_other_bytes
from tests.etl.jobs import rows_of, run, spark_settings
from tests.etl.tables import batch_of, column, lines_in, put
from tests.etl.test_parse import GOOD, SPEC, parse
from tests.product import InputParser, Parsed, Spec

pytestmark = pytest.mark.slow

LINES = 10_000
MARK = b"\xef\xbb\xbf"
CELLS = (
    b"0~1~1~0~~~7~ 5 ~\t5~+5~-0~0x1F~1e3~1.~.5~nan~inf~1e999~9223372036854775808~"
    b"-9223372036854775808~1_0~5\x00~\x00~\x0b5~\xc2\xa05~text~\xff"
).split(b"~")
CELLS += (
    b'caf\xe9~\xe6\x97\xa5\xe6\x9c\xac~\xed\xa0\x80~\xef\xbb\xbf1~a\rb~\r~"~""~"a"~"a""b"~'
    b'"a"b~a"b~"a,b"~"1"~" 5 "~"a~"a\rb"~a,b~a\tb~\'~\\~#'
).split(b"~")
CELLS += (b"abcdefghijklmnop", b"ogndcpyu2plj89Y6")  # of one hash in compiled functions
USUAL = [b"0", b"1", b"1", b"null", b"5"]
VALUES = [
    *USUAL,
    *(
        b"-5~-0~-0.0~01~+1~1.5~1.0~1e3~1e999~9007199254740993~9223372036854775808~"
        b'-9223372036854775808~NaN~Infinity~Inf~"x"~""~"\xff"~"\\u00e9"~"\\ud83d\\ude00"~'
        b'"\\ud800"~"\\udc00"'
    ).split(b"~"),
    *(b'"\\u0000"~"\x01"~"a\\"b"~"{"~"\\x"~"a\rb"~true~[]~[1]~{}~{"label": 0}~}~]~{~\x00').split(
        b"~"
    ),
    b"1" * 30,
    b"1" * 4500,
    '"日本"'.encode(),
    b"[" * 4 + b"]" * 4,
    b"[" * 99 + b"]" * 99,
    b"[" * 300 + b"]" * 300,
]
NAMES = [b'"label"', b'"I"', b'"F"', b'"C"', b'"more"', b'"lab\\u0065l"', b'"\\ud800"', b"label"]


def any_line(draw: random.Random, form: str) -> bytes:
    """Often nearly good, so that every cell that can be odd is met in a line that is good otherwise."""
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.randrange(12)).replace(b"\n", b"")
    if form == "json":
        pairs = [(b'"label"', b"1")]
        for _ in range(draw.randrange(3)):
            pairs.append(
                (draw.choice(NAMES), draw.choice(VALUES if draw.random() < 0.7 else USUAL))
            )
        line = (
            b"{"
            + draw.choice((b",", b", ", b" ,\t")).join(
                name + b": " + value for name, value in pairs
            )
            + b"}"
        )
        if draw.random() < 0.3:
            line = draw.choice((b" ", b"\xef\xbb\xbf", b"[", line)) + line
            line += draw.choice((b"", b" ", b",", b"\r", line))
    else:
        cells = [b"1", b"5", b"2.5", b"c"]
        for _ in range(draw.randrange(3)):
            cells[draw.randrange(4)] = draw.choice(CELLS)
        if draw.random() < 0.1:
            cells = cells[: draw.randrange(5)] + draw.choices(CELLS, k=draw.randrange(2))
        line = (b"\t" if form == "tsv" else b",").join(cells) + draw.choice(
            (b"", b"", b"\r", b"\r\r", b" ")
        )
    if kind < 0.2 and line:
        place = draw.randrange(len(line))
        line = line[:place] + draw.randbytes(draw.randrange(2)) + line[place + draw.randrange(2) :]
    if draw.random() < 0.1:  # often at the beginning of a line that is good otherwise
        place = draw.choice((0, 0, draw.randrange(len(line) + 1)))
        line = line[:place] + MARK + line[place:]
    return line.replace(b"\n", b"")


def parsed(parser: InputParser, lines: list[bytes]) -> Parsed:
    return parser.parse(batch_of(lines))


def by_line(lines: Parsed, count: int) -> dict[int, str]:
    """What became of each line, whatever -0.0 and NaN are equal to."""
    assert lines.rows + len(lines.rejected) == count
    numbers = np.setdiff1d(np.arange(count), [number for number, _ in lines.rejected]).tolist()
    assert len(numbers) == lines.rows
    for values in lines.columns.values():
        values.validate(full=True)
    rows = zip(*(values.to_pylist() for values in lines.columns.values()), strict=True)
    return {**dict(lines.rejected), **dict(zip(numbers, map(repr, rows), strict=True))}


@pytest.mark.parametrize("form", ["tsv", "csv", "json"])
def test_any_bytes_between_good_lines_leave_them_as_they_are(form):
    draw, parser = random.Random(f"lines of {form}"), InputParser(Spec.parse(SPEC % form))
    lines = [GOOD[form] % n if n % 10 == 0 else any_line(draw, form) for n in range(LINES)]
    whole = by_line(parsed(parser, lines), LINES)
    text = 'go,"od' if form == "csv" else "good"
    assert all(whole[n] == repr((1, n, 0.5, text)) for n in range(0, LINES, 10))
    kept = [n for n in range(LINES) if whole[n].startswith("(")]
    assert LINES * 0.3 < len(kept) < LINES * 0.8  # both are met often
    # A line is what it is among other neighbours, or none.
    for first in (0, 777, 8_000):
        some = by_line(parsed(parser, lines[first : first + 7]), 7)
        assert [some[n] for n in range(7)] == [whole[first + n] for n in range(7)]
    for number in draw.sample(range(LINES), 200):
        assert by_line(parsed(parser, lines[number : number + 1]), 1)[0] == whole[number], lines[
            number
        ]
    assert_order_does_not_matter(draw, parser, lines, whole)


def assert_order_does_not_matter(draw, parser, lines, whole) -> None:
    """A few lines together, in any order, are what they are among all."""
    order = draw.sample(range(len(lines)), len(lines))
    for start in range(0, 3000, 3):
        some = order[start : start + 3]
        got = by_line(parsed(parser, [lines[number] for number in some]), len(some))
        for place, number in enumerate(some):
            assert got[place] == whole[number], [lines[number] for number in some]


@pytest.mark.parametrize("form", ["tsv", "csv"])
def test_compiled_functions_read_each_line_as_the_parser_does(form):
    spec, draw = Spec.parse((SPEC % form).replace("F:float", "F:text")), random.Random(form)
    lines = [GOOD["tsv"] % n if n % 5 == 0 else any_line(draw, form) for n in range(LINES)]
    # Where all lines are UTF-8, those with more than ASCII are regular, too.
    for some in (lines, [line for line in lines if not has_other_bytes(line)]):
        compiled, usual = (InputParser(spec, compiled=which) for which in (True, False))
        whole = by_line(parsed(usual, some), len(some))
        assert by_line(parsed(compiled, some), len(some)) == whole
        assert_order_does_not_matter(draw, compiled, some, whole)
        irregular = compiled._lines._compiled.read(batch_of(some)["line"])[1]
        assert 0.2 < irregular.mean() < 0.9  # both are met often


def test_lines_that_make_up_for_each_other_are_not_counted_as_read():
    """Two objects on one line and none on another, or one over two, are as many as there are lines."""
    good = GOOD["json"] % 7
    for lines in ((good + good, b""), (b'{"label":', b"1}", good + good, good)):
        rows, rejected = parse("json", *lines)
        assert len(rows) == sum(line == good for line in lines)
        assert {reason for _, reason in rejected} == {"not a JSON object"}


@pytest.mark.spark
@pytest.mark.parametrize(
    ("form", "head", "last"),
    [
        ("csv", b"label,I,F,C", b"1,5,2.5,c"),
        ("json", None, b'{"label": 1, "I": 5, "F": 2.5, "C": "c"}'),
    ],
)
def test_spark_hands_over_every_line_as_it_is_and_numbers_those_it_sets_aside(
    spark, tmp_path, form, head, last
):
    """A thousand lines of any bytes in two files of several parts each, through one job; the twin cuts at line feeds.
    A header may stand anywhere, as in files that were put together, and a mark at the head of a file is none of it."""
    text = (SPEC % form).replace(
        "[[column]]",
        ("header = true\n" if head else "") + ("[table]\nsplit = {all = 1.0}\n[[column]]"),
        1,
    ) + column("text", "key", source="C")
    draw, parser = random.Random(15), InputParser(Spec.parse(text))
    want: list[tuple[str, int, str, bytes]] = []
    kept: list[str] = []
    empty = 0
    for name, end in (("a", b""), ("b", b"\n")):
        lines = [
            *(GOOD[form] % n if n % 10 == 0 else any_line(draw, form) for n in range(500)),
            last,
        ]
        if head:
            lines = [head + b"\r", *lines[:100], head, *lines[100:]]
        put(tmp_path / "in" / name, MARK + b"\n".join(lines) + end)
        lines_parsed = parsed(parser, lines)
        want += [
            (name, n + 1, reason, lines[n].rstrip(b"\r"))
            for n, reason in lines_parsed.rejected
            if lines[n].rstrip(b"\r") not in (head, b"")
        ]
        empty += sum(line.rstrip(b"\r") == b"" for line in lines)
        kept += [value or "" for value in lines_parsed.columns["C"].to_pylist()]
    options = {"max_rejects": 0.9, "rejects": str(tmp_path / "aside")}
    with spark_settings(spark, files_maxPartitionBytes="16384"):
        made = run(spark, tmp_path / "t", tmp_path / "in", text=text, **options)
    assert made.rows_in == 1002 - empty
    assert sorted(row["text"] for row in rows_of(tmp_path / "t")) == sorted(kept)
    aside = lines_in(tmp_path / "aside")
    got = [
        (
            row["file"].rsplit("/", 1)[-1],
            row["line"],
            row["reason"],
            base64.b64decode(row["base64"]) if "base64" in row else row["raw"].encode(),
        )
        for row in aside
    ]
    assert sorted(got) == sorted(want)
