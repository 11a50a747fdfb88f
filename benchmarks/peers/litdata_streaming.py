"""litData: its own chunks, made beforehand. As its guide writes tables, a sample is a row; in its best form for a
table, a sample is a block of rows that were shuffled when it was written. Samples are decoded one by one: tensors took
five times as long with its default, which decodes 256 together.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.peers.arrow import read
from benchmarks.peers.serve import Arm, Job, Prepared, serve, size_of

os.environ |= {"DISABLE_VERSION_CHECK": "1"}
from litdata import StreamingDataLoader, StreamingDataset, optimize

SINGLE = 100_000  # rows of the form with a sample a row, which is slow
BLOCK = 1024


def samples(job: Job, rows: int, at: tuple[str, int]) -> Iterator[dict[str, torch.Tensor]]:
    """The samples of a row group: so many of its shuffled rows each."""
    floats, ids = (
        torch.from_numpy(np.ascontiguousarray(part))
        for part in read(job, *at, np.random.default_rng(0))[:2]
    )
    for begin in range(0, len(ids) - rows + 1, rows):
        part = slice(begin, begin + rows)
        yield {"floats": floats[part].clone(), "ids": ids[part].clone()}


def collated(read: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    floats, ids = (torch.cat([sample[name] for sample in read]) for name in ("floats", "ids"))
    return torch.log1p(floats[:, :-1]), ids, floats[:, -1]


def streamed(folder: str, number: int, workers: int) -> Iterator[int]:
    """Batches of so many samples."""
    loader = StreamingDataLoader(
        StreamingDataset(
            folder, shuffle=True, drop_last=True, batch_decode=0, item_shuffle_window="full"
        ),
        batch_size=number,
        num_workers=workers,
        collate_fn=collated,
        prefetch_factor=4 if workers else None,
    )
    while True:
        for dense, _ids, _label in loader:
            yield len(dense)


def arms(job: Job, prepared: Prepared) -> dict[str, Arm]:
    def written(name: str, rows: int, groups: list[tuple[str, int]]) -> str:
        folder = os.path.join(job.folder, name)
        optimize(
            partial(samples, job, rows),
            groups,
            folder,
            chunk_bytes="64MB",
            num_workers=1,
            verbose=False,
        )
        return folder

    most = next(n for n in itertools.count(1) if n * 32768 >= SINGLE)
    single = written("rows", 1, job.row_groups[:most])
    began = time.perf_counter()
    block = written("blocks", BLOCK, job.row_groups)
    prepared.seconds, prepared.bytes, prepared.settings = (
        time.perf_counter() - began,
        size_of(block),
        "blocks",
    )
    return {
        f"{name}, {workers} workers": lambda f=folder, n=job.batch_size // rows, w=workers: (
            streamed(f, n, w)
        )
        for name, folder, rows in (
            ("a sample a row", single, 1),
            (f"blocks of {BLOCK} rows", block, BLOCK),
        )
        for workers in (0, 2)
    }


if __name__ == "__main__":
    serve(arms)
