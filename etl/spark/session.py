"""The Spark session of a job: quiet, reachable from this machine alone in local mode, with our code on its workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import sluice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(sluice.__file__).resolve().parent.parent
"""The folder that `sluice` is imported from: the checkout, or site-packages."""

DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # Names of columns are those of the spec, letter by letter, as on the local engine.
    "spark.sql.caseSensitive": "true",
    # Whole batches cross to the Python workers: the larger, the fewer calls, up to what a core's cache holds.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
    # Splits small enough that cores end together, large enough that a task's start (looking vocabularies up) pays.
    "spark.sql.files.maxPartitionBytes": str(64 * 2**20),
    # Passes in SQL and calls of plain functions share Python workers, which must be set alike for that.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    # Side tables in CSV may be encoded in any way that Java knows.
    "spark.sql.legacy.javaCharsets": "true",
    # If many rows have one key, a join with a side table or a vocabulary takes them in pieces.
    "spark.sql.adaptive.skewJoin.enabled": "true",
    "spark.sql.sources.commitProtocolClass": "org.apache.spark.sql.execution.datasources.SQLHadoopMapReduceCommitProtocol",  # noqa: E501
}


PARTITION_BYTES = 32 * 2**20
_PARTITIONS = "spark.sql.shuffle.partitions"


def partitions_for(input_bytes: int, cores: int) -> int:
    """The number of partitions of a shuffle: each of about `PARTITION_BYTES`, and one for each core at least."""
    return min(100_000, max(1, cores, -(-input_bytes // PARTITION_BYTES)))


def fit_partitions(spark: SparkSession, frames: Iterable[DataFrame]) -> None:
    """Makes shuffles as wide as what is read needs, unless somebody has said how wide they are."""
    context = spark.sparkContext
    if not context.getConf().contains(_PARTITIONS):
        size = sum(
            int(str(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
            for frame in frames
        )
        spark.conf.set(_PARTITIONS, str(partitions_for(size, context.defaultParallelism)))


def open_session(name: str) -> SparkSession:
    """Opens a session with the options that spark-submit was given and our defaults for the others; local mode listens
    on 127.0.0.1 only, and talks to nobody without its secret."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # A SparkConf only holds spark-submit's options once its Java side is known; else `--master` is lost.
        SparkContext._ensure_initialized()
    conf = SparkConf()
    defaults = dict(DEFAULTS)
    master = conf.get("spark.master", "local[*]") or "local[*]"
    if master.startswith("local"):
        defaults |= {
            "spark.master": master,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
        # Its ports answer on this machine, which others may use, too: Spark makes a secret that callers must have.
        defaults["spark.authenticate"] = "true"
        # Workers run what the driver runs, and find our code where the driver found it.
        defaults["spark.executorEnv.PYTHONPATH"] = str(ROOT)
        defaults["spark.python.daemon.module"] = "sluice.etl.spark.processes.daemon"
        os.environ.setdefault(
            "PYSPARK_PYTHON", conf.get("spark.pyspark.python", sys.executable) or sys.executable
        )
    for key, value in defaults.items():
        conf.setIfMissing(key, value)
    return SparkSession.builder.appName(name).config(conf=conf).getOrCreate()
