"""Hugging Face datasets: Parquet streamed as Arrow batches, and its memory-mapped form, made beforehand."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch

from benchmarks.peers.arrow import blocks_of, texts_of
from benchmarks.peers.serve import Arm, Job, Prepared, serve, size_of
from benchmarks.peers.torch_loader import Batch, cut, transformed

os.environ |= {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
import datasets

ROWS = 32768  # shuffled at a time


def arms(job: Job, prepared: Prepared) -> dict[str, Arm]:
    if job.store:
        raise ValueError(
            "its Parquet streams need s3fs, which is not in benchmarks/peers/torch.lock"
        )
    columns = job.columns
    began = time.perf_counter()
    cache = os.path.join(job.folder, "hf")
    if job.convert:
        mapped = datasets.Dataset.from_parquet(
            list(job.files), columns=columns, cache_dir=cache
        ).with_format("arrow")
        prepared.seconds, prepared.bytes, prepared.settings = (
            time.perf_counter() - began,
            size_of(cache),
            "mapped",
        )

    def batches(table: pa.Table, random: np.random.Generator) -> Iterator[Batch]:
        order = random.permutation(table.num_rows)
        blocks = (*blocks_of(table, job, order), texts_of(table, job, order))
        return (transformed(job, batch) for batch in cut(job, blocks))

    class Streamed(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Batch]:
            random = np.random.default_rng()
            data = datasets.load_dataset(
                "parquet",
                data_files=list(job.files),
                split="train",
                streaming=True,
                columns=columns,
            ).with_format("arrow")
            info = torch.utils.data.get_worker_info()
            if info:
                data = data.shard(info.num_workers, info.id)
            for epoch in itertools.count():
                data.set_epoch(epoch)
                for table in data.iter(batch_size=ROWS):
                    yield from batches(table, random)

    class Mapped(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Batch]:
            info = torch.utils.data.get_worker_info()
            number, workers = (info.id, info.num_workers) if info else (0, 1)
            random = np.random.default_rng(number)
            while True:
                for at in random.permutation(len(mapped) // ROWS)[number::workers]:
                    yield from batches(mapped[int(at) * ROWS : (int(at) + 1) * ROWS], random)

    def run(data: torch.utils.data.IterableDataset, workers: int) -> Iterator[int]:
        loader = torch.utils.data.DataLoader(
            data, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None
        )
        for dense, _ids, _label in loader:
            yield len(dense)

    return {
        f"{name}, {workers} workers": lambda data=data, workers=workers: run(data, workers)
        for name, data in (
            ("Parquet streamed", Streamed()),
            *([("mapped Arrow", Mapped())] if job.convert else []),
        )
        for workers in (0, 2)
    }


if __name__ == "__main__":
    serve(arms)
