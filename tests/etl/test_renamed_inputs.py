"""A log changes: a column gets another name, a number becomes a text, and CSV follows JSON."""

import json
import random

import pyarrow as pa
import pytest

from sluice import Loader, Order, Reading
from sluice.ingest.plain.roles import ParquetError
from tests.dlrm.serving.stub import decoded
from tests.etl.jobs import build_table, job_of, rows_of, run, words_of
from tests.etl.tables import batch_of, column, put, write_rows, write_spec
from tests.fuzz.one_value import parsed_rows
from tests.product import (
    ColumnError,
    Decoder,
    InputError,
    InputParser,
    ParquetFiles,
    Refusal,
    Spec,
    SpecError,
    StateError,
)
from tests.raises import MISTAKES, raises

SPEC = """
[input]
format = "json"
columns = ["click:int", {name = "uid:text", also = ["user.id", "user_id"]}, "price:float", "all:texts"]
[[column]]
name = "click"
role = "label"
[[column]]
name = "uid"
role = "sparse"
ops = [{op = "hash", size = 99}]
[[column]]
name = "name"
from = "uid"
role = "key"
[[column]]
name = "price"
role = "dense"
ops = [{op = "fill"}]
[[column]]
name = "all"
role = "id_list"
ops = [{op = "hash", size = 9}]
"""
LEARNED = """
[input]
format = "json"
columns = ["click:int", "uid:text", "item:text", "at:int"]
[table]
key = ["at"]
split_time = "at"
split = {train = 0, test = 90}
[negatives]
column = "uid"
[[column]]
name = "click"
role = "label"
[[column]]
name = "who"
from = "uid"
role = "sparse"
ops = [{op = "categorify"}]
[[column]]
name = "clicks"
from = "uid"
role = "dense"
ops = [{op = "target"}]
[[column]]
name = "kept"
from = "uid"
role = "key"
"""
RENAMED = LEARNED.replace('"uid', '"user_id').replace(
    '"user_id:text"', '{name = "user_id:text", was = "uid"}'
)
WRITTEN = (
    "7 -7 0 -0 007x 1.0 1.50 -0.0 1e5 1E+5 0.1 true false 1e400 NaN "
    f"9223372036854775807 9223372036854775808 {10**400} {'9' * 5000}"
).split()


@pytest.mark.parametrize("seed", range(6))
def test_drawn_numbers_and_booleans_of_json_are_the_text_that_they_are_written_as(seed):
    draw = random.Random(seed)
    pool = draw.sample(WRITTEN, draw.randint(1, 6))
    texts = draw.choices(pool, k=draw.randint(1, 30))
    tokens = [json.dumps(text) if text == "007x" or draw.random() < 0.2 else text for text in texts]
    rows = [f'{{"uid": {token}, "all": [null, {token}]}}' for token in tokens]
    want = [{"uid": text, "all": [None, text]} for text in texts]
    lines = [row.replace("{", '{"click": 0, ').encode() for row in rows]
    parsed = InputParser(Spec.own(SPEC)).parse(batch_of(lines))
    body = f'{{"rows": [{", ".join(rows)}]}}'.encode()
    for columns in (parsed.columns, decoded(Decoder(Spec.own(SPEC), "", most_rows=99), body)):
        assert pa.table(columns).select(["uid", "all"]).to_pylist() == want


def test_a_number_of_json_is_no_time_as_its_format_says():
    """A server takes a number for seconds since 1970, so a job must not take it for a text."""
    text = SPEC.replace('"price:float"', '{name = "price:float", format = "%Y%m%d"}')
    lines = [b'{"click": 0, "price": 20260501}', b'{"click": 0, "price": "20260501"}']
    for chosen, rejected in ((lines, [0]), (lines[:1], [0]), (lines[1:], [])):
        parsed = InputParser(Spec.own(text)).parse(batch_of(chosen))
        assert [row for row, _ in parsed.rejected] == rejected


def test_a_column_of_json_is_read_by_any_of_its_names(tmp_path):
    """The first name that has a value counts. `user.id` is a part of an object."""
    lines = """{"click": 0, "uid": "a", "user_id": "x"}
{"click": 0, "user": {"id": "b"}, "user_id": "x"}
{"click": 0, "user_id": "c"}
{"click": 0, "uid": null, "user_id": "d", "user": null}
{"click": 0, "user_id": 7}
{"click": 0, "price": 1.5}
""".splitlines(keepends=True)
    want = ["a", "b", "c", "d", "7", None]
    path, spec = tmp_path / "lines.json", Spec.own(SPEC)
    for places in (range(6), range(4), *([place] for place in range(6))):
        put(path, "".join(lines[place] for place in places))
        assert [row["uid"] for row in parsed_rows(spec, path)] == [want[place] for place in places]
    decoder = Decoder(spec, "", most_rows=99)
    body = b'{"rows": [{"user_id": "c"}, {"user_id": 7}, {"user.id": "e", "uid": null}]}'
    assert decoded(decoder, body)["uid"].to_pylist() == ["c", "7", "e"]
    with raises(Refusal, "'uuid'"):
        decoded(decoder, b'{"rows": [{"uuid": "a"}]}')


def test_a_column_of_csv_and_parquet_is_read_by_any_of_its_names(tmp_path):
    csv_text = SPEC.replace('"json"', '"csv"\nheader = true').partition('[[column]]\nname = "all"')[
        0
    ]
    csv_text = csv_text.replace(', "all:texts"', "")
    for name in ("uid", "user_id", "user.id"):
        # A header is a header wherever it stands.
        text = f'click,{name},price\n0,{name},1\nclick,uid,price\n0,"",\n'
        put(tmp_path / f"{name}.csv", text)
        values = pa.array([name, None])
        if name == "user.id":
            values = pa.StructArray.from_arrays([values], ["id"])
        rows = {"click": [0, 0], name.partition(".")[0]: values, "price": [1.0, None]}
        write_rows(tmp_path / f"{name}.parquet", pa.table(rows))
    table = build_table(None, tmp_path / "csv", tmp_path / "*.csv", text=csv_text)
    assert sorted(row["name"] for row in rows_of(table)) == [
        "",
        "",
        "",
        "uid",
        "user.id",
        "user_id",
    ]
    text = csv_text.replace('"csv"\nheader = true', '"parquet"')
    table = build_table(None, tmp_path / "stored", tmp_path / "*.parquet", text=text)
    assert {row["name"] for row in rows_of(table)} == {"", "uid", "user.id", "user_id"}
    # A value that is no text matters only where it would be taken.
    both = write_rows(
        tmp_path / "both",
        click=[0, 0, 0],
        user_id=[b"\xff", b"z", b"\xff"],
        uid=["y", None, None],
        price=[1.0, 1.0, 1.0],
    )
    stored = Spec.own(text)
    assert [row and row["uid"] for row in parsed_rows(stored, both)] == ["y", "z", None]
    wrong = put(tmp_path / "wrong", "click,uuid,price\n0,a,1\n")
    with raises(InputError, "'uuid'", "'uid'"):
        run(None, tmp_path / "w", wrong, text=csv_text)
    lacking = write_rows(tmp_path / "lacking", click=[0], price=[1.0])
    with raises(InputError, "'uid'", "lacking"):
        run(None, tmp_path / "w", lacking, both, text=text)
    with raises(ColumnError, "also", "structs", "sluice etl"):
        ParquetFiles.open(str(tmp_path / "uid.parquet"), spec=stored, say=lambda _: None)


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
def test_a_loader_of_parquet_reads_each_file_by_the_name_that_it_has(tmp_path, reader):
    """Its splits and ids are those of files in which the column has one name."""
    text = write_spec(
        "click:int uid:text",
        column("uid", "sparse", "hash, size = 1000"),
        table='key = "uid"\nsplit = {train = 0.6, test = 0.4}',
    )
    spec = text.replace('"uid:text"', '{name = "uid:text", also = ["user_id"]}')
    for number, name in enumerate(("uid", "user_id", "uid")):
        values = [f"u{number}-{n}" for n in range(100)]
        for folder, own in (("drawn", name), ("plain", "uid")):
            rows = {own: values, "click": [0, 1] * 50}
            rows = dict(reversed(rows.items())) if number else rows
            write_rows(tmp_path / folder / f"{number}.parquet", row_group_size=30, **rows)

    def loaded(folder: str, text: str, split: str) -> list[tuple]:
        options = {"split": split, "reading": Reading(reader=reader), "order": Order(last="pad")}
        source = str(tmp_path / folder)
        with Loader(source, batch_size=8, spec=Spec.own(text), tuning="fixed", **options) as loader:
            batches = [(b.weight.tolist(), b.values.tolist(), b.label.tolist()) for b in loader]
        return sorted(row for batch in batches for row in zip(*batch, strict=True) if row[0])

    for split in ("train", "test"):
        assert loaded("drawn", spec, split) == loaded("plain", text, split)
    write_rows(tmp_path / "drawn" / "3.parquet", click=[0], uid=["a"], user_id=["b"])
    with raises(ParquetError, "3.parquet", "'uid'", "'user_id'", "sluice etl"):
        loaded("drawn", spec, "train")
    write_rows(tmp_path / "drawn" / "3.parquet", click=[0], other=["a"])
    with raises(ColumnError, "3.parquet", "'uid'"):
        loaded("drawn", spec, "train")


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    MISTAKES["renamed_input"],
)
def test_other_names_that_cannot_be_are_named(old, new, facts):
    text = SPEC.replace(', "all:texts"', "")
    with raises(SpecError, *facts):
        Spec.own(text.replace(old, new, 1))


def write_day(folder, day: int, name: str, form: str):
    rows = [
        {"click": n % 2, name: f"u{(n * 7 + day) % 9}", "item": f"i{n % 4}", "at": day * 30 + n}
        for n in range(30)
    ]
    lines = [",".join(map(str, row.values())) for row in ({name: name for name in rows[0]}, *rows)]
    if form == "json":
        lines = [json.dumps(dict(reversed(row.items()))) for row in rows]
    return put(folder / f"{day}.{form}", "\n".join(lines))


def test_what_is_learned_follows_a_renamed_column_and_csv_follows_json(tmp_path):
    out, second = tmp_path / "t", write_day(tmp_path, 1, "user_id", "json")
    first = build_table(None, out, write_day(tmp_path, 0, "uid", "json"), text=LEARNED)
    words = {key: words_of(out, key) for key in ("who/0", "rows/negatives/0")}
    with raises(StateError, "clicks/0", "user_id", "--mode"):
        job_of(out, second, text=RENAMED.replace(', was = "uid"', ""), mode="append")
    made = build_table(None, out, second, text=RENAMED, mode="append")
    assert (made.rows, made.fingerprint) == (2 * first.rows, first.fingerprint)
    # The table has the new name now, and an append may still name the old one.
    third = write_day(tmp_path, 2, "user_id", "csv")
    in_csv = RENAMED.replace('"json"', '"csv"\nheader = true')
    assert build_table(None, out, third, text=in_csv, mode="append").rows == 3 * first.rows
    assert {key: words_of(out, key) for key in words} == words
    other = in_csv.replace('name = "kept"\nfrom = "user_id"', 'name = "kept"\nfrom = "item"')
    with raises(InputError, "'kept'", "sources", "'item'"):
        job_of(out, third, text=other, mode="append")


def test_an_overwrite_of_old_and_new_days_keeps_the_ids_of_a_renamed_column(tmp_path):
    days = [write_day(tmp_path, day, ("uid", "user_id")[day], "json") for day in range(2)]
    own = '[[column]]\nname = "uid"\nrole = "sparse"\nops = [{op = "categorify"}]\n'
    run(None, tmp_path / "t", days[0], text=LEARNED + own)
    words = words_of(tmp_path / "t", "uid/0")
    both = RENAMED.replace("was", 'also = ["uid"], was') + own.replace("uid", "user_id")
    given = {"mode": "overwrite", "update_state": True}
    made = build_table(None, tmp_path / "t", *days, text=both, **given)
    assert words_of(tmp_path / "t", "user_id/0")[: len(words)] == words
    assert made.rows == 90  # a negative is drawn for each of 30 clicks
