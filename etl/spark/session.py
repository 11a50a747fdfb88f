"""`open_session`: opens the Spark session of a job. In local mode only this machine can reach it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pyspark import SparkConf, SparkContext
from pyspark.sql import DataFrame, SparkSession

import sluice

Task = TypeVar("Task")
ROOT = Path(sluice.__file__).resolve().parent.parent
"""The folder that `sluice` is imported from: the checkout, or site-packages."""

DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # Column names are case-sensitive, as on the local engine.
    "spark.sql.caseSensitive": "true",
    # Larger batches need fewer calls of the Python workers, as long as they fit into a core's cache.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
    # A few cells. Otherwise a worker would get all cells of a file at once.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 2**20),
    # Small enough that all cores end at about the same time, large enough for the start of a task to pay.
    "spark.sql.files.maxPartitionBytes": str(64 * 2**20),
    # SQL passes and calls of plain functions share Python workers only if both have the same setting.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}


PARTITION_BYTES = 32 * 2**20
PARTITIONS = "spark.sql.shuffle.partitions"


def partitions_for(input_bytes: int, cores: int) -> int:
    """Returns the number of partitions of a shuffle: each has about `PARTITION_BYTES`, and each core gets one or
    more."""
    return min(100_000, max(cores, -(-input_bytes // PARTITION_BYTES)))


def fit_session(spark: SparkSession, input_bytes: int, relational: bool) -> None:
    """Fits settings to a job, unless the user has set them: the number of shuffle partitions to the size of the input,
    and the effort for plans. Java only moves cells if a job is not `relational`, so its few plans stay as they are, and
    it compiles no code for them."""
    context = spark.sparkContext
    effort = str(relational).lower()
    fitting = {
        PARTITIONS: str(partitions_for(input_bytes, context.defaultParallelism)),
        "spark.sql.adaptive.enabled": effort,
        "spark.sql.codegen.wholeStage": effort,
    }
    for key, value in fitting.items():
        if not context.getConf().contains(key):
            spark.conf.set(key, value)


def number_tasks(
    spark: SparkSession, tasks: Sequence[Task]
) -> tuple[Callable[[], Sequence[Task]], DataFrame]:
    """Returns a function that gives workers the tasks, and a frame with a partition for each task: its number `id`."""
    sent = spark.sparkContext.broadcast(tasks)
    return lambda: sent.value, spark.range(0, len(tasks), 1, max(1, len(tasks)))


def open_session() -> SparkSession:
    """Opens a session with the options of spark-submit, and our defaults for the others. In local mode it listens on
    127.0.0.1 only, and requires a secret."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # Only with a running Java process does a SparkConf have the options of spark-submit, such as `--master`.
        SparkContext._ensure_initialized()
    conf = SparkConf()
    defaults = dict(DEFAULTS)
    master = conf.get("spark.master") or "local[*]"
    if master.startswith("local"):
        defaults |= {
            "spark.master": master,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
        # Other users of this machine can reach the ports, so Spark makes a secret that callers must have.
        defaults["spark.authenticate"] = "true"
        # Workers use the driver's Python and code.
        defaults["spark.executorEnv.PYTHONPATH"] = str(ROOT)
        defaults["spark.python.daemon.module"] = "sluice.etl.spark.daemon"
        os.environ.setdefault("PYSPARK_PYTHON", conf.get("spark.pyspark.python") or sys.executable)
    for key, value in defaults.items():
        conf.setIfMissing(key, value)
    return SparkSession.builder.appName("sluice-etl").config(conf=conf).getOrCreate()


def start_worker(spark: SparkSession) -> None:
    """In local mode, starts a Python worker, and the process that workers are forked from. Its imports take about a
    second. Meanwhile the driver plans the first pass. On a cluster, free cores may come late."""
    context = spark.sparkContext
    if str(context.master).startswith("local"):
        context.parallelize([0], 1).foreach(lambda _: None)
