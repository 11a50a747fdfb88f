"""The example specs on synthetic rows of their shape: whole jobs against the same operators in one process."""

from __future__ import annotations

import datetime
import itertools
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from sluice.etl.spec.spec import Spec
from sluice.etl.table.table import FeatureTable
from tests.dlrm.forks import Forks
from tests.etl.jobs import alike, build_table, in_one_process, rows_of, run
from tests.etl.other_shapes import FORMATS, synthesize_shape
from tests.etl.tables import columns_of

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("shape", FORMATS)
def test_the_same_seed_makes_the_same_file(shape, tmp_path):
    about = [synthesize_shape(shape, tmp_path / name, rows=200, seed=4) for name in "ab"]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert about[0] == about[1]
    assert 0.6 < about[0]["bayes_auc"] < 0.95


def trained(forks: Forks, table: FeatureTable, *words: str) -> dict:
    """What a short run of the trainer on the table says at its end."""
    run = Path(table.uri).with_name("run")
    asked = (
        f"--run-dir {run} --data {table.uri} --batch-size 128 --epochs 1 --tuning fixed "
        "--dense-layers 16 --over-layers 16"
    )
    done = forks.train(*asked.split(), *words, tmp=run.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_avazu(spark, repo, tmp_path, forks):
    synthesize_shape("avazu", tmp_path / "a.csv", rows=1500, seed=2)
    text = (repo / "features/avazu.toml").read_text()
    result = run(spark, tmp_path / "t", tmp_path / "a.csv", text=text)
    assert (result.rows_in, result.rows_out, result.rejected) == (1500, 1500, {})
    table = FeatureTable.open(tmp_path / "t")
    assert table.check() == []
    kinds = Spec.parse(text).input.columns
    types = {name: pa.int64() if kind == "int" else pa.string() for name, kind in kinds.items()}
    raw = pyarrow.csv.read_csv(
        tmp_path / "a.csv", convert_options=pyarrow.csv.ConvertOptions(column_types=types)
    )
    columns = columns_of(raw)
    got = rows_of(table)
    alike(got, in_one_process(text, table, columns))
    # By time: nothing of the last days is trained on.
    hour = dict(zip(columns["id"].to_pylist(), columns["hour"].to_pylist(), strict=True))
    assert max(hour[row["row"]] for row in rows_of(table, "train")) < 14102900
    assert min(hour[row["row"]] for row in rows_of(table, "test")) >= 14103000
    assert max(int(row["row"]) for row in got) > 2**63  # unsigned ids stay whole
    by_id = {row["row"]: row for row in got}
    for row in raw.to_pylist():
        made = by_id[row["id"]]
        assert (made["device_id"] == 1) == (row["device_id"] == "a99f214a")
        assert (made["C20"] == 1) == (row["C20"] == "-1")
        at = datetime.datetime.strptime(str(row["hour"]), "%y%m%d%H")
        assert (made["hour_of_day"], made["weekday"]) == (2 + at.hour, 2 + at.weekday())
    assert 0 < trained(forks, table)["auc"] < 1


def test_sessions(spark, repo, tmp_path, forks):
    synthesize_shape("sessions", tmp_path / "s.json", rows=1200, seed=3)
    lines = (tmp_path / "s.json").read_text().splitlines(keepends=True)
    (tmp_path / "s.json").write_text("".join([*lines, *lines[:50]]))  # some came twice
    text = (repo / "features/sessions.toml").read_text()
    result = run(spark, tmp_path / "t", tmp_path / "s.json", text=text)
    rows = list({(r["user"], r["item"], r["at"]): r for r in map(json.loads, lines)}.values())
    assert (result.rows_in, result.rows_out) == (1250, len(rows))
    earlier, last = defaultdict(list), {}
    rows.sort(key=lambda r: (r["at"], r["user"], r["item"]))
    for row in rows:
        row["clicked"] = earlier[row["user"]][-20:]
        row["since"] = row["at"] - last[row["user"]] if row["user"] in last else None
        last[row["user"]] = row["at"]
        if row["click"]:
            earlier[row["user"]].append(row["item"])
    kinds = {
        "at": pa.int64(),
        "since": pa.int64(),
        "click": pa.int64(),
        "price": pa.float64(),
        "tags": pa.list_(pa.string()),
        "liked_tags": pa.list_(pa.string()),
        "clicked": pa.list_(pa.string()),
    }
    names = [*Spec.parse(text).input.columns, "clicked", "since"]
    columns = {n: pa.array([r.get(n) for r in rows], kinds.get(n, pa.string())) for n in names}
    table = FeatureTable.open(tmp_path / "t")
    assert table.check() == []
    alike(rows_of(table), in_one_process(text, table, columns))
    field = {f.name: f for f in table.fields}["clicked"]
    lengths = [len(r["clicked"]) for r in rows]
    assert (field.role, field.layout, field.type) == ("id_list", "bytes", "binary")
    assert field.bag == (min(lengths), pytest.approx(np.mean(lengths)), max(lengths))
    assert field.cardinality == {f.name: f for f in table.fields}["item"].cardinality
    # A user's rows lie in one split and next to each other.
    users = [[row["user"] for row in rows_of(table, split)] for split in table.splits]
    assert not set(users[0]) & set(users[1])
    for column in users:
        changes = sum(a != b for a, b in itertools.pairwise(column))
        assert changes <= len(set(column)) + 2  # two users may share a hashed id
    words = ["--model", "dien", "--history", "clicked", "--target", "item", "--bags", "tags=mean"]
    assert 0 < trained(forks, table, *words)["auc"] < 1


def test_a_thousand_columns(spark, repo, tmp_path):
    synthesize_shape("wide", tmp_path / "w.parquet", rows=300, seed=3)
    text = (repo / "features/wide.toml").read_text()
    table = build_table(spark, tmp_path / "t", tmp_path / "w.parquet", text=text)
    assert len(table.fields) == 1000
    raw = pq.read_table(tmp_path / "w.parquet")
    alike(
        rows_of(table),
        in_one_process(text, table, columns_of(raw)),
    )
