"""tf.data: row groups in parallel, batches cut from blocks before the transform, as its performance guide advises."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import numpy as np

from benchmarks.peers.arrow import read
from benchmarks.peers.functions import apply
from benchmarks.peers.serve import Arm, Job, Prepared, serve

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf


def arms(job: Job, _prepared: Prepared) -> dict[str, Arm]:
    groups = job.row_groups
    numbers = itertools.count()

    def block(group: np.int64) -> tuple[np.ndarray, ...]:
        return read(job, *groups[group], np.random.default_rng(next(numbers)))

    def shuffled(group: tf.Tensor) -> tuple[tf.Tensor, ...]:
        kinds = [tf.float32, tf.int32, tf.string]
        floats, ids, texts = tf.numpy_function(block, [group], kinds, stateful=False)
        return (
            tf.ensure_shape(floats, (None, len(job.floats))),
            tf.ensure_shape(ids, (None, len(job.ids))),
            tf.ensure_shape(texts, (None,)),
        )

    def applied(dense: np.ndarray, texts: np.ndarray) -> np.ndarray:
        return apply(job.function, dense, texts)

    def transformed(floats: tf.Tensor, ids: tf.Tensor, texts: tf.Tensor) -> tuple[tf.Tensor, ...]:
        dense = floats[:, :-1]
        if job.function == "log1p":
            return tf.math.log1p(dense), ids, floats[:, -1]
        made = tf.numpy_function(applied, [dense, texts], tf.float32, stateful=False)
        return tf.ensure_shape(made, dense.shape), ids, floats[:, -1]

    def run(parallel: int, transforms: int, prefetch: int) -> Iterator[int]:
        options = tf.data.Options()
        options.deterministic = False
        data = (
            tf.data.Dataset.range(len(groups))
            .shuffle(len(groups))
            .repeat()
            .map(shuffled, num_parallel_calls=parallel)
            .rebatch(job.batch_size, drop_remainder=True)
            .map(transformed, num_parallel_calls=transforms)
            .prefetch(prefetch)
            .with_options(options)
        )
        for dense, _ids, _label in data:
            yield int(dense.shape[0])

    auto = tf.data.AUTOTUNE
    return {
        "AUTOTUNE": lambda: run(auto, auto, auto),
        **{
            f"{p} readers, {t} for the transform": lambda p=p, t=t: run(p, t, 8)
            for p, t in ((1, 1), (2, 1), (4, 2))
        },
    }


if __name__ == "__main__":
    serve(arms)
