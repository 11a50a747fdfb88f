"""An example spec on drawn rows: a whole job against the same operators in one process."""

from __future__ import annotations

from tests.etl.drawn_rows import draw_rows
from tests.etl.jobs import alike, build_table, in_one_process, rows_of
from tests.etl.tables import columns_of


def test_a_thousand_columns(repo, tmp_path):
    text = (repo / "features/wide.toml").read_text()
    raw = draw_rows(tmp_path / "w.parquet", text, rows=300, seed=3)
    table = build_table(None, tmp_path / "t", tmp_path / "w.parquet", text=text)
    assert len(table.fields) == 1000
    alike(rows_of(table), in_one_process(text, table, columns_of(raw)))
