"""tf.data's AUTOTUNE on chains of parallel maps that sleep: the parallelism that its own model ends at.

Standard input: one JSON object, {"algorithm": name, "seconds": s, "at_once": n, "graphs": [{"costs": [seconds, …],
"cores": n}, …]}. The last line of the output: a list of {"workers": […], "costs": […]}, the costs as tf.data measured
them. A graph's functions share a thread pool of its own, as large as its budget of cores: they sleep instead of
computing, so that the budget is what the graph says on any machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf


def sleeping(seconds: float) -> Callable[[tf.Tensor], tf.Tensor]:
    def work(element: np.int64) -> np.int64:
        time.sleep(seconds)
        return element

    return lambda element: tf.ensure_shape(
        tf.numpy_function(work, [element], tf.int64, stateful=False), ()
    )


def dataset(costs: list[float], cores: int, algorithm: str) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = True
    options.autotune.cpu_budget = cores
    options.autotune.initial_parallelism = 1
    options.autotune.autotune_algorithm = tf.data.experimental.AutotuneAlgorithm[algorithm]
    options.threading.private_threadpool_size = cores
    options.experimental_optimization.map_fusion = False  # a stage is a stage
    options.experimental_optimization.inject_prefetch = False
    data = tf.data.Dataset.range(2**62)
    for cost in costs:
        data = data.map(sleeping(cost), num_parallel_calls=tf.data.AUTOTUNE)
    return data.with_options(options)


def settled(graph: dict[str, Any], algorithm: str, seconds: float) -> dict[str, list[float]]:
    iterator = iter(dataset(graph["costs"], graph["cores"], algorithm))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        next(iterator)
    model = tf.data.experimental.get_model_proto(iterator)
    maps = [
        node
        for _, node in sorted(model.nodes.items(), reverse=True)
        if node.name.startswith("ParallelMap")
    ]
    workers = [
        int(p.state_value) for node in maps for p in node.parameters if p.name == "parallelism"
    ]
    return {
        "workers": workers,
        "costs": [node.processing_time / max(1, node.num_elements) / 1e9 for node in maps],
    }


def main() -> None:
    asked = json.load(sys.stdin)
    with ThreadPoolExecutor(asked["at_once"]) as pool:
        found = list(
            pool.map(lambda g: settled(g, asked["algorithm"], asked["seconds"]), asked["graphs"])
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
