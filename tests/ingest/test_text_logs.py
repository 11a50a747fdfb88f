"""Logs as lines of text: `sluice guess` writes a spec by which a job reads them."""

import bz2
import datetime
import gzip
import json

import pytest

from sluice.etl.read import log_sample
from tests.etl.jobs import rows_of, run
from tests.product import Spec, UsageError, guessed_spec
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

ROWS = 300
FIRST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def plays(part: int) -> list[dict]:
    """Rows, each with its own `length`."""
    return [
        {
            "at": FIRST + datetime.timedelta(minutes=60 * part + n / 7, microseconds=n % 3),
            "artist": f"Künstler {n % 9}",
            "length": part * ROWS + n + 0.5,
            "premium": n % 2 == 0,
            "price": None if n % 11 == 0 else n / 4,
            "liked": None if n % 13 == 0 else n * 48_271 % 65_537 % 3 == 0,
            "track": n * 10**12,
            "device": {"os": ["ios", "web"][n % 2]} if n % 5 else None,
            "genres": ["pop", "fado"][: n % 3],
            "ids": [n],
            "scores": [n / 2],
            "seen": None,
            "grade": "none" if part and n == 7 else n % 10,
        }
        for n in range(ROWS)
    ]


def as_fields(row: dict, sign: str) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}".replace(".", "," if sign == ";" else ".")

    at = row["at"].strftime("%d.%m.%Y %H:%M:%S" if row["track"] % 2 else "%Y-%m-%d %H:%M")
    artist = f'"{row["artist"]}"' if sign == "," else row["artist"]
    liked = "" if row["liked"] is None else str(int(row["liked"]))
    numbers = (number(row["length"]), number(row["price"]), str(row["track"]))
    return sign.join([at, artist, *numbers, liked])


def job(folder, text: str, inputs: str, told_by: str = "") -> tuple[dict, list[dict]]:
    """The rows, which a column of a guess tells, as it is."""
    if told_by:
        text += f'[[column]]\nname = "row"\nfrom = "{told_by}"\nrole = "dense"\nops = [{{op = "fill"}}]\n'
    result = run(None, folder / "table", inputs, text=text)
    return result.rejected, rows_of(folder / "table")


@pytest.mark.parametrize(
    ("sign", "encoding", "header", "pack"),
    [
        (";", "cp1252", True, None),
        ("\t", "utf-8", False, gzip.compress),
        (",", "utf-8-sig", True, bz2.compress),
        ("|", "latin-1", False, None),
    ],
)
def test_lines_of_fields(tmp_path, sign, encoding, header, pack):
    names = ["at", "artist", "length", "price", "track", "liked"]
    folder = tmp_path / "logs"
    folder.mkdir()
    ending = {gzip.compress: ".txt.gz", bz2.compress: ".txt.bz2"}.get(pack, ".txt")
    for part in range(2):
        lines = [sign.join(names)] * header + [as_fields(row, sign) for row in plays(part)]
        content = "\r\n".join([*lines, ""]).encode(encoding)
        (folder / f"{part}{ending}").write_bytes(pack(content) if pack else content)
    (folder / "_SUCCESS").write_bytes(b"")
    seen = names if header else [f"column_{n + 1}" for n in range(6)]
    text = guessed_spec(str(folder), seen[5])
    spec = Spec.own(text)
    known = {"utf-8-sig": "utf-8", "latin-1": "cp1252"}.get(encoding, encoding)
    assert (spec.input.encoding, spec.input.decimal) == (known, "," if sign == ";" else ".")
    types = ["float", "text", "float", "float", "int", "int"]
    assert spec.input.columns == dict(zip(seen, types, strict=True))
    assert (spec.table.split_time, spec.table.unlabelled) == (seen[0], "ask")
    assert_names(text, "zone", "UTC")
    rejected, rows = job(tmp_path, text, str(folder), seen[2])
    assert rejected == {}
    assert sorted(row["row"] for row in rows) == [n + 0.5 for n in range(2 * ROWS)]
    artists = {row[seen[1]] for row in rows}
    assert len(artists) == 9


def test_objects_of_json(tmp_path):
    for part in range(2):
        lines = [
            json.dumps(row | {"at": row["at"].isoformat()}, ensure_ascii=part == 0)
            for row in plays(part)
        ]
        lines = [*lines[:-1], lines[-1][:40]] if part else lines
        (tmp_path / f"{part}.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    text = guessed_spec(str(tmp_path / "*.json.gz"), "liked")
    assert "zone" not in text, "its times name theirs"
    assert_names(text, "#   seen:", "#   scores: list<item: double>")
    rejected, rows = job(tmp_path, text, str(tmp_path / "*.json.gz"), "length")
    assert sum(rejected.values()) == 2  # the line that was cut off, and the grade that is a text
    assert len(rows) == 2 * ROWS - 2
    for row in rows:
        number = int(row["row"]) % ROWS
        assert row["premium"] == (number % 2 == 0)
        assert len(row["ids"]) > 0, "a bag of one id"
        assert (row["device_os"] == 1) is (number % 5 == 0), "null where there is no device"
        assert row["at_hour"] == 2 + int(row["row"] / ROWS + number / 7 // 60)


@pytest.mark.parametrize(
    "odd",
    [
        {"user:id": 7},
        {"deep": 7},
        {"half": "\ud800"},
        {"in": {"none": {}, "id": 7}},
        {"end": "9999-12-31 23:59:59"},
    ],
)
def test_odd_names_and_values_become_a_spec_that_a_job_takes(tmp_path, odd):
    lines = [
        json.dumps(
            {"clicked": n % 2, "price": n / 2, "at": f"1969-12-{n % 31 + 1:02d} 00:00:00", **odd}
        )
        for n in range(ROWS)
    ]
    if "deep" in odd:
        lines[7] = lines[7].replace("7", "[" * 100_000 + "]" * 100_000)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    text = guessed_spec(str(tmp_path / "a.jsonl"))
    rejected, rows = job(tmp_path, text, str(tmp_path / "a.jsonl"))
    assert len(rows) + sum(rejected.values()) == ROWS
    assert len(rows) >= ROWS - 1
    spec = Spec.own(text)
    assert spec.table.split_time == "at"
    assert spec.table.split_from[0] < spec.table.split_from[1] < 0
    assert {"user:id", "in.id", "end"} & odd.keys() <= spec.input.columns.keys()


def test_of_a_long_log_the_end_is_looked_at_too(tmp_path, monkeypatch):
    """Else a bound of time in its first lines would make nearly all of it a test. Of a compressed log that is longer
    than what is read, the end is not known, and no time splits it."""
    lines = [
        f"{FIRST + datetime.timedelta(hours=n):%Y-%m-%d %H:%M:%S},u{n % 7},{n % 2}\n"
        for n in range(3000)
    ]
    content = "".join(["at,user,clicked\n", *lines]).encode()
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(log_sample, "_BYTES", 4000)
    for name in ("a.csv", "b.csv.gz"):
        spec = Spec.own(guessed_spec(str(tmp_path / name)))
        share = (spec.table.split_from[1] - FIRST.timestamp()) / 3600 / 3000
        assert share == pytest.approx(0.8, abs=0.01)
    sample = log_sample.LogSample.of(log_sample.text_files([str(tmp_path / "a.csv")]))
    assert sample.rows == pytest.approx(3000, rel=0.05)
    monkeypatch.setattr(log_sample, "_PIECES", 1)
    assert Spec.own(guessed_spec(str(tmp_path / "b.csv.gz"))).table.split_by == ("user",)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("a;b\n1;2\n".encode("utf-16"), "UTF-16"),
        (b"[1, 2,\n3]\n", "2 of 2 lines"),
        (b'a,b,c\n1,2,3\n"x,1,"y\n', 'format = "tsv"'),
        (b"a,b\n", "header"),
        (b"\n\n", "no lines"),
        (b"x" * 200_000 + b"\n", "Parquet"),
    ],
)
def test_what_is_no_log_is_refused_by_name(tmp_path, content, fact):
    (tmp_path / "a.csv").write_bytes(content)
    with raises(UsageError, "a.csv", fact):
        guessed_spec(str(tmp_path))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n" * 99)[:-20])
    with raises(UsageError, "b.csv.gz", "damaged"):
        guessed_spec(str(tmp_path / "b.csv.gz"))


AMOUNTS = [
    (";", ["1.234,50", "3,99"], 'decimal = ","\nthousands = "."', 1234.5),
    (",", ["1,234.50", "3.99"], 'thousands = ","', 1234.5),
    (",", ["1234,50", "3,99"], 'decimal = ","', 1234.5),
    (";", ["1.234", "3.999"], "", 1.234),
]


@pytest.mark.parametrize(("sign", "prices", "keys", "number"), AMOUNTS)
def test_amounts_and_texts_for_missing_numbers(tmp_path, sign, prices, keys, number):
    """A guess writes the marks that only one reading explains, and names a column with two readings."""
    path = tmp_path / "log.csv"
    rows = [("number", "price", "age", "liked")] + [
        (str(n), f'"{prices[n % 2]}"', "N/A" if n % 3 else str(n % 50), str(n * 5 % 7 % 2))
        for n in range(1, 601)
    ]
    path.write_text("".join(sign.join(row) + "\n" for row in rows))
    text = guessed_spec(str(path), "liked")
    spec = Spec.own(text)
    assert (spec.input.columns["price"], spec.input.null_values) == ("float", ("N/A",))
    assert keys in text
    assert ("# price: its mark may be" in text) == (not keys)
    assert ("thousands = " in text) == ("thousands" in keys)
    text = text.replace('name = "price"', 'name = "other"\nfrom = "price"')
    rejected, rows = job(tmp_path, text, str(path), "price")
    assert rejected == {}
    assert max(row["row"] for row in rows) == pytest.approx(max(number, 3.999 if not keys else 0))


def test_a_broken_cell_hides_neither_the_marks_of_its_column_nor_its_texts_for_missing_numbers(
    tmp_path,
):
    cells = ["N/A" if n % 9 == 0 else f"{n}.{100 + n},50" for n in range(600)]
    lines = [f"{cell};{n * 5 % 7 % 2}" for n, cell in enumerate(["oops", *cells[1:]])]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["price;liked", '"7;1', *lines]))
    text = guessed_spec(str(path), "liked")
    source = Spec.own(text).input
    assert (source.columns["price"], source.decimal, source.thousands) == ("float", ",", ".")
    assert source.null_values == ("N/A",)
    assert_names(text, 'Not a number: 1 of 600 sampled values, such as "oops"')
