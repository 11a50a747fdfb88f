"""Whole jobs on Spark, and a run that follows them: where rows lie stays, is refused, or is accepted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sluice.dlrm import options
from sluice.dlrm.session.run import open_run
from sluice.etl.spec.row_identity import SplitMoved
from sluice.etl.spec.row_split import hash_of
from sluice.etl.table.sketch import Sketch
from sluice.etl.table.split_rows import SplitRows
from sluice.etl.table.table import FeatureTable
from tests.dlrm.rig import last_json
from tests.etl.jobs import Said, rows_of, run
from tests.etl.tables import column, columns_of, write_rows, write_spec
from tests.raises import assert_names

ROWS = 4000
COLUMNS = ("click:int", "id:int", "user:text", "price:float")


def spec(
    *columns: str, split: str = "{train = 0.6, test = 0.4}", table: str = "", more: str = ""
) -> str:
    return write_spec(
        columns,
        column("id", "dense", "fill"),
        column("user", "sparse", "hash, size = 4000"),
        more,
        table=f"split = {split}\nrow_group_rows = 512\n{table}",
        label="click",
    )


def noise(first: int = 0, rows: int = ROWS) -> pa.Table:
    drawn = np.random.default_rng(first + 5)
    return pa.table(
        {
            "click": drawn.integers(0, 2, rows),
            "id": np.arange(first, first + rows),
            "user": [f"u{n}" for n in drawn.integers(0, 3000, rows)],
            "price": drawn.random(rows),
        }
    )


def ids(table: FeatureTable, split: str) -> set[float]:
    return {row["id"] for row in rows_of(table, split)}


def test_a_table_whose_columns_change_is_followed_and_one_whose_rows_moved_is_not(tmp_path, forks):
    out, said = tmp_path / "t", Said()
    rows = noise()
    write_rows(tmp_path / "first.parquet", rows)
    write_rows(tmp_path / "more.parquet", rows.append_column("more", pa.array(np.arange(ROWS) % 7)))
    run(None, out, tmp_path / "first.parquet", text=spec(*COLUMNS))
    wider = spec(
        "more:int",
        *COLUMNS[::-1],
        more=column("more", "dense", "fill"),
    )
    run(None, out, tmp_path / "more.parquet", text=wider, mode="overwrite", said=said)
    tables = [FeatureTable.open(out, version) for version in (0, 1)]
    for split in ("train", "test"):
        assert ids(tables[0], split) == ids(tables[1], split)
    assert "warning" not in said.text
    assert tables[0].record.identity == tables[1].record.identity
    # What Spark's tasks gathered is what all rows at once make.
    rule = tables[0].record.identity
    keys = hash_of(
        columns_of(rows),
        rule.recognised,
        rule.seed,
    )
    number = rows["id"].to_numpy()
    for split, sketch in SplitRows.of([tables[1].record]).sketches[rule.recognition].items():
        there = np.isin(number, sorted(ids(tables[1], split)))
        assert sketch.to_json() == Sketch.of(keys[there]).to_json()

    words = (
        f"--run-dir {tmp_path}/run --data {out} --version 0 --follow --epochs 2 --batch-size 256 "
        "--width 8 --dense-layers 8 --over-layers 8 --tuning fixed"
    ).split()
    process = forks.train(*words, tmp=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    found = last_json(process)
    assert (found["version"], found["rows"], found["epochs"]) == (1, tables[1].rows_of("test"), 2)
    assert found["auc"] == pytest.approx(0.5, abs=0.07)  # 1,600 rows: five standard deviations

    write_rows(
        tmp_path / "again.parquet",
        pa.concat_tables([rows.slice(0, 500), noise(ROWS, 100)]).append_column(
            "more", pa.array([n % 7 for n in range(600)])
        ),
    )
    run(None, out, tmp_path / "again.parquet", text=wider, mode="append", said=said)
    assert_names(said.text, "warning:", 500, "600 rows")
    recut = wider.replace("train = 0.6, test = 0.4", "train = 0.3, test = 0.7")
    with pytest.raises(
        SplitMoved, match=r"^4\d(\.\d)? % of the rows of split 'test' lay in 'train' in version 2"
    ):
        run(None, out, tmp_path / "more.parquet", text=recut, mode="overwrite")
    assert FeatureTable.open(out).version == 2
    assert len(list((out / "data").iterdir())) == 3  # and nothing of it is left
    run(
        None,
        out,
        tmp_path / "more.parquet",
        text=recut,
        mode="overwrite",
        split_moved="accept",
        said=said,
    )
    assert_names(said.text, "warning:", "'train'", "version 2")
    resume = ["--run-dir", str(tmp_path / "run"), "--resume", "--follow", "--epochs", "3"]
    with pytest.raises(
        SplitMoved, match=r" 4\d(\.\d)? % of the rows of split 'test' were trained on"
    ):
        open_run(options.parse(resume))
    assert open_run(options.parse([*resume, "--split-moved", "accept"])).config.version == 3
