"""Measures several loaders on one feature table, in turns in one run.

    python -m benchmarks.loaders [TABLE] [--batch-size 8192] [--seconds 3] [--rounds 5]
    python -m benchmarks.loaders --subset              (`make bench SUBSET=1`) less of everything

Every contender gives the same batches' shape: shuffled rows, float32 dense features and label, int32 ids, as torch
tensors. Figures are medians over the rounds; ratios are taken within a round, then their median.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.small_table import small_table
from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.etl.table.table import FeatureTable
from sluice.ingest.columns import Columns
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.read.sources import Reading, source_of
from sluice.ingest.row_order import Order, Read, WindowPart
from sluice.ingest.stages.transform import Transform
from sluice.tools.decode_limit import decode_rows_per_s

Contender = Callable[[float], float]  # seconds → rows a second


@dataclass(frozen=True)
class Extent:
    """How much is measured: the rows of a table that is made, the seconds of a turn, the turns of each loader."""

    rows: int
    seconds: float
    rounds: int


WHOLE, SUBSET = Extent(1_600_000, 3.0, 5), Extent(400_000, 1.0, 4)


def ours(
    table: FeatureTable,
    batch_size: int,
    reader: str,
    shuffle: bool = True,
    transforms: Sequence[Transform] = (),
) -> tuple[Contender, Callable[[], None]]:
    """One iteration goes on over all turns. What was read ahead between turns is used up before the clock starts."""
    loader = BatchLoader(
        table,
        batch_size=batch_size,
        read_ahead_epochs=sys.maxsize,
        transforms=transforms,
        order=Order(shuffle=shuffle),
        reading=Reading(reader=reader),
    )
    batches = (batch for _ in itertools.count() for batch in loader)
    ahead = 2 * (loader.minimum_memory - loader.memory_used())

    def contender(seconds: float) -> float:
        used = 0
        while used < ahead:
            batch = next(batches)
            used += 4 * len(batch.values) + batch.dense.nbytes
        rows, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            rows += next(batches).rows
        return rows / spent

    return contender, loader.close


def decode_only(table: FeatureTable, columns: Columns) -> Contender:
    groups = RowGroupReader(table.files_of("train"), columns.names)
    source = source_of("arrow", groups)
    return lambda seconds: max(decode_rows_per_s(source, groups, n, seconds / 3) for n in (1, 2, 4))


def tight_loop(table: FeatureTable, columns: Columns) -> Contender:
    """Decode, then one shuffled gather of each column into tensors of which batches would be slices; as many threads
    as cores, no queues, no order, each thread its own row groups. No loader that shuffles does less."""
    groups = RowGroupReader(table.files_of("train"), columns.names)
    every = [(f, g, n) for f, counts in enumerate(groups.row_groups) for g, n in enumerate(counts)]

    def work(number: int, threads: int, end: float, counts: list[int]) -> None:
        random = np.random.default_rng(number)
        most = max(rows for *_, rows in every)
        floats = torch.empty(len(columns.floats), most).numpy()
        ids = torch.empty(len(columns.sparse), most, dtype=torch.int32).numpy()
        for file, group, rows in itertools.cycle(every[number::threads]):
            table = groups.read(Read(file, group, rows, (WindowPart(0, 0, 0, rows),)))
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
        workers = [
            threading.Thread(target=work, args=(n, threads, began + seconds, counts))
            for n in range(threads)
        ]
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
        for path, group in (
            groups[i] for _ in itertools.count() for i in random.permutation(len(groups))
        ):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            table = file.read_row_group(group, columns=[*self.floats, *self.ids])
            order = random.permutation(table.num_rows)
            floats = np.stack([table[n].to_numpy().astype(np.float32) for n in self.floats], 1)[
                order
            ]
            ids = np.stack([table[n].to_numpy() for n in self.ids], 1)[order]
            for at in range(0, table.num_rows - self.batch_size + 1, self.batch_size):
                part = slice(at, at + self.batch_size)
                yield (
                    torch.from_numpy(floats[part, : self.dense]),
                    torch.from_numpy(ids[part]),
                    torch.from_numpy(floats[part, self.dense]),
                )


def torch_loader(table: FeatureTable, columns: Columns, batch_size: int, workers: int) -> Contender:
    dataset = ShuffledBatches(table, columns, batch_size)

    def contender(seconds: float) -> float:
        batches = iter(
            torch.utils.data.DataLoader(
                dataset,
                batch_size=None,
                num_workers=workers,
                multiprocessing_context="forkserver" if workers else None,
            )
        )
        next(batches)
        rows, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            rows += len(next(batches)[2])
        return rows / spent

    return contender


def mapped_binary(
    table: FeatureTable, columns: Columns, batch_size: int, folder: Path
) -> Contender:
    """Rows shuffled and transformed once and for all, written as two arrays and mapped into memory: what a loader
    costs that has nothing to decode, nor to shuffle but the order of its batches."""
    whole = pq.read_table(
        [f.path for f in table.files_of("train")],
        columns=[*columns.floats, *columns.sparse],
        partitioning=None,
    )
    order = np.random.default_rng(0).permutation(whole.num_rows)
    blocks = []
    for name, names, kind in (
        ("floats", columns.floats, np.float32),
        ("ids", columns.sparse, np.int32),
    ):
        path = folder / f"{name}.npy"
        np.save(path, np.stack([whole[n].to_numpy().astype(kind)[order] for n in names]))
        blocks.append(np.load(path, mmap_mode="r"))
    batches = whole.num_rows // batch_size

    def contender(seconds: float) -> float:
        random, rows, began = np.random.default_rng(0), 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            for at in random.permutation(batches):
                for block in blocks:
                    torch.from_numpy(block[:, at * batch_size : (at + 1) * batch_size].copy())
                rows += batch_size
        return rows / spent

    return contender


def made_table(folder: Path, rows: int) -> FeatureTable:
    """Synthetic clicks, as the ETL lays them out."""
    say(f"making {rows:,} rows of 13 numbers and 26 ids in {folder}")
    return small_table(folder / "table", rows=rows, row_group_rows=32768, splits={"train": 1.0})


def contenders(
    table: FeatureTable, batch_size: int, folder: Path
) -> tuple[dict[str, Contender], list[Callable[[], None]]]:
    columns = Columns.of(table.fields)
    petastorm, close_petastorm = ours(table, batch_size, "petastorm")
    unshuffled, close_unshuffled = ours(table, batch_size, "petastorm", shuffle=False)
    arrow, close_arrow = ours(table, batch_size, "arrow")
    return {
        "decode only": decode_only(table, columns),
        "tight loop": tight_loop(table, columns),
        "ours": petastorm,
        "ours, plain Arrow": arrow,
        "ours, unshuffled": unshuffled,
        **{
            f"torch DataLoader, {n} workers": torch_loader(table, columns, batch_size, n)
            for n in (0, 2)
        },
        "mapped binary files": mapped_binary(table, columns, batch_size, folder),
    }, [close_petastorm, close_unshuffled, close_arrow]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "table", nargs="?", help="a feature table with a train split (default: a new one)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8192, help="rows of a batch (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, help=f"of each turn (default {WHOLE.seconds:g})")
    parser.add_argument("--rounds", type=int, help=f"turns of each loader (default {WHOLE.rounds})")
    parser.add_argument(
        "--subset",
        action="store_true",
        help="less of everything: benchmarks/subset.py says whether "
        "its order of loaders is that of the whole",
    )
    arguments = parser.parse_args(argv)
    extent = SUBSET if arguments.subset else WHOLE
    arguments.seconds = extent.seconds if arguments.seconds is None else arguments.seconds
    arguments.rounds = extent.rounds if arguments.rounds is None else arguments.rounds
    if arguments.seconds <= 0 or arguments.rounds < 1:
        raise UsageError("--seconds and --rounds are positive")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        table = (
            FeatureTable.open(arguments.table)
            if arguments.table
            else made_table(Path(folder), extent.rows)
        )
        found, closing = contenders(table, arguments.batch_size, Path(folder))
        for close in closing:
            stack.callback(close)
        rates: dict[str, list[float]] = {name: [] for name in found}
        for number in range(arguments.rounds):
            for name, contender in found.items():
                rates[name].append(contender(arguments.seconds))
            say(
                f"round {number + 1}: "
                + ", ".join(f"{n} {r[-1] / 1e6:.2f} M" for n, r in rates.items())
            )

    def ratio(one: str, other: str) -> float:
        return round(
            statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True)), 3
        )

    for name, values in rates.items():
        rate = statistics.median(values) / 1e6
        say(f"{name:30} {rate:8.2f} M rows/s   {ratio(name, 'tight loop'):5.2f} of the tight loop")
    peers = [name for name in rates if name.startswith("torch")]
    return {
        "batch_size": arguments.batch_size,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "rows_per_s": {name: round(statistics.median(values)) for name, values in rates.items()},
        "of_tight_loop": ratio("ours", "tight loop"),
        "of_decode_only": ratio("ours", "decode only"),
        "unshuffled_of_decode_only": ratio("ours, unshuffled", "decode only"),
        "times_torch_best": min(ratio("ours", name) for name in peers),
    }


if __name__ == "__main__":
    run(main)
