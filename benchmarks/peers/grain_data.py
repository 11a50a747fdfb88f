"""Grain: row groups as a random-access source, read and shuffled by its threads or by its processes."""

from __future__ import annotations

from collections.abc import Iterator

import grain.python as grain
import numpy as np

from benchmarks.peers.arrow import read
from benchmarks.peers.serve import Arm, Job, Prepared, serve
from benchmarks.peers.torch_loader import cut, transformed


class RowGroups:
    """Each element is the batches of a row group."""

    def __init__(self, job: Job):
        self.job, self.groups = job, job.row_groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> list[tuple[np.ndarray, ...]]:
        return list(cut(self.job, read(self.job, *self.groups[number], np.random.default_rng())))


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    def run(options: dict[str, int], processes: int) -> Iterator[int]:
        data = (
            grain.MapDataset.source(RowGroups(job))
            .seed(0)
            .shuffle()
            .repeat()
            .map(lambda batches: [transformed(job, batch) for batch in batches])
            .to_iter_dataset(grain.ReadOptions(**options))
        )
        if processes:
            data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes))
        for batches in data:
            for dense, _ids, _label in batches:
                yield len(dense)

    few = {"num_threads": 2, "prefetch_buffer_size": 8}
    return {
        "its defaults": lambda: run({}, 0),
        "2 threads, 8 row groups ahead": lambda: run(few, 0),
        "1 process": lambda: run(few, 1),
        "2 processes": lambda: run(few, 2),
    }


if __name__ == "__main__":
    serve(arms)
