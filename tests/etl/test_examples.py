"""The example specs on drawn rows: whole jobs against the same operators in one process."""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa
import pytest

from sluice.etl.spec.spec import Spec
from sluice.etl.table.table import FeatureTable
from tests.etl.drawn_rows import draw_rows
from tests.etl.jobs import alike, build_table, in_one_process, rows_of, run
from tests.etl.tables import columns_of


@pytest.mark.spark
def test_sessions(spark, repo, tmp_path):
    text = (repo / "features/sessions.toml").read_text()
    rows = draw_rows(tmp_path / "s.json", text, rows=600).to_pylist()
    lines = (tmp_path / "s.json").read_text().splitlines(keepends=True)
    (tmp_path / "s.json").write_text("".join([*lines, *lines[:50]]))  # some came twice
    result = run(spark, tmp_path / "t", tmp_path / "s.json", text=text)
    assert (result.rows_in, result.rows_out) == (650, 600)
    earlier, last = defaultdict(list), {}
    for row in rows:
        user, known = row["user"], row["user"] is not None
        row["clicked"] = earlier[user][-20:] if known else []
        row["since"] = row["at"] - last[user] if known and user in last else None
        last[user] = row["at"]
        if row["click"] and row["item"] is not None:
            earlier[user].append(row["item"])
    kinds = {"clicked": pa.list_(pa.string()), "since": pa.int64()}
    names = [*Spec.parse(text).input.columns, *kinds]
    columns = {name: pa.array([row[name] for row in rows], kinds.get(name)) for name in names}
    table = FeatureTable.open(tmp_path / "t")
    assert table.check() == []
    alike(rows_of(table), in_one_process(text, table, columns))
    field = {one.name: one for one in table.fields}["clicked"]
    assert field.bag[::2] == (0, max(len(row["clicked"]) for row in rows))


def test_a_thousand_columns(repo, tmp_path):
    text = (repo / "features/wide.toml").read_text()
    raw = draw_rows(tmp_path / "w.parquet", text, rows=300, seed=3)
    table = build_table(None, tmp_path / "t", tmp_path / "w.parquet", text=text)
    assert len(table.fields) == 1000
    alike(rows_of(table), in_one_process(text, table, columns_of(raw)))
