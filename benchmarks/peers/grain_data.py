"""Grain: row groups as a random-access source, read and shuffled by its threads or by its processes.

Its usual batches are of one row group. With our shuffle, a batch has equally many rows of each of eight row groups, and
each row group is permuted by a seed of its own."""

from __future__ import annotations

from collections.abc import Iterator

import grain.python as grain
import numpy as np

from benchmarks.peers.arrow import read
from benchmarks.peers.serve import Arm, Job, Prepared, serve
from benchmarks.peers.torch_loader import cut, transformed

MIXED = 8


class RowGroups:
    """Each element is the batches of a row group."""

    def __init__(self, job: Job):
        self.job, self.groups = job, job.row_groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> list[tuple[np.ndarray, ...]]:
        return list(cut(self.job, read(self.job, *self.groups[number], np.random.default_rng())))


class MixedRowGroups:
    """Each element is the batches of eight row groups."""

    def __init__(self, job: Job):
        self.job = job
        groups = job.row_groups
        groups = [groups[number] for number in np.random.default_rng(0).permutation(len(groups))]
        self.mixes = [groups[at : at + MIXED] for at in range(0, len(groups) - MIXED + 1, MIXED)]

    def __len__(self) -> int:
        return len(self.mixes)

    def __getitem__(self, number: int) -> list[tuple[np.ndarray, ...]]:
        lanes = [
            read(self.job, *group, np.random.default_rng([0, number, lane]))
            for lane, group in enumerate(self.mixes[number])
        ]
        each = self.job.batch_size // MIXED
        starts = range(0, min(len(floats) for floats, _, _ in lanes) - each + 1, each)
        return [
            tuple(map(_joined, zip(*(_part(lane, at, each) for lane in lanes), strict=True)))
            for at in starts
        ]


def _part(lane: tuple[np.ndarray, ...], at: int, rows: int) -> tuple[np.ndarray, ...]:
    return tuple(block[at : at + rows] for block in lane)


def _joined(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Column by column underneath, as the parts are."""
    return np.concatenate([part.T for part in parts], axis=-1).T


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    def run(options: dict[str, int], processes: int, source: type = RowGroups) -> Iterator[int]:
        data = (
            grain.MapDataset.source(source(job))
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
        "our shuffle, 2 threads, 2 ahead": lambda: run(
            {"num_threads": 2, "prefetch_buffer_size": 2}, 0, MixedRowGroups
        ),
        "our shuffle, 4 threads, 4 ahead": lambda: run(
            {"num_threads": 4, "prefetch_buffer_size": 4}, 0, MixedRowGroups
        ),
    }


if __name__ == "__main__":
    serve(arms)
