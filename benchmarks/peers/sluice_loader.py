"""Sluice as the races see it: tuned while it runs, and at fixed settings that a person would try."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from os.path import dirname
from typing import Any

import numpy as np
import torch

from benchmarks.peers import small_functions
from benchmarks.peers.serve import Arm, Job, Prepared, serve
from sluice import Knobs, Loader, Transform, takes_matrix

SETTINGS = {
    "one worker a stage": "",
    "2 readers": "decode=2",
    "2 readers, 2 for the function": "decode=2,function=2",
    "2 processes for the function": "function=2,function.backend=process",
}
FAR = {f"{n} row groups in flight": f"fetch={n},decode=2" for n in (4, 8, 16, 32)}


@takes_matrix
def log1p(dense: np.ndarray) -> None:
    """Numpy is as fast only on processors with AVX-512, and 3 to 12 times slower on others."""
    torch.from_numpy(dense).log1p_()


def transform(job: Job) -> Transform:
    """The job's function, under the one name that the settings use."""
    if job.texts:
        return Transform(
            small_functions.walk, "function", reads=[job.texts], gives={"walked": "float32"}
        )
    function = small_functions.bucket if job.function == "bucket" else f"{__spec__.name}:log1p"
    return Transform(function, "function", reads=job.floats[:-1])


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    query = f"?endpoint_override={job.store}&scheme=http&region=us-east-1"
    # In a store, Sluice reads tables: the folder has a Delta log.
    source = f"s3://{dirname(job.files[0])}{query}" if job.store else list(job.files)
    dense = [*job.floats[:-1], *(["walked"] if job.texts else [])]
    alone = Knobs(workers={"decode": 1, "function": 1})

    def run(**how: Any) -> Iterator[int]:
        """A fresh loader: one that waits would fill its buffers while others are measured."""
        with Loader(
            source,
            batch_size=job.batch_size,
            read_ahead_epochs=sys.maxsize,
            roles={"label": job.floats[-1], "dense": dense, "sparse": list(job.ids)},
            transforms=[transform(job)],
            **how,
        ) as loader:
            while True:
                for batch in loader:
                    yield batch.rows

    return {
        "auto": lambda: run(tuning="auto"),
        **{
            name: lambda text=text: run(tuning="fixed", knobs=alone.parse(text))
            for name, text in {**SETTINGS, **(FAR if job.store else {})}.items()
        },
    }


if __name__ == "__main__":
    serve(arms)
