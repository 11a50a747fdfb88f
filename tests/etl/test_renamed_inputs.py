"""A log changes: a column gets another name, a number becomes a text, and CSV follows JSON."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest

from sluice.common.errors import InputError
from sluice.dlrm.serving.decode import Decoder, Refusal
from sluice.etl.apply.parse import InputParser
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.fitted_state import StateError
from sluice.ingest.columns import ColumnError
from sluice.ingest.read.parquet_files import ParquetFiles
from tests.dlrm.serving.stub import decoded
from tests.etl.jobs import build_table, job_of, rows_of, run, words_of
from tests.etl.tables import batch_of, column, write_rows, write_spec
from tests.fuzz.one_value import parsed_rows
from tests.raises import raises

WRITTEN = (
    *("7", "-7", "0", "-0", "007x", "1.0", "1.50", "-0.0", "1e5", "1E+5", "0.1", "true", "false"),
    *("9223372036854775807", "9223372036854775808", "1" * 400, "9" * 5000, "1e400", "NaN"),
)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_numbers_and_booleans_of_json_are_the_text_that_they_are_written_as(seed):
    draw = random.Random(seed)
    pool = draw.sample(WRITTEN, draw.randint(1, 6))
    texts = [draw.choice(pool) for _ in range(draw.randint(1, 30))]
    tokens = [json.dumps(text) if text == "007x" or draw.random() < 0.2 else text for text in texts]
    rows = [f'{{"click": 0, "one": {token}, "all": [null, {token}]}}' for token in tokens]
    spec = Spec.own(
        write_spec(
            "click:int one:text all:texts",
            column("one", "sparse", "hash, size = 9"),
            column("all", "id_list", "hash, size = 9"),
            form="json",
        )
    )
    want = {"one": texts, "all": [[None, text] for text in texts]}
    parsed = InputParser(spec).parse(batch_of(row.encode() for row in rows))
    assert parsed.rejected == []
    assert {name: parsed.columns[name].to_pylist() for name in want} == want
    asked = [row.replace('"click": 0, ', "") for row in rows]
    body = f'{{"rows": [{", ".join(asked)}]}}'.encode()
    columns = decoded(Decoder(spec, "", most_rows=99), body)
    assert {name: columns[name].to_pylist() for name in want} == want


def test_a_number_of_json_is_no_time_as_its_format_says():
    """A server takes a number for seconds since 1970, so a job must not take it for a text."""
    text = write_spec("click:int", column("at", "dense", "fill"), form="json").replace(
        '"click:int"', '"click:int", {name = "at:float", format = "%Y%m%d"}'
    )
    lines = [b'{"click": 0, "at": 20260501}', b'{"click": 0, "at": "20260501"}']
    for chosen, rejected in ((lines, [0]), (lines[:1], [0]), (lines[1:], [])):
        parsed = InputParser(Spec.own(text)).parse(batch_of(chosen))
        assert [row for row, _ in parsed.rejected] == rejected


def also_spec(form: str, head: str = "", more: str = "") -> str:
    text = write_spec(
        "click:int uid:text price:float",
        column("uid", "sparse", "hash, size = 99"),
        column("price", "dense", "fill"),
        more,
        form=form,
        head=head,
    )
    return text.replace('"uid:text"', '{name = "uid:text", also = ["user.id", "user_id"]}')


def test_a_column_is_read_by_any_of_its_names_in_every_form(tmp_path):
    """The first name that has a value counts. `user.id` is a part of an object, or of a struct."""
    want = ["a", "b", "c", "d", "7", None]
    lines = [
        '{"click": 0, "uid": "a", "user_id": "x"}',
        '{"click": 0, "user": {"id": "b"}, "user_id": "x"}',
        '{"click": 0, "user_id": "c"}',
        '{"click": 0, "uid": null, "user_id": "d", "user": null}',
        '{"click": 0, "user_id": 7}',
        '{"click": 0, "price": 1.5}',
    ]
    (tmp_path / "one.json").write_text("".join(f"{line}\n" for line in lines))
    spec = Spec.own(also_spec("json"))
    for chosen in (lines, lines[:4], *([line] for line in lines)):
        path = tmp_path / "lines.json"
        path.write_text("".join(f"{line}\n" for line in chosen))
        assert [row["uid"] for row in parsed_rows(spec, path)] == [
            want[lines.index(line)] for line in chosen
        ]
    decoder = Decoder(spec, "", most_rows=99)
    for line, value in ((lines[2], "c"), (lines[4], "7"), ('{"user.id": "e", "uid": null}', "e")):
        asked = line.replace('"click": 0, ', "")
        body = f'{{"rows": [{asked}]}}'.encode()
        assert decoded(decoder, body)["uid"].to_pylist() == [value]
    with raises(Refusal, "'uuid'"):
        decoded(decoder, b'{"rows": [{"uuid": "a"}]}')

    files = []
    for name, column_name in (("1", "uid"), ("2", "user_id"), ("3", "user.id")):
        csv = tmp_path / f"{name}.csv"
        csv.write_text(f'click,{column_name},price\n0,{name},1\nclick,uid,price\n0,"",\n')
        path = tmp_path / f"{name}.parquet"
        values = pa.array([name, None])
        if column_name == "user.id":
            values = pa.StructArray.from_arrays([values], ["id"])
        stored_name = column_name.partition(".")[0]
        write_rows(path, pa.table({"click": [0, 0], stored_name: values, "price": [1.0, None]}))
        files.append((csv, path))
    csv_spec = Spec.own(also_spec("csv", "header = true\n", column("name", "key", source="uid")))
    table = build_table(None, tmp_path / "c", *(csv for csv, _ in files), text=csv_spec.text)
    assert sorted(row["name"] for row in rows_of(table)) == ["", "", "", "1", "2", "3"]
    stored = Spec.own(also_spec("parquet"))
    rows = parsed_rows(stored, *(path for _, path in files))
    assert [row["uid"] for row in rows] == ["1", None, "2", None, "3", None]
    both = write_rows(
        tmp_path / "both.parquet",
        pa.table(
            {
                "click": [0] * 3,
                "user_id": pa.array([b"\xff", b"z", b"\xff"]),
                "uid": ["y", None, None],
                "price": [1.0] * 3,
            }
        ),
    )
    # A value that is no text matters only where it would be taken.
    assert [row and row["uid"] for row in parsed_rows(stored, both)] == ["y", "z", None]

    run(None, tmp_path / "t", *(path for _, path in files), text=stored.text)
    assert sorted(row["price"] for row in rows_of(tmp_path / "t")) == [0, 0, 0, 1, 1, 1]
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("click,uuid,price\n0,a,1\n")
    with raises(InputError, "'uuid'", "'uid'"):
        run(None, tmp_path / "w", wrong, text=csv_spec.text)
    lacking = write_rows(tmp_path / "lacking.parquet", click=[0], price=[1.0])
    with raises(InputError, "'uid'", "lacking.parquet"):
        run(None, tmp_path / "w", lacking, files[0][1], text=stored.text)
    with raises(ColumnError, "also", "sluice etl"):
        ParquetFiles.open(str(both), spec=stored, say=lambda _: None)


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ('also = ["user.id", "user_id"]', 'also = ["price"]', ("'price'",)),
        ('"uid:text"', '"u1..u2:text"', ("range", "'u1..u2'")),
        ('format = "json"', 'format = "tsv"', ("also", "header")),
    ],
)
def test_other_names_that_cannot_be_are_named(old, new, facts):
    text = also_spec("json")
    assert text.count(old) == 1
    with raises(SpecError, *facts):
        Spec.own(text.replace(old, new))


def learned_spec(user: str, *columns: str, form: str = "json", head: str = "", op: str = "") -> str:
    name = "uid" if user == "uid" else "user_id"
    text = write_spec(
        "click:int uid:text item:text at:int",
        column("who", "sparse", op or "categorify", source=name),
        column("clicks", "dense", "target", source=name),
        f'[negatives]\ncolumn = "{name}"\n',
        *columns,
        form=form,
        head=head,
        table='split_time = "at"\nkey = ["at"]\nsplit = {train = 0, test = 90}',
    )
    return text.replace('"uid:text"', user if "{" in user else f'"{user}:text"')


RENAMED = '{name = "user_id:text", was = "uid"}'


def write_days(folder) -> list:
    """Three days in JSON and CSV, of which the second and third have another name."""
    paths = []
    for day, name in enumerate(("uid", "user_id", "user_id")):
        rows = [
            {"click": n % 2, name: f"u{(n * 7 + day) % 9}", "item": f"i{n % 4}", "at": day * 30 + n}
            for n in range(30)
        ]
        paths.append(folder / f"{day}.{'csv' if day == 2 else 'json'}")
        head = [",".join(rows[0])] if day == 2 else []
        lines = [
            ",".join(map(str, row.values()))
            if day == 2
            else json.dumps(dict(reversed(row.items())))
            for row in rows
        ]
        paths[-1].write_text("".join(f"{line}\n" for line in (*head, *lines)))
    return paths


def test_what_is_learned_follows_a_renamed_column_and_csv_follows_json(tmp_path):
    first, second, third = write_days(tmp_path)
    table, old = tmp_path / "t", learned_spec("uid", column("uid", "key"))
    begun = build_table(None, table, first, text=old)
    words = {key: words_of(table, key) for key in ("who/0", "rows/negatives/0")}
    renamed = learned_spec(RENAMED, column("uid", "key", source="user_id"))
    with raises(StateError, "clicks/0", "user_id", "--mode"):
        job_of(table, second, text=renamed.replace(', was = "uid"', ""), mode="append")
    made = build_table(None, table, second, text=renamed, mode="append")
    assert (made.rows, made.fingerprint) == (2 * begun.rows, begun.fingerprint)
    assert {key: words_of(table, key) for key in words} == words
    # The name that the table has now is the new one. An append may still name the old one.
    in_csv = learned_spec(
        RENAMED, column("uid", "key", source="user_id"), form="csv", head="header = true\n"
    )
    assert build_table(None, table, third, text=in_csv, mode="append").rows == 3 * begun.rows
    assert {key: words_of(table, key) for key in words} == words
    # Of the same values, JSON and CSV make the same rows.
    other = in_csv.replace('name = "uid"\nfrom = "user_id"', 'name = "uid"\nfrom = "item"')
    with raises(InputError, "'uid'", "sources", "'item'"):
        job_of(table, third, text=other, mode="append")


def test_an_overwrite_of_old_and_new_days_keeps_the_ids_of_a_renamed_column(tmp_path):
    first, second, _ = write_days(tmp_path)
    table = tmp_path / "t"
    run(None, table, first, text=learned_spec("uid", column("uid", "sparse", "categorify")))
    words = words_of(table, "uid/0")
    both = learned_spec(
        RENAMED.replace("was", 'also = ["uid"], was'), column("user_id", "sparse", "categorify")
    )
    made = build_table(None, table, first, second, text=both, mode="overwrite", update_state=True)
    assert words_of(table, "user_id/0")[: len(words)] == words
    assert made.rows == 90  # a negative is drawn for each of 30 clicks
