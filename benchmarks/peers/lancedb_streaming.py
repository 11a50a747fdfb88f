"""LanceDB's StreamingDataset over a table that is made beforehand. It yields samples: as its guide writes tables, a
sample is a row; in its best form for a table, a sample is a block of rows that were shuffled when it was written.

Apart from that, batches by hand: Lance's own scan of a table with a column for each feature.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lancedb.streaming import StreamingDataLoader, StreamingDataset

from benchmarks.peers.arrow import blocks_of, read
from benchmarks.peers.serve import Arm, Job, Prepared, serve, size_of

SINGLE = 100_000  # rows of the form with a sample a row, which is slow
BLOCK, SCANNED = 1024, 32768


def blocks(job: Job, rows: int) -> Iterator[pa.RecordBatch]:
    """Blocks of so many shuffled rows: a list of their floats beside a list of their ids."""
    random = np.random.default_rng(0)
    for path, group in job.row_groups:
        columns = []
        for part in read(job, path, group, random)[:2]:
            whole = len(part) // rows * rows
            values = pa.array(np.ascontiguousarray(part[:whole]).reshape(-1))
            columns.append(pa.FixedSizeListArray.from_arrays(values, rows * part.shape[1]))
        yield pa.record_batch(columns, names=["floats", "ids"])


class Samples:
    """The samples of a batch that LanceDB has read: floats and ids of one row, or of one block."""

    def __init__(self, job: Job):
        self.widths = {"floats": len(job.floats), "ids": len(job.ids)}

    def __call__(self, batch: pa.RecordBatch) -> list[tuple[np.ndarray, ...]]:
        columns = (
            batch.column(name).flatten().to_numpy().reshape(batch.num_rows, -1, width)
            for name, width in self.widths.items()
        )
        return list(zip(*columns, strict=True))


def collated(samples: list[tuple[np.ndarray, ...]]) -> tuple[torch.Tensor, ...]:
    floats, ids = (torch.from_numpy(np.concatenate(part)) for part in zip(*samples, strict=True))
    return torch.log1p(floats[:, :-1]), ids, floats[:, -1]


def streamed(
    table: lancedb.table.Table, job: Job, rows: int, clump: int, workers: int
) -> Iterator[int]:
    """Batches of samples of so many rows; workers share the table's splits."""
    samples = job.batch_size // rows
    for epoch in itertools.count():
        data = StreamingDataset(
            table,
            num_splits=max(1, workers),
            epoch=epoch,
            shuffle_clump_size=clump,
            read_batch_size=samples,
            transform=Samples(job),
        )
        loader = StreamingDataLoader(
            data,
            batch_size=samples,
            num_workers=workers,
            collate_fn=collated,
            prefetch_factor=4 if workers else None,
            multiprocessing_context="forkserver" if workers else None,
        )
        for dense, _ids, _label in loader:
            yield len(dense)


def scanned(table: lance.LanceDataset, job: Job) -> Iterator[int]:
    """Fragments in random order; the rows of each batch of the scan are shuffled, and cut into batches."""
    random, size = np.random.default_rng(0), job.batch_size
    fragments = table.get_fragments()
    while True:
        order = [fragments[n] for n in random.permutation(len(fragments))]
        scanner = table.scanner(fragments=order, batch_size=SCANNED, batch_readahead=4)
        for batch in scanner.to_batches():
            floats, ids = blocks_of(batch, job, random.permutation(batch.num_rows))
            for at in range(0, len(ids) - size + 1, size):
                part = slice(at, at + size)
                dense = torch.log1p(torch.from_numpy(floats[part, :-1]))
                _rest = torch.from_numpy(ids[part]), torch.from_numpy(floats[part, -1])
                yield len(dense)


def arms(job: Job, prepared: Prepared) -> dict[str, Arm]:
    store = lancedb.connect(os.path.join(job.folder, "lance"))
    rows = pa.Table.from_batches(itertools.islice(blocks(job, 1), 1 + SINGLE // SCANNED))[:SINGLE]
    single = store.create_table("rows", rows)
    began = time.perf_counter()
    block = store.create_table("blocks", pa.Table.from_batches(blocks(job, BLOCK)))
    prepared.seconds = time.perf_counter() - began
    prepared.bytes = size_of(os.path.join(job.folder, "lance", "blocks.lance"))
    prepared.settings = "blocks"
    names = [*job.floats, *job.ids]
    whole = pa.concat_tables(pq.ParquetFile(path).read(columns=names) for path in job.files)
    tables = {
        version: lance.write_dataset(
            whole,
            os.path.join(job.folder, version),
            data_storage_version=version,
            max_rows_per_file=4 * SCANNED,
        )
        for version in ("2.0", "2.2")
    }
    return {
        **{
            f"a sample a row, clumps of {clump}": lambda clump=clump: streamed(
                single, job, 1, clump, 0
            )
            for clump in (1, 1024)
        },
        **{
            f"blocks of {BLOCK} rows, {workers} workers": lambda w=workers: streamed(
                block, job, BLOCK, 1, w
            )
            for workers in (0, 2)
        },
        **{
            f"scan of format {version}": lambda t=table: scanned(t, job)
            for version, table in tables.items()
        },
    }


if __name__ == "__main__":
    serve(arms)
