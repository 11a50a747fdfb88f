"""SPDL: one pipeline of functions in threads, with a concurrency for each stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from spdl.pipeline import PipelineBuilder

from benchmarks.peers.arrow import read
from benchmarks.peers.serve import Arm, Job, Prepared, serve


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    groups = job.row_groups

    def source() -> Iterator[tuple[int, int]]:
        for epoch in itertools.count():
            for number in np.random.default_rng(epoch).permutation(len(groups)):
                yield epoch, int(number)

    def batches(item: tuple[int, int]) -> list[tuple[torch.Tensor, ...]]:
        floats, ids = read(job, *groups[item[1]], np.random.default_rng(item))
        size = job.batch_size
        return [
            (
                torch.from_numpy(floats[at : at + size, :-1]),
                torch.from_numpy(ids[at : at + size]),
                torch.from_numpy(floats[at : at + size, -1]),
            )
            for at in range(0, len(ids) - size + 1, size)
        ]

    def logged(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return torch.log1p(batch[0]), *batch[1:]

    def run(readers: int, transformers: int) -> Iterator[int]:
        pipeline = (
            PipelineBuilder()
            .add_source(source())
            .pipe(batches, concurrency=readers)
            .disaggregate()
            .pipe(logged, concurrency=transformers)
            .add_sink(8)
            .build(num_threads=readers + transformers)
        )
        with pipeline.auto_stop():
            for dense, _ids, _label in pipeline:
                yield len(dense)

    return {
        f"{r} readers, {t} for the transform": lambda r=r, t=t: run(r, t)
        for r, t in ((1, 1), (2, 1), (4, 2))
    }


if __name__ == "__main__":
    serve(arms)
