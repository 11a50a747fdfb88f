"""SPDL: one pipeline of functions in threads, with a concurrency for each stage; a function
that holds the lock in processes, as its FAQ advises."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
from spdl.pipeline import PipelineBuilder

from benchmarks.peers.arrow import read
from benchmarks.peers.serve import Arm, Job, Prepared, serve
from benchmarks.peers.torch_loader import cut, transformed


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    groups = job.row_groups

    def source() -> Iterator[tuple[int, int]]:
        for epoch in itertools.count():
            for number in np.random.default_rng(epoch).permutation(len(groups)):
                yield epoch, int(number)

    def batches(item: tuple[int, int]) -> list[tuple[np.ndarray, ...]]:
        return list(cut(job, read(job, *groups[item[1]], np.random.default_rng(item))))

    def run(readers: int, transformers: int, processes: bool) -> Iterator[int]:
        executor = (
            ProcessPoolExecutor(transformers, get_context("forkserver")) if processes else None
        )
        pipeline = (
            PipelineBuilder()
            .add_source(source())
            .pipe(batches, concurrency=readers)
            .disaggregate()
            .pipe(partial(transformed, job), concurrency=transformers, executor=executor)
            .add_sink(8)
            .build(num_threads=readers + transformers)
        )
        with pipeline.auto_stop():
            for dense, _ids, _label in pipeline:
                yield len(dense)

    return {
        f"{r} readers, {t} {'processes' if p else 'threads'} for the transform": lambda r=r, t=t, p=p: (
            run(r, t, p)
        )
        for r, t, p in (
            *((1, 1, False), (2, 1, False), (4, 2, False)),
            *([(1, 2, True)] if job.function != "log1p" else []),
        )
    }


if __name__ == "__main__":
    serve(arms)
