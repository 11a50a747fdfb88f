"""Compares a pure-Python function over texts in Sluice with the same one in torch's DataLoader: rows/s, time a row.

    python -m benchmarks.texts

Texts of 20 to 2,000 bytes lie in row groups of 32,768 rows. Each turn is a process of its own, which loads three epochs
after a first one. Another lane is first in each round. Rows/s mean something only on a quiet machine. The processor
time is that of all processes. Both are medians over the rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.results import run_python
from sluice import Knobs, Loader, Transform
from sluice.common.program import run, say

ROWS, GROUP, BATCH, EPOCHS, ROUNDS = 2**18, 2**15, 2**12, 3, 9
GIVES = {"length": "float32", "words": "float32", "first": "int32"}
LANES = ("torch 1", "torch 2", "torch 4", "sluice auto", "sluice thread", "sluice process")


def parse_texts(columns: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the length of each text, the number of its words, and an id for the first one."""
    texts = columns["query"].to_pylist()
    words = [text.split() for text in texts]
    return {
        "length": list(map(len, texts)),
        "words": list(map(len, words)),
        "first": [int(several[0], 36) % 1000 for several in words],
    }


class TextBatches(torch.utils.data.IterableDataset[list[torch.Tensor]]):
    """What one writes by hand: each worker reads, parses, shuffles and cuts row groups of its own."""

    def __init__(self, path: str):
        self.path = path

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        worker, random = torch.utils.data.get_worker_info(), np.random.default_rng(0)
        file = pq.ParquetFile(self.path)
        for group in random.permutation(ROWS // GROUP)[worker.id :: worker.num_workers]:
            stored = file.read_row_group(group, use_threads=False)
            made = parse_texts({"query": stored["query"]})
            arrays = [np.array(made[name], kind) for name, kind in GIVES.items()]
            arrays.append(stored["label"].to_numpy())
            for part in np.split(random.permutation(GROUP), GROUP // BATCH):
                yield [torch.from_numpy(array[part]) for array in arrays]


def measure(lane: str, path: str) -> dict[str, float]:
    kind, how = lane.split()
    loader: Any
    if kind == "torch":
        loader = torch.utils.data.DataLoader(
            TextBatches(path), None, num_workers=int(how), persistent_workers=True
        )
    else:
        knobs = None
        if how != "auto":
            knobs = Knobs(workers={"parse_texts": 2}, backend={"parse_texts": how})
        loader = Loader(
            path,
            batch_size=BATCH,
            read_ahead_epochs=EPOCHS + 2,  # the workers must live at the last look
            roles={"label": "label", "dense": ["length", "words"], "sparse": "first"},
            transforms=[Transform("benchmarks.texts:parse_texts", reads=["query"], gives=GIVES)],
            knobs=knobs,
        )
    taken = []
    for _ in range(EPOCHS + 1):
        for _ in loader:
            pass
        me = psutil.Process()
        times = [one.cpu_times() for one in (me, *me.children(recursive=True))]
        taken.append((time.perf_counter(), sum(one.user + one.system for one in times)))
    seconds, cpu_s = np.subtract(taken[-1], taken[0])
    return {"rows_per_s": EPOCHS * ROWS / seconds, "us_a_row": 1e6 * cpu_s / EPOCHS / ROWS}


def main(argv: list[str]) -> dict[str, Any]:
    if argv:  # a turn
        return measure(*argv)
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(20), np.log(2000), ROWS)).astype(int)
    texts = ["running shoes 42 " * (size // 17) + "red" for size in sizes]
    table = pa.table({"label": random.integers(0, 2, ROWS), "query": texts})
    found: dict[str, list[dict[str, float]]] = {lane: [] for lane in LANES}
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        pq.write_table(table, file.name, row_group_size=GROUP)
        for turn in range(ROUNDS):
            for lane in (*LANES[turn % 6 :], *LANES[: turn % 6]):
                found[lane].append(run_python("-m", "benchmarks.texts", lane, file.name)["last"])
                say(f"{lane}: {found[lane][-1]}")
    return {
        lane: {name: statistics.median(one[name] for one in several) for name in several[0]}
        for lane, several in found.items()
    }


if __name__ == "__main__":
    run(main)
