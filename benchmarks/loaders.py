"""Loaders side by side on one feature table, in one run, taking turns.

    python benchmarks/loaders.py TABLE [--batch-size 8192] [--seconds 3] [--rounds 5]

Every contender gives the same batches' shape: shuffled rows, float32 dense features and label, int32 ids, as torch
tensors. Figures are medians over the rounds; ratios are taken within a round, then their median.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from etl.program import UsageError, run, say
from etl.table import FeatureTable, TableError
from ingest.bench import consume
from ingest.columns import Columns
from ingest.decode import decode_rows_per_s
from ingest.loader import Loader
from ingest.plan import Part, Read
from ingest.source import RowGroups, source_of

Contender = Callable[[float], float]  # seconds → rows a second


def ours(table: FeatureTable, batch_size: int, reader: str) -> tuple[Contender, Callable[[], None]]:
    """Through bench's own path. The loader lives over all rounds; between them its workers wait for room."""
    loader = Loader(table, batch_size=batch_size, epochs=sys.maxsize, reader=reader)
    return lambda seconds: consume(loader, seconds, lambda: None).rows_per_s(), loader.close


def decode_only(table: FeatureTable, columns: Columns) -> Contender:
    groups = RowGroups(table.files_of("train"), columns.names)
    source = source_of("arrow", groups)
    return lambda seconds: max(decode_rows_per_s(source, groups, n, seconds / 3) for n in (1, 2, 4))


def tight_loop(table: FeatureTable, columns: Columns) -> Contender:
    """Decode, then one shuffled gather of each column into tensors of which batches would be slices; as many threads
    as cores, no queues, no order, each thread its own row groups. No loader that shuffles does less."""
    groups = RowGroups(table.files_of("train"), columns.names)
    every = [(f, g, n) for f, counts in enumerate(groups.row_groups) for g, n in enumerate(counts)]

    def work(number: int, threads: int, end: float, counts: list[int]) -> None:
        random = np.random.default_rng(number)
        most = max(rows for *_, rows in every)
        floats = torch.empty(len(columns.floats), most).numpy()
        ids = torch.empty(len(columns.sparse), most, dtype=torch.int32).numpy()
        for file, group, rows in itertools.cycle(every[number::threads]):
            table = groups.read(Read(file, group, rows, (Part(0, 0, 0, rows),)))
            order = random.permutation(rows)
            for block, names in ((floats, columns.floats), (ids, columns.sparse)):
                for row, name in enumerate(names):
                    source = table.column(name).chunk(0).to_numpy()
                    if source.dtype != block.dtype:
                        source = source.astype(block.dtype)
                    np.take(source, order, out=block[row, :rows], mode="clip")
            counts[number] += rows
            if time.perf_counter() > end:
                return

    def contender(seconds: float) -> float:
        threads = min(os.cpu_count() or 1, len(every))
        counts = [0] * threads
        began = time.perf_counter()
        workers = [threading.Thread(target=work, args=(n, threads, began + seconds, counts)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(counts) / (time.perf_counter() - began)

    return contender


class ShuffledBatches(torch.utils.data.IterableDataset):
    """What one writes by hand in half an hour: each worker reads its row groups, shuffles them, cuts batches."""

    def __init__(self, table: FeatureTable, columns: Columns, batch_size: int):
        self.files = [(f.path, len(f.row_group_rows)) for f in table.files_of("train")]
        self.floats, self.ids, self.dense = columns.floats, columns.sparse, len(columns.dense)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        number, of = (info.id, info.num_workers) if info else (0, 1)
        random = np.random.default_rng(number)
        groups = [(path, g) for path, count in self.files for g in range(count)][number::of]
        for path, group in (groups[i] for _ in itertools.count() for i in random.permutation(len(groups))):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            table = file.read_row_group(group, columns=[*self.floats, *self.ids])
            order = random.permutation(table.num_rows)
            floats = np.stack([table[n].to_numpy().astype(np.float32) for n in self.floats], 1)[order]
            ids = np.stack([table[n].to_numpy() for n in self.ids], 1)[order]
            for at in range(0, table.num_rows - self.batch_size + 1, self.batch_size):
                part = slice(at, at + self.batch_size)
                yield (torch.from_numpy(floats[part, :self.dense]), torch.from_numpy(ids[part]),
                       torch.from_numpy(floats[part, self.dense]))


def torch_loader(table: FeatureTable, columns: Columns, batch_size: int, workers: int) -> Contender:
    dataset = ShuffledBatches(table, columns, batch_size)

    def contender(seconds: float) -> float:
        batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers,
                                                   multiprocessing_context="forkserver" if workers else None))
        next(batches)
        rows, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            rows += len(next(batches)[2])
        return rows / spent

    return contender


def contenders(table: FeatureTable, batch_size: int) -> tuple[dict[str, Contender], list[Callable[[], None]]]:
    columns = Columns.of(table.fields)
    petastorm, close_petastorm = ours(table, batch_size, "petastorm")
    arrow, close_arrow = ours(table, batch_size, "arrow")
    return {"tight loop": tight_loop(table, columns), "decode only": decode_only(table, columns),
            "ours": petastorm, "ours, plain Arrow": arrow,
            **{f"torch DataLoader, {n} workers": torch_loader(table, columns, batch_size, n) for n in (0, 2)},
            }, [close_petastorm, close_arrow]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="a feature table with a train split")
    parser.add_argument("--batch-size", type=int, default=8192, help="rows of a batch (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loader (default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.seconds <= 0 or arguments.rounds < 1:
        raise UsageError("--seconds and --rounds are positive")
    found, closing = contenders(FeatureTable.open(arguments.table), arguments.batch_size)
    rates: dict[str, list[float]] = {name: [] for name in found}
    try:
        for number in range(arguments.rounds):
            for name, contender in found.items():
                rates[name].append(contender(arguments.seconds))
            say(f"round {number + 1}: " + ", ".join(f"{n} {r[-1] / 1e6:.2f} M" for n, r in rates.items()))
    finally:
        for close in closing:
            close()

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True)), 3)

    for name, values in rates.items():
        rate = statistics.median(values) / 1e6
        say(f"{name:30} {rate:8.2f} M rows/s   {ratio(name, 'tight loop'):5.2f} of the tight loop")
    peers = [name for name in rates if name.startswith("torch")]
    return {"batch_size": arguments.batch_size, "rounds": arguments.rounds, "seconds": arguments.seconds,
            "rows_per_s": {name: round(statistics.median(values)) for name, values in rates.items()},
            "of_tight_loop": ratio("ours", "tight loop"), "of_decode_only": ratio("ours", "decode only"),
            "times_torch_best": min(ratio("ours", name) for name in peers)}


if __name__ == "__main__":
    run(main, input_errors=(TableError,))
