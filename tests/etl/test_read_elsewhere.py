"""docs/read-elsewhere.md: what other programs read is the newest version, with bags as lists."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_readme import blocks
from tests.etl.jobs import rows_of, run
from tests.etl.tables import column, write_rows, write_spec

PAGE = "docs/read-elsewhere.md"
SPEC = write_spec(
    "label:int tags:texts n:int",
    column("tags", "id_list", "hash, size = 90"),
    column("n", "time"),
    table="split = {train = 0.7, test = 0.3}",
)


SHOWN = {
    "pandas": "import json; print(json.dumps(rows.to_dict('list')))",
    "polars": "import json; print(json.dumps(rows.to_dict(as_series=False)))",
    "duckdb": "import json; print(json.dumps(rows))",
}


@pytest.mark.parametrize("program", ["pandas", "polars", "duckdb"])
def test_each_snippet_reads_the_newest_version_and_no_replaced_file(tmp_path, monkeypatch, program):
    pytest.importorskip(program)
    monkeypatch.chdir(tmp_path)
    for count, mode in ((40, "create"), (30, "overwrite"), (20, "append")):
        tags = pa.array([[f"t{n % 7}", "x"][: n % 3] for n in range(count)], pa.list_(pa.string()))
        numbers = np.arange(count) + 100 * (mode == "append")
        rows = write_rows(
            tmp_path / f"{mode}.parquet", label=[0, 1] * (count // 2), tags=tags, n=numbers
        )
        run(None, tmp_path / "table", rows, text=SPEC, mode=mode)
    stored = rows_of(tmp_path / "table")
    assert len(stored) == 50
    # The files of the first version are still there, which a listing would read.
    files = list((tmp_path / "table" / "data").rglob("*.parquet"))
    assert sum(pq.ParquetFile(file).metadata.num_rows for file in files) == 90
    [block] = [
        block
        for block in blocks("py", PAGE)
        if f"import {program}" in block or (program == "pandas" and "to_pandas" in block)
    ]
    # Their threads must not stay in this process.
    done = subprocess.run(
        [sys.executable, "-c", block + SHOWN[program]],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    read = json.loads(done.stdout)
    if program == "duckdb":
        assert {split: count for split, count, _ in read} == {
            split: len(rows_of(tmp_path / "table", split)) for split in ("train", "test")
        }
        return
    want = {
        row["n"]: (row["label"], np.frombuffer(row["tags"] or b"", "<u4").tolist())
        for row in stored
    }
    assert any(len(bag) == 2 for _, bag in want.values())
    got = zip(*(read[name] for name in ("n", "label", "tags")), strict=True)
    assert {n: (label, bag) for n, label, bag in got} == want
    assert {*read["split"]} == {"train", "test"}
