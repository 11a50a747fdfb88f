"""Eighty columns of mixed types from raw files to predictions, by what `sluice guess` wrote."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.dlrm.serving.decode import ARROW, JSON
from sluice.dlrm.serving.scorer import Answer, PredictRequest, Scorer
from sluice.dlrm.serving.served_model import Servable
from sluice.etl.table.table import FeatureTable
from sluice.tools.guess_spec import guessed_spec
from tests.dlrm.rig import last_json
from tests.etl.jobs import run
from tests.raises import assert_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


def wide_rows(rows: int, seed: int) -> pa.Table:
    """Eighty columns of all types that programs write, of which some are no features."""
    rng = np.random.default_rng(seed)
    first = datetime.datetime(2025, 1, 1)
    user, n = rng.integers(0, 300, rows), np.arange(rows)
    label = rng.random(rows) < 1 / (1 + np.exp(-rng.normal(size=300)[user]))

    def some(values: object, kind: pa.DataType | None = None) -> pa.Array:
        return pa.array(values, kind, mask=rng.random(rows) < 0.1)

    columns = {
        "is_clicked": label,
        "user_id": user * 10**14,
        "session": pa.array(2**64 - 1 - user.astype(np.uint64)),
        "City": [f"Ort {one % 31}" for one in user],
        "city": [f"stadt {one % 7}" for one in user],
        "größe, cm": some(rng.normal(180, 9, rows)),
        "views": np.minimum(np.exp(rng.normal(5, 3, rows)), 1e7).astype(int),
        "at": pa.array(
            [first + datetime.timedelta(minutes=int(one)) for one in n], pa.timestamp("ns")
        ),
        "seen": some(
            [first + datetime.timedelta(hours=int(one)) for one in user], pa.timestamp("us", "UTC")
        ),
        "day": some(
            [first.date() + datetime.timedelta(days=int(one) % 40) for one in user], pa.date32()
        ),
        "refunded_at": pa.array(
            [first if one and n % 2 else None for n, one in enumerate(label)], pa.timestamp("us")
        ),
        "cost": some([decimal.Decimal(int(one)) / 4 for one in user], pa.decimal128(12, 2)),
        "flag": some(rng.random(rows) < 0.3),
        "tiny": rng.integers(-3, 4, rows).astype(np.int8),
        "tags": [[f"t{k}" for k in range(one % 4)] for one in user],
        "items": [[int(one), 7] for one in user],
        "pair": pa.array([[int(one), 1] for one in user], pa.list_(pa.int32(), 2)),
        "vector": pa.array(rng.normal(size=(rows, 3)).tolist(), pa.list_(pa.float32(), 3)),
        "kind": pa.array([f"k{one % 5}" for one in user]).dictionary_encode(),
        "none": pa.nulls(rows),
        "blob": pa.array([b"x"] * rows),
        "clock": pa.array([1] * rows, pa.time32("ms")),
        "half": pa.array(rng.normal(size=rows).astype(np.float16)),
        "split": rng.integers(0, 4, rows),
        "_hidden": rng.normal(size=rows),
        "request": [f"r{one}" for one in n],
    }
    for number in range(80 - len(columns)):
        numbers, whole = (
            rng.normal(number, 5 ** (number % 9), rows),
            rng.integers(0, 9 * number + 3, rows),
        )
        columns[f"f{number}"] = some(
            [numbers, whole, [f"v{one % (number + 2)}" for one in user]][number % 3]
        )
    return pa.table(columns)


def write(table: pa.Table, path: Path) -> list[dict]:
    """Writes the rows, and returns them as a client sends them."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=1500)
        return []
    left_out = {"clock", "none", "blob"}

    def plain(value: object) -> object:
        if isinstance(value, decimal.Decimal):
            return float(value)
        return value.isoformat() if isinstance(value, datetime.date) else value

    rows = [
        {name: plain(value) for name, value in row.items() if name not in left_out}
        for row in table.to_pylist()
    ]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return rows


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_eighty_columns_of_mixed_types_pass_from_guess_to_server(tmp_path, forks, form):
    table = wide_rows(3000, 0)
    if form == "json":
        table = table.drop_columns(["session"])  # JSON's numbers have 64 signed bits
    rows = write(table, tmp_path / f"log.{form}")
    text = guessed_spec(str(tmp_path / f"log.{form}"))
    assert_names(text, "#   refunded_at:", "label is 1")
    result = run(None, tmp_path / "table", tmp_path / f"log.{form}", text=text)
    assert (result.rejected, result.rows_out) == ({}, 3000)
    made = FeatureTable.open(tmp_path / "table")
    assert made.check() == []
    assert len(made.fields) > 60
    asked = f"--run-dir {tmp_path}/run --data {tmp_path}/table --width 8 --dense-layers 16 --over-layers 16"
    process = forks.train(*asked.split(), tmp=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    assert last_json(process)["auc"] > 0.55
    scorer = Scorer(Servable.load(tmp_path / "run", "fp32"), most_rows=100)
    kinds = scorer.decoder.kinds
    if form == "parquet":
        sink = pa.BufferOutputStream()
        few = table.slice(0, 50).select([name for name in kinds if name in table.column_names])
        few = few.set_column(few.column_names.index("kind"), "kind", few["kind"].cast(pa.string()))
        with pa.ipc.new_stream(sink, few.schema) as stream:
            stream.write_table(few)
        asked = PredictRequest(ARROW, sink.getvalue().to_pybytes())
    else:

        def sent(name: str, value: object) -> object:
            value = int(value) if isinstance(value, bool) else value
            return str(value) if kinds[name] == "text" and value is not None else value

        few = [{name: sent(name, row[name]) for name in row if name in kinds} for row in rows[:50]]
        asked = PredictRequest(JSON, json.dumps({"rows": few}).encode())
    (answer,) = scorer.answer([asked])
    assert isinstance(answer, Answer), answer
    assert len(set(answer.probabilities)) > 40


def test_a_job_rejects_the_few_broken_cells_that_a_guess_names(tmp_path):
    """Each broken line has a reason, and a broken id is an id."""
    rng, first = np.random.default_rng(0), datetime.datetime(2026, 1, 1)
    rows = [
        {
            "click": int(rng.random() < 0.3),
            "price": round(rng.random() * 90, 2),
            "at": first + datetime.timedelta(minutes=9 * number),
            "item": int(rng.integers(900)),
        }
        for number in range(3000)
    ]
    rows[5]["price"] = "abc"
    rows[9]["at"] = "notadate"
    rows[11]["item"] = "x"
    for number in (20, 30, 40):
        rows[number]["click"] = 7
    with (tmp_path / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = guessed_spec(str(tmp_path / "log.csv"))
    assert_names(text, "Neither 0 nor 1: 3", "Not a number: 1", "Not a time: 1", "split_time")
    result = run(None, tmp_path / "table", tmp_path / "log.csv", text=text)
    assert result.rejected == {
        "at: not a time as its format says": 1,
        "click: neither 0 nor 1": 3,
        "price: not a number of 64 bits": 1,
    }
    assert result.rows_out == 2995
