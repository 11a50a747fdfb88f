"""What one writes by hand in half an hour: a torch DataLoader whose workers read, shuffle and cut their row groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.peers.arrow import read
from benchmarks.peers.functions import apply
from benchmarks.peers.serve import Arm, Job, Prepared, serve

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cut(job: Job, blocks: tuple[np.ndarray, ...]) -> Iterator[tuple[np.ndarray, ...]]:
    """Cuts floats, ids and texts into batches. What is left over is dropped."""
    for at in range(0, len(blocks[0]) - job.batch_size + 1, job.batch_size):
        yield tuple(block[at : at + job.batch_size] for block in blocks)


def transformed(job: Job, batch: tuple[np.ndarray, ...]) -> Batch:
    """The user's function over a batch, as tensors. The logarithm is torch's own."""
    floats, ids, texts = batch
    dense = (
        torch.log1p(torch.from_numpy(floats[:, :-1]))
        if job.function == "log1p"
        else torch.from_numpy(apply(job.function, floats[:, :-1], texts))
    )
    return dense, torch.from_numpy(ids), torch.from_numpy(floats[:, -1])


class ShuffledBatches(torch.utils.data.IterableDataset):
    def __init__(self, job: Job):
        self.job, self.groups = job, job.row_groups

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        random, mine = np.random.default_rng(number), self.groups[number::workers]
        for path, group in (
            mine[i] for _ in itertools.count() for i in random.permutation(len(mine))
        ):
            for batch in cut(self.job, read(self.job, path, group, random, threads=info is None)):
                yield transformed(self.job, batch)


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    data = ShuffledBatches(job)

    def run(workers: int, ahead: int | None, context: str | None) -> Iterator[int]:
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=ahead,
            multiprocessing_context=context,
        )
        for dense, _ids, _label in loader:
            yield len(dense)

    return {
        "in the trainer's process": lambda: run(0, None, None),
        "1 worker": lambda: run(1, 4, "forkserver"),
        "2 workers": lambda: run(2, 4, "forkserver"),
        "4 workers": lambda: run(4, 4, "forkserver"),
    }


if __name__ == "__main__":
    serve(arms)
