"""One Spark session for all tests of this room; it comes up inside the first test that asks for it."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

settings.register_profile("etl", deadline=None)  # timings say nothing on a busy machine
settings.load_profile("etl")


@pytest.fixture(scope="session")
def spark():
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    from sluice.etl.spark.session import DEFAULTS, ROOT

    conf = SparkConf().setMaster("local[2]").setAppName("tests").setAll(list(DEFAULTS.items()))
    conf.setAll([("spark.driver.host", "127.0.0.1"), ("spark.driver.bindAddress", "127.0.0.1"),
                 ("spark.executorEnv.PYTHONPATH", str(ROOT)), ("spark.sql.shuffle.partitions", "2"),
                 ("spark.python.daemon.module", "sluice.etl.spark.processes.daemon"),
                 ("spark.ui.showConsoleProgress", "false"), ("spark.pyspark.python", sys.executable),
                 # What is short-lived is compiled quickly rather than well.
                 ("spark.driver.extraJavaOptions", " ".join([
                     f"-Dlog4j2.configurationFile={ROOT}/etl/log4j2.properties", "-XX:TieredStopAtLevel=1",
                     "-XX:+UseSerialGC"]))])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    yield session
    session.stop()
