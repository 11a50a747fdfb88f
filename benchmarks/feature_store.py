"""Measures the store of examples/feature_store.py on one core: point reads, keys by columns, and rows as of a time.

    python -m benchmarks.feature_store [--rows 300000] [--users 50000]

The table is made by `sluice etl`: a key, a time, a label and 20 numbers. The figures are rates per second of
processor time, the best of three turns. The aim is 10,000 point reads per second.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, run_python
from sluice.common.lines import say
from sluice.common.program import run

sys.path.insert(0, str(ROOT / "examples"))
from feature_store import FeatureStore

SPEC = """
[input]
format = "tsv"
columns = ["user:text", "at:float", "x1..x20:float", "label:int"]

[table]
split = {train = 1.0}

[[column]]
name = "user"
role = "key"

[[column]]
name = "at"
role = "time"

[[column]]
name = "label"
role = "label"

[[column]]
match = "x*"
role = "dense"
ops = [{op = "fill", value = 0}]
"""
_TURNS, _ASKED, _LAST = 3, 50_000, 10**6


def made(folder: Path, rows: int, users: int) -> Path:
    draw = random.Random(1)
    (folder / "spec.toml").write_text(SPEC)
    with (folder / "rows.tsv").open("w") as file:
        for _ in range(rows):
            numbers = "\t".join(f"{draw.random():.4f}" for _ in range(20))
            file.write(
                f"u{draw.randrange(users)}\t{draw.randrange(_LAST)}\t{numbers}\t{draw.randrange(2)}\n"
            )
    paths = {"--spec": "spec.toml", "--input": "rows.tsv", "--output": "table"}
    words = [word for option, name in paths.items() for word in (option, folder / name)]
    run_python("-m", "sluice", "etl", "--engine", "local", *words)
    return folder / "table"


def rate(work: Callable[[], Any], count: int) -> int:
    """Returns the calls per second of processor time in the best turn."""
    times = []
    for _ in range(_TURNS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return round(count / min(times))


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--users", type=int, default=50_000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        table = made(Path(folder), args.rows, args.users)
        began = time.process_time()
        store = FeatureStore.open(table)
        opened = time.process_time() - began
        draw = random.Random(2)
        keys = [
            key for key in (f"u{draw.randrange(args.users)}" for _ in range(_ASKED)) if key in store
        ]
        times = [draw.randrange(_LAST) for _ in keys]
        figures = {
            "rows": args.rows,
            "keys": len(store),
            "columns": store.values.num_columns,
            "open_cpu_s": round(opened, 2),
            "point_reads_per_s": rate(lambda: [store[key] for key in keys], len(keys)),
            "newest_per_s": rate(lambda: store.newest(keys), len(keys)),
            "as_of_per_s": rate(lambda: store.as_of(keys, times, before=True), len(keys)),
        }
    say(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    run(main)
