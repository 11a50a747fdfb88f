"""litData: its own chunks, made beforehand, and its loader of Parquet, which needs an index of the files. In the best
form for a table, a sample of its chunks is a block of rows that were shuffled when it was written. A sample of Parquet
is a row. Its rows are shuffled within a row group, because the loader keeps a row group until it has given all of its
rows. Samples are decoded one by one: tensors took five times as long with its default, which decodes 256 together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from benchmarks.peers.arrow import opened, read
from benchmarks.peers.serve import Arm, Job, Prepared, serve, size_of

os.environ |= {"DISABLE_VERSION_CHECK": "1"}
from litdata import StreamingDataLoader, StreamingDataset, index_parquet_dataset, optimize
from litdata.streaming.item_loader import ParquetLoader

BLOCK = 1024


def samples(job: Job, at: tuple[str, int]) -> Iterator[dict[str, torch.Tensor]]:
    """The samples of a row group: blocks of its shuffled rows."""
    floats, ids = (
        torch.from_numpy(np.ascontiguousarray(part))
        for part in read(job, *at, np.random.default_rng(0))[:2]
    )
    for begin in range(0, len(ids) - BLOCK + 1, BLOCK):
        part = slice(begin, begin + BLOCK)
        yield {"floats": floats[part].clone(), "ids": ids[part].clone()}


def of_blocks(read: list[dict[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Floats and ids."""
    return (torch.cat([sample[name] for sample in read]) for name in ("floats", "ids"))


def of_rows(job: Job, read: list[dict[str, Any]]) -> Iterator[torch.Tensor]:
    """Floats and ids."""
    return (
        torch.from_numpy(np.array([*map(itemgetter(*names), read)], kind))
        for names, kind in ((job.floats, np.float32), (job.ids, np.int32))
    )


def collated(joined: Callable[[Any], Iterator[torch.Tensor]], read: Any) -> list[torch.Tensor]:
    floats, ids = joined(read)
    return [torch.log1p(floats[:, :-1]), ids, floats[:, -1]]


def streamed(
    folder: str, number: int, joined: Callable[[Any], Any], workers: int, **how: Any
) -> Iterator[int]:
    """Batches of so many samples."""
    loader = StreamingDataLoader(
        StreamingDataset(folder, shuffle=True, drop_last=True, batch_decode=0, **how),
        batch_size=number,
        num_workers=workers,
        collate_fn=partial(collated, joined),
        prefetch_factor=4 if workers else None,
    )
    while True:
        for dense, _ids, _label in loader:
            yield len(dense)


def arms(job: Job, prepared: Prepared) -> dict[str, Arm]:
    blocks, parquet = (os.path.join(job.folder, name) for name in ("blocks", "parquet"))
    os.mkdir(parquet)
    for number, path in enumerate(job.files):
        os.symlink(path, os.path.join(parquet, f"{number}.parquet"))
    index_parquet_dataset(parquet)
    began = time.perf_counter()
    optimize(partial(samples, job), job.row_groups, blocks, chunk_bytes="64MB", num_workers=1)
    prepared.seconds = time.perf_counter() - began
    prepared.bytes, prepared.settings = size_of(blocks), "blocks"
    of_parquet = partial(
        streamed,
        parquet,
        job.batch_size,
        partial(of_rows, job),
        item_shuffle_window=opened(job, job.files[0])[1].row_group(0).num_rows,
    )
    settings = {
        f"blocks of {BLOCK} rows": partial(
            streamed, blocks, job.batch_size // BLOCK, of_blocks, item_shuffle_window="full"
        )
    }
    for low_memory in (True, False):
        loader = ParquetLoader(low_memory=low_memory, columns=job.columns)
        settings[f"from Parquet, low_memory={low_memory}"] = partial(of_parquet, item_loader=loader)
    return {
        f"{name}, {workers} workers": partial(setting, workers=workers)
        for name, setting in settings.items()
        for workers in (0, 2)
    }


if __name__ == "__main__":
    serve(arms)
