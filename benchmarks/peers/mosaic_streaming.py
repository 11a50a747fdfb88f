"""mosaicml-streaming: its own MDS shards, made beforehand. As its guide writes tables, a sample is a row; in its best
form for a table, a sample is a block of rows that were shuffled when it was written.

It imports torchvision, of which there is no build for a torch without CUDA, for images only: empty modules stand in.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import numpy as np
import torch

from benchmarks.peers.arrow import read
from benchmarks.peers.serve import Arm, Job, Prepared, serve, size_of

for _name, _classes in (
    ("torchvision", ()),
    ("torchvision.transforms", ()),
    ("torchvision.datasets", ("VisionDataset",)),
    ("torchvision.transforms.functional", ("to_tensor",)),
):
    _module = types.ModuleType(_name)
    _module.__spec__ = ModuleSpec(_name, None)
    for _class in _classes:
        setattr(_module, _class, type(_class, (), {}))
    sys.modules[_name] = _module

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

SINGLE = (
    100_000  # rows of the form with a sample a row: it is slow, and more would only take longer
)
BLOCK = 1024


def arms(job: Job, prepared: Prepared) -> dict[str, Arm]:
    clean_stale_shared_memory()
    random = np.random.default_rng(0)

    def written(name: str, rows: int, most: int) -> str:
        """A folder of samples of so many rows, at most so many samples."""
        folder = os.path.join(job.folder, name)
        shape = (rows, len(job.floats)), (rows, len(job.ids))
        columns = {
            "floats": f"ndarray:float32:{shape[0][0]},{shape[0][1]}",
            "ids": f"ndarray:int32:{shape[1][0]},{shape[1][1]}",
        }
        blocks = (read(job, path, group, random)[:2] for path, group in job.row_groups)
        samples = (
            (floats[at : at + rows], ids[at : at + rows])
            for floats, ids in blocks
            for at in range(0, len(ids) - rows + 1, rows)
        )
        with MDSWriter(out=folder, columns=columns) as writer:
            for floats, ids in itertools.islice(samples, most):
                writer.write(
                    {"floats": np.ascontiguousarray(floats), "ids": np.ascontiguousarray(ids)}
                )
        return folder

    single = written("rows", 1, SINGLE)
    began = time.perf_counter()
    block = written("blocks", BLOCK, sys.maxsize)
    prepared.seconds, prepared.bytes = time.perf_counter() - began, size_of(block)

    def run(folder: str, samples: int, workers: int) -> Iterator[int]:
        data = StreamingDataset(local=folder, shuffle=True, batch_size=samples)
        loader = StreamingDataLoader(
            data,
            batch_size=samples,
            num_workers=workers,
            drop_last=True,
            prefetch_factor=4 if workers else None,
        )
        for _epoch in itertools.count():
            for batch in loader:
                dense, _ids = (
                    torch.log1p(batch["floats"].flatten(0, 1)[:, :-1]),
                    batch["ids"].flatten(0, 1),
                )
                yield len(dense)

    size = job.batch_size
    return {
        **{f"a sample a row, {w} workers": lambda w=w: run(single, size, w) for w in (0, 2)},
        **{
            f"blocks of {BLOCK} rows, {w} workers": lambda w=w: run(block, size // BLOCK, w)
            for w in (0, 2)
        },
    }


if __name__ == "__main__":
    serve(arms)
