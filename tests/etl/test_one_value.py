"""A value has one text, key, id and number: as a column, in a history, a lag or a join, and in a request."""

import datetime
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from sluice import FeatureTable
from sluice.etl.table.table import check_values
from tests.etl.jobs import Said, build_table, rows_of, run
from tests.etl.tables import column, section, write_rows, write_spec
from tests.product import Fingerprint, Serving, Spec, TableError, arrow_schema
from tests.raises import assert_names, raises


@pytest.mark.spark
def test_a_join_compares_keys_by_the_type_of_the_column_whatever_the_file_has(spark, tmp_path):
    """Each key is in a side table of its own, as another type than the input declares. Job and server agree."""
    whole, parts = [0, 1, 10**10 + 7, 2**53, None], [0.0, 1.5, 1e10, 2.0**53, None]
    sides = {
        "int_double": ("i", pa.array([0.0, 1.0, 1e10 + 7, 2.0**53, 1.5])),
        "int_text": ("i", pa.array(["0", "01", " 10000000007", "9007199254740992", "x"])),
        "int_decimal": ("i", pa.array([0, 1, 10**10 + 7, 2**53, 0], pa.decimal128(20, 0))),
        "float_int": ("f", pa.array([0, 15, 10**10, 2**53, None])),
        "float_single": ("f", pa.array([-0.0, 1.5, 1e10, 2.0**53, np.nan], pa.float32())),
        "text_int": ("t", pa.array([0, 1, 10**10 + 7, 2**53, None])),
    }
    rules = []
    for number, (name, (on, keys)) in enumerate(sides.items()):
        write_rows(tmp_path / f"{name}.parquet", theirs=keys, **{name: range(5)})
        their_on = (
            {"on": on, "their_on": "theirs"}
            if number % 2
            else {"on": [on, on], "their_on": ["theirs", "theirs"]}
        )
        path = f"{tmp_path}/{name}.parquet"
        rules.append(section("join", path=path, columns=[f"{name}:int"], **their_on))
    texts = [None if value is None else str(value) for value in whole]
    write_rows(
        tmp_path / "rows.parquet", click=[0, 1] * 2 + [0], row=range(5), i=whole, f=parts, t=texts
    )
    text = write_spec(
        "click:int row:int i:int f:float t:text",
        *rules,
        column("row", "time"),
        *(column(name, "dense", "fill, value = -1") for name in sides),
    )
    table = build_table(spark, tmp_path / "t", tmp_path / "rows.parquet", text=text)
    want = {name: [0, 1, 2, 3, -1] for name in sides} | {"float_int": [0, -1, 2, 3, -1]}
    want["int_decimal"][0] = 4  # the largest of two rows with this key
    rows = sorted(rows_of(table), key=lambda row: row["row"])
    assert {name: [row[name] for row in rows] for name in sides} == want
    asked = {"i": pa.array(whole), "f": pa.array([-0.0, *parts[1:]]), "t": pa.array(texts)}
    served = Serving.open(table).complete(asked, {})
    assert {name: served[name].fill_null(-1).to_pylist() for name in sides} == want


STAMPS = (1_700_000_000_000_000, 1_700_000_000_500_000, 1_700_000_010_000_000)
"""Microseconds since 1970."""


@pytest.mark.spark
def test_a_side_tables_time_may_be_of_any_type_and_a_wrong_unit_is_reported(spark, tmp_path):
    """A row sees the side rows up to its own time, to the microsecond; also if its time is a whole second."""
    times = pa.array(STAMPS).cast(pa.timestamp("us"))
    kinds = {
        "naive": times,
        "aware": times.cast(pa.timestamp("us", "Europe/Berlin")),
        "nanos": times.cast(pa.timestamp("ns")),
        "day": pa.array([datetime.date(2023, 11, day) for day in (13, 14, 15)]),
        "number": pa.array([stamp / 1e6 for stamp in STAMPS]),
        "millis": pa.array([stamp // 1000 for stamp in STAMPS]),
        "nan": pa.array([STAMPS[0] / 1e6, np.nan, STAMPS[2] / 1e6]),
    }
    for name, since in kinds.items():
        write_rows(tmp_path / f"{name}.parquet", user=[1, 1, 1], since=since, **{name: [0, 1, 2]})
    write_rows(
        tmp_path / "rows.parquet",
        click=[0, 1, 0, 1],
        user=[1, 1, 1, 2],
        at=[1_699_999_999, 1_700_000_000, 1_700_000_010, 1_700_000_010],
    )
    text = write_spec(
        "click:int user:int at:int",
        *(
            section(
                "join",
                path=f"{tmp_path}/{name}.parquet",
                on="user",
                columns=[f"{name}:int"],
                time="at",
                their_time="since",
            )
            for name in kinds
        ),
        column("at", "time"),
        column("user", "time"),
        *(column(name, "dense", "fill, value = -1") for name in kinds),
    )
    said = Said()
    run(spark, tmp_path / "t", tmp_path / "rows.parquet", text=text, said=said)
    rows = sorted(rows_of(tmp_path / "t"), key=lambda r: (r["user"], r["at"]))
    want = {name: [-1, 0, 2, -1] for name in kinds}
    want |= {"day": [1, 1, 1, -1], "millis": [-1] * 4}
    assert {name: [row[name] for row in rows] for name in kinds} == want
    users, at = [row["user"] for row in rows], [int(row["at"]) for row in rows]
    asked = {"user": pa.array([*users, 1]), "at": pa.array([*at, 2_000_000_000])}
    served = Serving.open(FeatureTable.open(tmp_path / "t")).complete(asked, problems := {})
    newest = {name: [2] for name in kinds} | {"millis": [-1]}
    assert {name: served[name].fill_null(-1).to_pylist() for name in kinds} == {
        name: want[name] + newest[name] for name in kinds
    }
    assert not problems
    warnings = [line for line in said.text.splitlines() if line.startswith("warning: join.path")]
    assert len(warnings) == 2
    assert_names(warnings[0], "millis.parquet", "at", "seconds", "since", "milliseconds")
    assert_names(warnings[1], "millis.parquet", "0 of 4", "user", "unit")


@pytest.mark.spark
def test_names_with_dots_can_be_joined_lagged_and_kept_and_differences_are_exact(spark, tmp_path):
    """The gaps are 1, 100 and 200 ns, in the job and in the server."""
    start = 1_700_000_000_000_000_000
    at = [-(2**63), start, start + 1, start + 101, start + 301]
    lines = [
        {"click": row % 2, "user": {"id": 1, "geo": {"country": "de"}}, "at": time, "row": row}
        for row, time in enumerate(at)
    ]
    (tmp_path / "rows.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "side.csv").write_text(
        f"land;tax.rate;big;since\nfr;0,2;7;0\nde;0,19;1.000;{start + 1}\n"
    )
    text = write_spec(
        "click:int user.id:int user.geo.country:text at:int row:int",
        section(
            "join",
            path=f"{tmp_path}/side.csv",
            format="csv",
            delimiter=";",
            decimal=",",
            on="user.geo.country",
            their_on="land",
            columns=["tax.rate:float"],
            time="at",
            their_time="since",
        ),
        section("lag", name="gap", of="at", by="user.id", order="at", difference=True),
        section("history", name="past", of="user.geo.country", by="user.id", order="at", length=2),
        column("row", "time"),
        *(column(name, "dense", "fill, value = -1") for name in ("gap", "tax.rate")),
        column("past", "id_list", "hash, size = 1000"),
        form="json",
    )
    table = build_table(spark, tmp_path / "t", tmp_path / "rows.json", text=text)
    rows = sorted(rows_of(table), key=lambda row: row["row"])
    assert [row["gap"] for row in rows] == [-1, -1, 1, 100, 200]
    assert [row["tax.rate"] for row in rows] == [-1, -1, *[np.float32(0.19)] * 3]
    assert [len(row["past"]) // 4 for row in rows] == [0, 1, 2, 2, 2]
    later = start + 301 + np.array([1, 100, 200])
    asked = {
        "user.id": pa.array([1, 1, 1]),
        "user.geo.country": pa.array(["de", "fr", None]),
        "at": pa.array(later),
    }
    served = Serving.open(table).complete(asked, {})
    assert served["gap"].to_pylist() == [1, 100, 200]
    assert served["tax.rate"].to_pylist() == [0.19, 0.2, None]


def _rules(**keys: str) -> str:
    """Returns a spec with a history and a lag of each input column, and joins by `i` and by `f`."""
    base = {"by": "i", "order": "at"}
    return write_spec(
        "click:int i:int f:float t:text at:int",
        *(
            section("join", path="side.parquet", on=on, columns=[f"side_{on}:int"])
            for on in ("i", "f")
        ),
        *(
            section("history", name=f"{name}s", of=name, length=3, **base)
            for name in ("i", "f", "t", "at")
        ),
        section("lag", name="gap", of="at", difference=True, **base),
        section("lag", name="old_side", of="side_f", **base),
        *(column(name, role, ops, *source) for name, (role, ops, *source) in keys.items()),
    )


RENEWED = {
    "hashed": ("id_list", "hash, size = 9", "is"),
    "first": ("id_list", "first_x, size = 2; categorify", "is"),
    "left": ("id_list", "first_x, size = 2; hash, size = 9, online = true", "is"),
    "by_float": ("dense", "fill", "side_f"),
    "lag_of_it": ("dense", "fill", "old_side"),
}
KEPT = {
    "summed": ("dense", 'bag, of = "sum"; fill', "is"),
    "cut": ("id_list", "bucketize, boundaries = [1]", "is"),
    "floats": ("id_list", "hash, size = 9", "fs"),
    "texts": ("id_list", "hash, size = 9", "ts"),
    "by_int": ("dense", "fill", "side_i"),
    "gap": ("dense", "fill"),
    "i": ("sparse", "hash, size = 9"),
}


def test_tables_of_the_rule_before_are_refused_by_column_and_others_keep_their_fingerprint():
    spec = Spec.own(_rules(**RENEWED, **KEPT))
    fields = spec.fields({})
    assert {f.name for f in fields if f.values_rule > 1} == set(RENEWED)
    assert next(f.type for f in fields if f.name == "left") == "list<string>"
    for f in fields:
        before = replace(f, values_rule=1)
        old = SimpleNamespace(uri="tables/t", fields=[before])
        changed = Fingerprint.of([f]) != Fingerprint.of([before])
        metadata = [arrow_schema([field]).field(0).metadata for field in (f, before)]
        assert changed == (metadata[0] != metadata[1]) == (f.name in RENEWED)
        if changed:
            with raises(TableError, "tables/t", f.name, "sluice etl", "--mode overwrite"):
                check_values(old, spec)
        else:
            check_values(old, spec)
    check_values(SimpleNamespace(uri="tables/t", fields=fields), spec)
