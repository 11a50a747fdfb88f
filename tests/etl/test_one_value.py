"""A value has one text, key, id and number: as a column, in a history, a lag or a join, and in a request."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.apply.features import Features
from sluice.etl.apply.lookups import Serving
from tests.etl.jobs import build_table, rows_of
from tests.etl.tables import column, section, write_rows, write_spec
from tests.open_loader import open_loader

INTS = (0, -1, 7, 10**10, 10_000_000_007, 2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, 0.1, 1e10, 1e22, 2.0**53, -1.5, 5e-324)
TEXTS = ("0", "01", " 1", "1", "1e+10", "a b", "", "\x1f", "\x1b0")


@pytest.mark.spark
def test_a_value_has_the_same_id_as_column_in_a_history_and_in_a_request(spark, tmp_path):
    """The first row of each user has the value as a column, the second one as its history and as its lag."""
    kinds = {"i": INTS, "f": FLOATS, "t": TEXTS}
    ops = (
        "hash, size = 1000003",
        "categorify, joint = '{0}'",
        "hash, size = 999983, online = true",
    )
    made = [
        column(
            f"{of}_{place}_{n}",
            role,
            op.format(of),
            source=of if place == "own" else f"{of}_{place}",
        )
        for of in kinds
        for place, role in (("own", "sparse"), ("lag", "sparse"), ("past", "id_list"))
        for n, op in enumerate(ops)
    ]
    text = write_spec(
        "click:int user:int at:int i:int f:float t:text",
        *(
            rule
            for of in kinds
            for rule in (
                section("history", name=f"{of}_past", of=of, by="user", order="at", length=3),
                section("lag", name=f"{of}_lag", of=of, by="user", order="at"),
            )
        ),
        *(column(name, "dense", "fill") for name in ("user", "at")),
        *made,
    )
    count = len(INTS)
    two = {name: [value for value in values for _ in range(2)] for name, values in kinds.items()}
    users = [number for number in range(count) for _ in range(2)]
    write_rows(
        tmp_path / "rows.parquet", click=[0, 1] * count, user=users, at=[1, 2] * count, **two
    )
    table = build_table(spark, tmp_path / "t", tmp_path / "rows.parquet", text=text)
    asked = {name: pa.array(values) for name, values in kinds.items()}
    asked |= {"user": pa.array(range(count)), "at": pa.array([3] * count)}
    served = Features(table.spec(), table.state()).inputs(Serving.open(table).complete(asked))
    with open_loader(table, batch_size=2 * count, split="all") as loader:
        [batch] = loader
    rows = np.lexsort((batch["at"].numpy(), batch["user"].numpy()))
    stored = sorted(rows_of(table), key=lambda row: (row["user"], row["at"]))
    for of in kinds:
        for n in (0, 1):
            own = [row[f"{of}_own_{n}"] for row in stored if row["at"] == 1]
            later = [row for row in stored if row["at"] == 2]
            assert [row[f"{of}_lag_{n}"] for row in later] == own
            bags = [np.frombuffer(row[f"{of}_past_{n}"], "<u4").tolist() for row in later]
            assert bags == [[one] for one in own]
            assert served[f"{of}_own_{n}"].to_pylist() == own
            assert served[f"{of}_lag_{n}"].to_pylist() == own
            assert [bag[-1] for bag in served[f"{of}_past_{n}"].to_pylist()] == own
        loaded = batch[f"{of}_own_2"].numpy()[rows]
        assert batch[f"{of}_lag_2"].numpy()[rows][1::2].tolist() == loaded[::2].tolist()
        bag = batch[f"{of}_past_2"]
        assert bag.lengths.numpy()[rows].tolist() == [0, 1] * count
        order = np.argsort(rows[1::2])
        assert bag.values.tolist() == loaded[::2][order].tolist()


@pytest.mark.spark
def test_a_join_compares_keys_by_the_type_of_the_column_whatever_the_file_has(spark, tmp_path):
    """Each key is in a side table of its own, as another type than the input declares. Job and server agree."""
    whole, parts = [0, 1, 10**10 + 7, 2**53, None], [0.0, 1.5, 1e10, 2.0**53, None]
    sides = {
        "int_double": ("i", pa.array([0.0, 1.0, 1e10 + 7, 2.0**53, 1.5])),
        "int_text": ("i", pa.array(["0", "01", " 10000000007", "9007199254740992", "x"])),
        "int_decimal": ("i", pa.array([0, 1, 10**10 + 7, 2**53, None], pa.decimal128(20, 0))),
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
    rows = sorted(rows_of(table), key=lambda row: row["row"])
    assert {name: [row[name] for row in rows] for name in sides} == want
    asked = {"i": pa.array(whole), "f": pa.array([-0.0, *parts[1:]]), "t": pa.array(texts)}
    served = Serving.open(table).complete(asked)
    assert {name: served[name].fill_null(-1).to_pylist() for name in sides} == want
