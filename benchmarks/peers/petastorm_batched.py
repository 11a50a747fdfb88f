"""Petastorm's BatchedDataLoader on an Arrow that it supports: whole row groups through its vectorised shuffle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from petastorm import make_batch_reader
from petastorm.pytorch import BatchedDataLoader

from benchmarks.peers.serve import Arm, Job, Prepared, serve


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    warnings.simplefilter("ignore")
    urls = [f"file://{path}" for path in job.files]

    def run(workers: int, buffer: int) -> Iterator[int]:
        """With a buffer, rows are shuffled in it; without, each row group is, by the thread that reads it."""
        torch.set_num_threads(1)
        with make_batch_reader(
            urls,
            schema_fields=[*job.floats, *job.ids],
            num_epochs=None,
            workers_count=workers,
            results_queue_size=10,
            convert_early_to_numpy=True,
            shuffle_rows=not buffer,
        ) as reader:
            for batch in BatchedDataLoader(
                reader, batch_size=job.batch_size, shuffling_queue_capacity=buffer
            ):
                floats = torch.stack([batch[n].float() for n in job.floats[:-1]], 1)
                dense, _ids = torch.log1p(floats), torch.stack([batch[n] for n in job.ids], 1)
                yield len(dense)

    return {
        f"{workers} threads, "
        + (
            f"a buffer of {buffer} rows" if buffer else "row groups shuffled"
        ): lambda workers=workers, buffer=buffer: run(workers, buffer)
        for workers, buffer in ((1, 0), (2, 0), (4, 0), (1, 40960), (2, 40960), (2, 262_144))
    }


if __name__ == "__main__":
    serve(arms)
