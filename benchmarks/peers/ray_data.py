"""Ray Data: blocks shuffled and transformed where they are read (batches before maps), tensors from iter_batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from benchmarks.peers.arrow import blocks_of, store_of, texts_of
from benchmarks.peers.functions import apply
from benchmarks.peers.serve import Arm, Job, Prepared, serve

os.environ |= {
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_TQDM": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONPATH": os.getcwd(),
}
import ray

REPEATS = 40  # an epoch's start takes about a second, which is not to be counted: one epoch over the files many times


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=2 * 2**30,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False

    def shuffled(table: pa.Table) -> dict[str, np.ndarray]:
        order = np.random.default_rng().permutation(table.num_rows)
        floats, ids = blocks_of(table, job, order)
        dense = apply(job.function, floats[:, :-1], texts_of(table, job, order))
        return {"dense": dense, "ids": ids, "label": floats[:, -1]}

    def run(prefetch: int, rows: int | None, local: int | None) -> Iterator[int]:
        data = ray.data.read_parquet(
            list(job.files) * REPEATS,
            columns=job.columns,
            shuffle="files",
            filesystem=store_of(job) if job.store else None,
        )
        data = data.map_batches(
            shuffled, batch_format="pyarrow", batch_size=rows, zero_copy_batch=True
        )
        for batch in data.iter_torch_batches(
            batch_size=job.batch_size,
            prefetch_batches=prefetch,
            drop_last=True,
            local_shuffle_buffer_size=local,
        ):
            yield len(batch["label"])

    return {
        "prefetch 1": lambda: run(1, None, None),
        "prefetch 4": lambda: run(4, None, None),
        "prefetch 4, blocks of 32,768": lambda: run(4, 32768, None),
        "prefetch 4, its own local shuffle": lambda: run(4, None, 32768),
    }


if __name__ == "__main__":
    serve(arms)
