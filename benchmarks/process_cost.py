"""Measures what a row costs more if its function runs in a process: the whole loader's processor time, in pairs.

    python -m benchmarks.process_cost [--pairs 5] [--epochs 4] [--lanes numbers,texts]

Lane `numbers` doubles 13 columns of batches; lane `texts` takes the lengths of texts of 40 letters, row by row as they
are stored. Both functions are cheap, so nearly all that a process adds is ours: copies, messages and checks, on both
sides. Each turn is a program of its own. It loads one epoch before it counts, and counts its worker's time too. On a
busy machine, compare two checkouts by running this in turns in both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.results import run_python
from sluice import Knobs, Loader, Transform
from sluice.common.lines import say
from sluice.common.program import run
from sluice.ingest.process.worker import core_seconds

ROWS, FILES = 2**19, 4
DENSE, IDS = [f"d{n}" for n in range(13)], [f"s{n}" for n in range(26)]


def double(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: 2 * column for name, column in columns.items()}


def length(columns: dict[str, Any]) -> dict[str, Any]:
    return {"length": pc.cast(pc.binary_length(columns["query"]), pa.float32())}


def lane(name: str) -> Transform:
    module = "benchmarks.process_cost"
    if name == "numbers":
        return Transform(f"{module}:double", "function", reads=DENSE)
    return Transform(f"{module}:length", "function", reads=["query"], gives={"length": "float32"})


def write(folder: str) -> None:
    chance = np.random.default_rng(0)
    letters = pa.array(["".join(map(chr, word)) for word in chance.integers(97, 123, (4096, 40))])
    for number in range(FILES):
        rows = ROWS // FILES
        columns: dict[str, Any] = {name: chance.random(rows, np.float32) for name in DENSE}
        columns |= {name: chance.integers(0, 10**5, rows, np.int32) for name in IDS}
        columns["query"] = letters.take(pa.array(chance.integers(0, len(letters), rows)))
        columns["label"] = chance.integers(0, 2, rows).astype(np.float32)
        pq.write_table(
            pa.table(columns), f"{folder}/{number}.parquet", row_group_size=2**15, compression="lz4"
        )


def turn(folder: str, name: str, backend: str, epochs: int) -> float:
    """Returns the processor time of a row in nanoseconds."""
    dense = [*DENSE, *(["length"] if name == "texts" else [])]
    with Loader(
        sorted(map(str, Path(folder).iterdir())),
        batch_size=8192,
        read_ahead_epochs=sys.maxsize,
        roles={"label": "label", "dense": dense, "sparse": IDS},
        transforms=[lane(name)],
        tuning="fixed",
        knobs=Knobs(workers={"function": 1}, backend={"function": backend}),
    ) as loader:
        deque(loader, maxlen=0)

        def spent() -> float:
            workers = loader.pipeline.worker_pids
            assert bool(workers) == (backend == "process")
            return time.process_time() + sum(core_seconds(pid)[0] for pid in workers)

        began = spent()
        for _ in range(epochs):
            deque(loader, maxlen=0)
        return 1e9 * (spent() - began) / (epochs * ROWS)


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.process_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lanes", default="numbers,texts")
    parser.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.turn:
        return {"ns": turn(*args.turn, args.epochs)}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        words = ("-m", "benchmarks.process_cost", "--epochs", args.epochs, "--turn", folder)
        for name in args.lanes.split(","):
            more = []
            for _ in range(args.pairs):
                thread, process = (
                    run_python(*words, name, backend)["last"]["ns"]
                    for backend in ("thread", "process")
                )
                more.append(process - thread)
                say(
                    f"{name}: {thread:6.0f} ns a row in a thread, {more[-1]:4.0f} more in a process"
                )
            result[name] = round(statistics.median(more), 1)
    return result


if __name__ == "__main__":
    run(main)
