"""What somebody does first with an installed Sluice: `python installed.py COMMAND [train]` beside nothing but the
installed packages.

`make test-install` runs it in each fresh environment, in an empty folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import sluice
from sluice import Loader

ROWS = 40_000


def main(command: str, *more: str) -> None:
    assert "site-packages" in sluice.__file__, (
        f"this is not the installed package: {sluice.__file__}"
    )
    folder = Path("clicks")
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(4):
        columns = {
            "label": random.integers(0, 2, ROWS).astype(np.float32),
            "price": random.random(ROWS, np.float32),
            "item": random.integers(0, 1000, ROWS).astype(np.int32),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=10_000)
    assert "bench" in output(command, "--help")
    order = order_hash(command, str(folder))
    with Loader(str(folder), batch_size=4096, tuning="auto", run_dir="run") as loader:
        rows = sum(batch.rows for batch in loader)
        assert rows == 4 * ROWS // 4096 * 4096, rows
        assert loader.order_hash == order, (loader.order_hash, order)
    assert Path("run/report.html").stat().st_size
    output(command, "guess", str(folder), "--label", "label", "--out", "spec.toml")
    output(command, "etl", "--spec", "spec.toml", "--input", str(folder), "--output", "table")
    assert order_hash(command, "table")
    if more:
        trained = output(command, *more, "--data", "table", "--run-dir", "trained")
        assert json.loads(trained.splitlines()[-1])["steps"] > 0
    version = sys.version.split()[0]
    works = ", ".join(["--help", "bench", "Loader", "guess", "etl", *more])
    print(f"{command}, Python {version}: these work: {works}")


def order_hash(command: str, data: str) -> str:
    bench = output(command, "bench", data, "--batch-size", "4096", "--epochs", "1")
    return str(json.loads(bench.splitlines()[-1])["order_hash"])


def output(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
